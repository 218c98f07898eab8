"""The storage: one suite that every backend passes, and what is special about a folder."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from llmq.gateway.batch.storage import Storage, StorageError, open_storage
from llmq.scheduler.errors import UsageError


@pytest.fixture(params=["folder", "file://", "memory://"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    """An empty storage of each kind."""
    places = {"folder": str(tmp_path), "file://": f"file://{tmp_path}", "memory://": f"memory://{tmp_path.name}"}
    storage = open_storage(places[request.param], "q", tmp_path)
    yield storage
    storage.close()
    fsspec.filesystem("memory").store.clear()


async def spooled(storage: Storage, path: str, *pieces: bytes) -> None:
    """Make an object of pieces."""
    async with await storage.spool() as spool:
        for piece in pieces:
            await spool.write(piece)
        await spool.commit(path)


class TestEveryStorage:
    """What the gateway relies on."""

    async def test_an_object_is_read_as_it_was_written(self, storage: Storage) -> None:
        """And may be replaced as a whole."""
        await storage.write("a/b/c.json", b"one")
        assert b"one" == await storage.read("a/b/c.json")
        await storage.write("a/b/c.json", b"two")
        assert [b"two", None] == await storage.read_many(["a/b/c.json", "a/b/d.json"])

    async def test_names_are_those_of_the_folder_alone(self, storage: Storage) -> None:
        """Folders in it count as one name each; a folder that is not there has none."""
        for path in ("a/2.json", "a/1.json", "a/sub/3.json", "b/4.json"):
            await storage.write(path, b"x")
        assert ["1.json", "2.json", "sub"] == await storage.names("a")
        assert [] == await storage.names("nowhere")

    async def test_what_is_missing_is_a_missing_file(self, storage: Storage) -> None:
        """Whether its folder is there or not."""
        await storage.write("a/1.json", b"x")
        for path in ("a/2.json", "nowhere/1"):
            with pytest.raises(FileNotFoundError):
                await storage.read(path)
            with pytest.raises(FileNotFoundError):
                await storage.open_input(path, "input", 100)
        assert None is await storage.read_if_there("a/3.json")

    async def test_what_is_removed_is_gone(self, storage: Storage) -> None:
        """Removing what is not there is no error."""
        for path in ("a/1", "a/b/2", "c/3"):
            await storage.write(path, b"x")
        await storage.remove("c/3")
        await storage.remove("c/3")
        await storage.remove_folder("a")
        await storage.remove_folder("a")
        assert ([], []) == (await storage.names("a"), await storage.names("c"))

    async def test_a_large_object_comes_in_pieces(self, storage: Storage) -> None:
        """It goes in and out in pieces, byte for byte."""
        pieces = [bytes([n]) * 300_000 for n in range(8)]
        await spooled(storage, "content/x", *pieces)
        blocks = [block async for block in storage.blocks("content/x")]
        assert b"".join(pieces) == b"".join(blocks)
        assert max(map(len, blocks)) <= 256 * 1024

    async def test_what_was_not_committed_never_was(self, storage: Storage) -> None:
        """A spool that is given up leaves no object."""
        async with await storage.spool() as spool:
            await spool.write(b"half")
        assert [] == [name for name in await storage.names("") if name != "aside"]
        assert [] == await storage.names("aside")

    async def test_lines_end_at_line_feeds_only(self, storage: Storage) -> None:
        """Wherever blocks end (F-134); a last line without its newline is one too."""
        lines = [b"a" * 200_000, "\u2028\x85".encode(), b"", b"b" * 400_000, b"c\r"]
        await spooled(storage, "x", b"\n".join(lines))
        assert lines == [line async for some in storage.lines("x") for line in some]
        await spooled(storage, "y", b"".join(line + b"\n" for line in lines))
        assert lines == [line async for some in storage.lines("y") for line in some]

    async def test_an_input_is_read_twice(self, storage: Storage) -> None:
        """It has a name for messages, and a digest."""
        await spooled(storage, "content/x", b'{"a": 1}\n\n{"b": 2}\n')
        with await storage.open_input("content/x", "file-1", 100) as file:
            passes = [[(number, raw) for number, raw, _ in file.raw_lines()] for _ in range(2)]
            assert ("file-1", 64) == (file.name, len(file.digest))
        assert [[(1, b'{"a": 1}\n'), (3, b'{"b": 2}\n')]] * 2 == passes

    async def test_a_cancelled_read_ends_before_its_file_is_closed(self, storage: Storage) -> None:
        """Nothing goes on in a thread for somebody who has left."""
        await spooled(storage, "x", b"x" * 3_000_000)
        reading = asyncio.create_task(read_all(storage, "x"))
        await asyncio.sleep(0)
        reading.cancel()
        await asyncio.wait([reading])
        assert reading.cancelled()
        assert 3_000_000 == await read_all(storage, "x")


async def read_all(storage: Storage, path: str) -> int:
    """Read an object; return its size."""
    return sum([len(block) async for block in storage.blocks(path)])


class TestFolder:
    """A storage in a folder."""

    async def test_a_path_through_a_file_is_a_missing_file(self, tmp_path: Path) -> None:
        """As in an object store, which has no folders."""
        storage = open_storage(str(tmp_path), "q", tmp_path)
        await storage.write("a/1", b"x")
        assert ([], None) == (await storage.names("a/1"), await storage.read_if_there("a/1/2"))
        storage.close()

    async def test_its_files_are_private(self, tmp_path: Path) -> None:
        """Prompts are nobody else's to read."""
        storage = open_storage(str(tmp_path / "new"), "q", tmp_path)
        await storage.write("a/1", b"x")
        modes = [path.stat().st_mode & 0o777 for path in tmp_path.joinpath("new", "queue-q").rglob("*")]
        assert {0o700, 0o600} == set(modes)
        storage.close()

    async def test_what_killed_uploads_left_is_removed(self, tmp_path: Path) -> None:
        """After an hour without a write; younger ones may still be written."""
        storage = open_storage(str(tmp_path), "q", tmp_path)
        aside = tmp_path / "queue-q" / "aside"
        aside.mkdir(parents=True)
        for name, age in (("old", 3700), ("young", 3500)):
            (aside / name).write_bytes(b"half")
            os.utime(aside / name, (time.time() - age,) * 2)
        await storage.tidy()
        assert ["young"] == await storage.names("aside")
        storage.close()

    async def test_a_storage_that_cannot_be_written_says_so(self, tmp_path: Path) -> None:
        """In the log's words, with the place."""
        (tmp_path / "file").write_bytes(b"")
        storage = open_storage(str(tmp_path / "file"), "q", tmp_path)
        with pytest.raises(StorageError, match=str(tmp_path / "file")):
            await storage.write("a/1", b"x")
        storage.close()

    async def test_queues_have_nothing_in_common(self, tmp_path: Path) -> None:
        """A gateway of one queue must not lead batches of another; by default all stand in `LLMQ_HOME`."""
        one, other = (open_storage(None, queue, tmp_path) for queue in ("one", ".."))
        await one.write("open/x", b"x")
        assert [] == await other.names("open")
        assert ["queue-one"] == sorted(os.listdir(tmp_path / "gateway"))
        one.close()
        other.close()


def test_an_unknown_kind_of_storage_is_said(tmp_path: Path) -> None:
    """At the start, with the name of what is missing."""
    with pytest.raises(UsageError, match="nonsense"):
        open_storage("nonsense://bucket", "q", tmp_path)
