"""Uploads: any body in any pieces, good or broken; and what an interrupted one leaves."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq.gateway.batch.conductor import Limits
from llmq.gateway.batch.folder_storage import FolderBackend
from llmq.gateway.batch.storage import AsyncSpool, Storage
from llmq.gateway.batch.upload import Upload, clean_name, receive_upload
from llmq.gateway.errors import ApiError
from tests.gateway.batch_gateway import gateway
from tests.redis.serving import until

TYPE = "multipart/form-data; boundary=xyz"


class Kept:
    """A spool that keeps what it gets."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        """Append."""
        self.data += data

    def commit(self, path: str) -> None:
        """Nothing comes after it."""

    def discard(self) -> None:
        """Nothing is to be removed."""


def body(*parts: tuple[str, bytes]) -> bytes:
    """Return a multipart body of (disposition, content) parts."""
    pieces = [f"--xyz\r\nContent-Disposition: form-data; {head}\r\n\r\n".encode() + content for head, content in parts]
    return b"\r\n".join([*pieces, b"--xyz--\r\n"])


async def received(
    data: bytes, *, content_type: str = TYPE, step: int = 1000, limit: int = 1000, length: int | None = None
) -> tuple[Upload, bytes]:
    """Receive a body in pieces of `step` bytes; return what it was, and the file."""

    async def chunks() -> AsyncIterator[bytes]:
        for start in range(0, len(data), step):
            yield data[start : start + step]

    kept = Kept()

    async def do(work: object, *arguments: object) -> None:
        work(*arguments)  # type: ignore[operator]

    headers = {"content-type": content_type} | ({} if length is None else {"content-length": str(length)})
    async with AsyncSpool(kept, do) as spool:
        upload = await receive_upload(headers, chunks(), spool, limit)
        await spool.commit("x")
    return upload, kept.data


FILE = ('name="file"; filename="in.jsonl"', b'{"a": 1}\n')
PURPOSE = ('name="purpose"', b"batch")


class TestGoodBodies:
    """What is well formed."""

    @pytest.mark.parametrize("parts", [(FILE, PURPOSE), (PURPOSE, FILE)])
    @pytest.mark.parametrize("step", [1, 7, 1000])
    async def test_a_body_may_come_in_any_order_and_pieces(
        self, parts: tuple[tuple[str, bytes], ...], step: int
    ) -> None:
        """Fields before or behind the file, cut anywhere."""
        upload, content = await received(body(*parts), step=step)
        assert ("in.jsonl", {"purpose": "batch"}, FILE[1]) == (upload.filename, upload.fields, content)

    @given(st.binary(max_size=300), st.integers(1, 50))
    def test_any_content_comes_through(self, content: bytes, step: int) -> None:
        """Also such that looks like a boundary in part."""
        content = content.replace(b"\r\n--xyz", b"") + b"\r\n--xy"
        _, kept = asyncio.run(received(body((FILE[0], content), PURPOSE), step=step))
        assert content == kept

    @pytest.mark.parametrize(
        ("given_name", "name"),
        [
            ("../../etc/passwd", "passwd"),
            ("C:\\\\windows\\\\x.jsonl", "x.jsonl"),
            ("a\x00b\x1b[31m.jsonl", "ab[31m.jsonl"),
            ("..", ".."),
            ("/", "file"),
            ("x" * 300, "x" * 255),
        ],
    )
    def test_a_name_is_only_text(self, given_name: str, name: str) -> None:
        """What stands before a slash, and what terminals obey, is taken off; no path is ever made of it."""
        assert name == clean_name(given_name.replace("\\\\", "\\"))


class TestBrokenBodies:
    """What is not: an error that says so, and nothing kept."""

    @pytest.mark.parametrize(
        ("data", "status"),
        [
            (b"", 400),
            (b"no multipart at all", 400),
            (body(FILE)[:-6], 400),
            (body(FILE)[:40], 400),
            (body(PURPOSE), 400),
            (body(FILE, FILE), 400),
            (body(('name="file"', b"x" * 1001)), 413),
            (body(('name="purpose"', b"x" * 5000), FILE), 400),
            (body(*[(f'name="f{n}"', b"") for n in range(20)]), 400),
            (b"--xyz\r\n" + b"X" * 10_000, 400),
            (b"--xyz\r\nno header\r\n\r\n", 400),
            (body(('name="file"; filename="' + "x" * 20_000 + '"', b"{}")), 400),
            (body(('name="file"' + "".join(f"\r\nX-{n}: {'v' * 2000}" for n in range(10)), b"{}")), 400),
        ],
    )
    @pytest.mark.parametrize("step", [1, 1000])
    async def test_a_broken_body_is_refused(self, data: bytes, status: int, step: int) -> None:
        """400, or 413 as soon as it is too large."""
        with pytest.raises(ApiError) as refused:
            await received(data, step=step)
        assert status == refused.value.status

    @given(st.binary(max_size=400), st.integers(1, 30))
    def test_any_bytes_are_refused_or_read(self, data: bytes, step: int) -> None:
        """Nothing else comes of them (F-135)."""
        status = 400
        try:
            asyncio.run(received(b"--xyz\r\n" + data, step=step))
        except ApiError as error:
            status = error.status
        assert status in (400, 413)

    @pytest.mark.parametrize(
        ("content_type", "status"),
        [("application/json", 415), ("", 415), ("multipart/form-data", 400), ("multipart/form-data; boundary=", 400)],
    )
    async def test_another_type_is_refused(self, content_type: str, status: int) -> None:
        """Before the body is looked at."""
        with pytest.raises(ApiError) as refused:
            await received(body(FILE), content_type=content_type)
        assert status == refused.value.status

    async def test_a_body_that_says_it_is_too_large_is_not_read(self) -> None:
        """Its Content-Length is enough."""
        with pytest.raises(ApiError) as refused:
            await received(body(FILE, PURPOSE), length=10**9)
        assert 413 == refused.value.status


async def test_an_upload_that_breaks_off_leaves_nothing(system_redis_url: str, tmp_path: Path) -> None:
    """The client goes away in the middle: no file, and no bytes of it."""
    async with gateway(system_redis_url, tmp_path, limits=Limits()) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        head = f"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: {TYPE}\r\nContent-Length: 9000000\r\n\r\n"
        writer.write(head.encode() + body(PURPOSE, FILE)[:-9] + b"x" * 3_000_000)
        await writer.drain()
        storage = Storage(FolderBackend(tmp_path / "queue-default"))

        async def begun() -> bool:
            return bool(await storage.names("aside"))

        await until(begun)
        writer.close()

        async def gone() -> bool:
            return not await storage.names("aside")

        await until(gone)
        assert [] == await storage.names("files")
        assert [] == await storage.names("content")
        storage.close()
        del reader


async def test_errors_have_openais_shape(system_redis_url: str, tmp_path: Path) -> None:
    """Broken multipart, unknown ids and paths: 4xx with an error object, never a stack trace."""
    async with gateway(system_redis_url, tmp_path) as served, httpx.AsyncClient(base_url=served.base_url) as plain:
        answers = [
            await plain.post("/files", content=b"x", headers={"content-type": TYPE}),
            await plain.post("/files", content=b"x"),
            await plain.get("/files/..%2f..%2fetc%2fpasswd"),
            await plain.get("/files/file-%00"),
            await plain.get("/batches/batch_x"),
            await plain.post("/batches/nothing/cancel"),
            await plain.get("/batches/batch_x/results"),
            await plain.delete("/files/file-x"),
        ]
    assert [400, 415, 404, 404, 404, 404, 404, 404] == [answer.status_code for answer in answers]
    for answer in answers:
        assert {"message", "type", "param", "code"} == set(answer.json()["error"])
        assert not re.search("Traceback|/queue-", answer.text)
