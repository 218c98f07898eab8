"""The results of a batch while it runs: one stream of lines, good and bad, in the order in which they end.

Lines are counted from the beginning of the batch, and `after` is how many a client has: the lines that it gets next are
the same from whichever gateway, while the batch runs and after. They come from the parts, then from Redis, and once the
batch has ended from its two files, which the sequence (`finishing.py`) puts into their old order.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import Any

from llmq.gateway.batch.batch_object import life_of
from llmq.gateway.batch.facts import Ledger
from llmq.gateway.batch.files import Files
from llmq.gateway.batch.finishing import ERROR, OUTPUT
from llmq.gateway.batch.parts import Chain, load_chain
from llmq.gateway.batch.storage import Storage
from llmq.gateway.errors import ApiError
from llmq.scheduler.batches import Batches
from llmq.scheduler.errors import UsageError
from llmq.scheduler.records import render

#: Seconds between two looks for more.
_LOOK_S = 0.25

#: Seconds of silence after which an empty line says that the connection lives.
_SILENCE_S = 15.0


class RunningResults:
    """The results of one batch of a tenant, after the first `after` of them."""

    def __init__(self, storage: Storage, files: Files, ledger: Ledger, batches: Batches, *, after: int) -> None:
        self._storage = storage
        self._files = files
        self._ledger = ledger
        self._batches = batches
        self._position = after

    async def lines(self, tenant: str, batch_id: str, *, follow: bool) -> AsyncGenerator[bytes, None]:
        """Iterate over the lines; with `follow` until the batch has ended. An empty line is a sign of life."""
        silent = 0.0
        while True:
            facts = await self._ledger.facts(tenant, batch_id)
            ended = facts.ended
            there = self._of_running(batch_id, follow) if ended is None else self._of_ended(tenant, batch_id, ended)
            async with contextlib.aclosing(there) as lines:
                async for line in lines:
                    silent = 0.0 if line else silent + _LOOK_S
                    if line or silent >= _SILENCE_S:
                        yield line + b"\n"
                        silent = 0.0
            if ended is not None or not follow:
                return
            await asyncio.sleep(_LOOK_S)

    async def _of_running(self, batch_id: str, follow: bool) -> AsyncGenerator[bytes, None]:
        """Yield what is there beyond the position, from the parts and from Redis, and b"" for each look in vain."""
        chain = await load_chain(self._storage, batch_id)
        start = 0
        for name, head in chain.parts:
            if self._position < start + len(head.lines):
                try:
                    async for line in self._from(chain.place_of(name), self._position - start):
                        self._position += 1
                        yield line
                except FileNotFoundError:  # the batch has ended just now, and its parts are gone
                    return
            start += len(head.lines)
        with contextlib.suppress(UsageError):  # not in Redis now, or trimmed because it is in a newer part
            async for line in self._of_redis(batch_id, chain, start, follow):
                yield line

    async def _of_redis(self, batch_id: str, chain: Chain, start: int, follow: bool) -> AsyncGenerator[bytes, None]:
        life, _ = life_of(await self._batches.show(batch_id))
        reader = self._batches.reader(batch_id, chain.cursor(life))
        while True:
            page = await self._batches.next_page(reader)
            for _, result in page.results:
                if chain.taken.add(result.line):
                    if start >= self._position:
                        self._position = start + 1
                        yield render(result, batch_id)
                    start += 1
            if page.over or not (page.results or follow):
                return
            if not page.results:
                yield b""
                await asyncio.sleep(_LOOK_S)

    async def _of_ended(self, tenant: str, batch_id: str, ended: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        """Yield what lies beyond the position, from the files."""
        packed = await self._ledger.sequence(tenant, batch_id)
        sequence = zlib.decompress(packed) if packed else b""
        sources: dict[int, AsyncGenerator[bytes, None]] = {}
        for kind, field in ((OUTPUT, "output_file_id"), (ERROR, "error_file_id")):
            if (file_id := ended[field]) is not None:
                record = await self._files.get(tenant, file_id)  # deleted, or its time is over: 404
                passed = sequence[: self._position].count(kind)
                sources[kind] = self._single(self._files.lines(tenant, record.id), passed)
        try:
            for kind in sequence[self._position :]:
                yield await anext(sources[kind])
                self._position += 1
        finally:
            for source in sources.values():
                await source.aclose()

    async def _from(self, place: str, skip: int) -> AsyncGenerator[bytes, None]:
        async for line in self._single(self._storage.lines(place), skip):
            yield line

    async def _single(self, slices: AsyncGenerator[list[bytes], None], skip: int) -> AsyncGenerator[bytes, None]:
        """Iterate over lines one by one, those after the first `skip`."""
        async with contextlib.aclosing(slices):
            async for lines in slices:
                for line in lines[skip:]:
                    yield line
                skip = max(0, skip - len(lines))


def read_after(text: str) -> int:
    """Read how many lines a client has. Raises ApiError (400)."""
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise ApiError(400, f"after: expected how many lines you have, got {text[:40]!r}", param="after")
    return int(text)


async def first_of(lines: AsyncGenerator[bytes, None]) -> AsyncIterator[bytes]:
    """Return the same lines once the first is there, so that an error still makes an answer with its own status."""
    first = await anext(lines, None)

    async def all_of() -> AsyncIterator[bytes]:
        async with contextlib.aclosing(lines):
            if first is not None:
                yield first
            async for line in lines:
                yield line

    return all_of()
