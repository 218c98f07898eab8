"""Files of prompts that are packed: read like plain ones, refused whole where they are damaged."""

from __future__ import annotations

import gzip
import hashlib
import io
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import zstandard

from llmq.scheduler import input_file, lines
from llmq.scheduler.compression import Codec, compress
from llmq.scheduler.duplicates import Duplicates
from llmq.scheduler.errors import InputFileError
from llmq.scheduler.lines import check, open_input, read_lines

Pack = Callable[[bytes], bytes]

PACKS = [
    pytest.param(gzip.compress, id="gzip"),
    pytest.param(zstandard.ZstdCompressor().compress, id="zstd"),
    pytest.param(lambda data: b"".join(compress(line, Codec.GZIP) for line in halves(data)), id="members"),
    pytest.param(lambda data: b"".join(compress(line, Codec.ZSTD) for line in halves(data)), id="frames"),
]

LINES = b"".join(b'{"custom_id": "q-%d", "prompt": "%d"}\n' % (number, number**5) for number in range(5000))


def halves(data: bytes) -> tuple[bytes, bytes]:
    """Cut in the middle of a line."""
    return data[: len(data) // 2], data[len(data) // 2 :]


def refusal(content: bytes) -> str:
    """Return what is said about a file that is refused."""
    with pytest.raises(InputFileError) as refused, open_input("-", stdin=io.BytesIO(content)) as file:
        check(file, skip_bad=True)
    return str(refused.value)


class TestReading:
    """However it is packed, it is the same file."""

    @pytest.mark.parametrize("pack", PACKS)
    def test_a_packed_file_has_the_lines_and_the_digest_of_the_plain_one(self, tmp_path: Path, pack: Pack) -> None:
        """Whatever its name says: so a batch is resumed by the file that was unpacked since."""
        path = tmp_path / "prompts.jsonl"
        path.write_bytes(pack(LINES))
        with open_input(path) as file:
            checked = check(file)
            keys = [line.key for line in read_lines(file, checked)]
            assert path.stat().st_size == file.size
            assert hashlib.sha256(LINES).hexdigest() == file.digest
        assert [f"q-{number}" for number in range(5000)] == keys

    @pytest.mark.parametrize("pack", PACKS)
    def test_stdin_may_be_packed(self, pack: Pack) -> None:
        """It is spooled as it came."""
        with open_input("-", stdin=io.BytesIO(pack(LINES))) as file:
            assert 5000 == check(file).lines
            assert len(pack(LINES)) == file.size

    def test_the_check_reports_bytes_of_the_file_as_it_stands_on_the_disk(self, tmp_path: Path) -> None:
        """So that a bar ends at its end."""
        path = tmp_path / "prompts.jsonl.gz"
        path.write_bytes(gzip.compress(LINES * 4))
        told: list[int] = []
        with open_input(path) as file:
            with pytest.raises(InputFileError):  # the ids are repeated
                check(file, on_progress=told.append)
            assert told
            assert all(0 < offset <= file.size for offset in told)

    def test_a_name_that_promises_more_than_the_content_is_no_fault(self, tmp_path: Path) -> None:
        """Plain lines in a file called .gz."""
        path = tmp_path / "prompts.jsonl.gz"
        path.write_bytes(LINES)
        with open_input(path) as file:
            assert (5000, Codec.PLAIN) == (check(file).lines, file.codec)


class TestDamage:
    """One clear line, before anything is queued."""

    @pytest.mark.parametrize("pack", PACKS)
    def test_a_file_that_was_cut_says_after_which_line(self, pack: Pack) -> None:
        """A download that broke off."""
        packed = pack(LINES)
        said = refusal(packed[:-9])
        assert said.startswith("stdin: its ")
        assert "data is cut short, after " in said
        assert said.endswith("lines; nothing was queued. Make the file again, or get it again from where it came")

    def test_a_file_that_unpacks_for_ever_to_nothing_is_ended(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Blank lines and lines beyond the limit: memory is constant, and there is a bound to the time."""
        monkeypatch.setattr(input_file, "_MOST_BARREN", 1 << 18)
        for content in (b"\n" * (1 << 19), b'"' + b"x" * (4 << 20)):
            for codec in (Codec.GZIP, Codec.ZSTD):
                said = refusal(compress(b'"first"\n' + content, codec))
                assert "unpacks to more than 262,144 bytes without a line that could be used" in said

    def test_an_endless_line_is_passed_over_in_constant_memory(self) -> None:
        """As in a plain file; the lines behind it are read."""
        packed = compress(b'"' + b"x" * (96 << 20) + b'"\n"last"\n', Codec.ZSTD)
        with open_input("-", stdin=io.BytesIO(packed)) as file:
            tracemalloc.start()
            try:
                checked = check(file, skip_bad=True)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
        assert (2, 1) == (checked.lines, checked.fault_total)
        assert peak < 64 << 20


class TestManyLines:
    """Two passes over many lines take no more memory than over few."""

    def test_memory_is_the_same_for_five_times_as_many_lines(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Packed, with ids on the disk in runs of 1,000; the one that is repeated is found across runs."""
        monkeypatch.setattr(lines, "Duplicates", partial(Duplicates, capacity=1000))
        peaks = []
        for count in (5_000, 25_000):
            path = tmp_path / f"{count}.jsonl.zst"
            numbered = [b'{"custom_id":"q-%d","prompt":"x"}\n' % number for number in (*range(count), count // 3)]
            path.write_bytes(zstandard.ZstdCompressor().compress(b"".join(numbered)))
            del numbered
            with open_input(path) as opened:
                tracemalloc.start()
                try:
                    checked = check(opened, skip_bad=True)
                    peaks.append(tracemalloc.get_traced_memory()[1])
                finally:
                    tracemalloc.stop()
                assert [(count + 1, count // 3 + 1)] == list(checked.duplicates)
        few, many = peaks
        assert many < few + (1 << 20)
