"""Collecting: the way of a batch's results into an output, while the batch runs.

A collector takes a page of results, appends them, and about once a second makes them certain, in this order:

    1. the lines are written and synced
    2. the sidecar says how long the output is and where in the result stream that is
    3. Redis is told the same place; from then on, and no sooner, it may trim those results

A crash between any two of them loses nothing and doubles nothing: the next collector cuts the output to what the
sidecar says and reads on from there. How files do their part is in `result_file.py`, trimming in `collect.lua`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from llmq.scheduler.batch_record import BatchRecord
from llmq.scheduler.batches import Batches
from llmq.scheduler.errors import LLMQError, NotFoundError, RedisUnavailable
from llmq.scheduler.line_set import LineSet
from llmq.scheduler.output import Output, ResultFile, count_ok_failed
from llmq.scheduler.records import ResultRecord, render
from llmq.scheduler.result_reader import BEGINNING, Page

T = TypeVar("T")

#: A sync costs some 10 ms of disk: at most one a second, or one a thousand lines when they come faster.
SYNC_S = 1.0
SYNC_LINES = 1000

#: Seconds for which a collector that leaves tries to say so.
_REMOVE_S = 2.0

OnCollect = Callable[[BatchRecord], None]


class Which(StrEnum):
    """Which results are written."""

    ALL = "all"
    OK = "ok"
    FAILED = "failed"

    def wants(self, record: ResultRecord) -> bool:
        """Whether a result is written."""
        return self is Which.ALL or record.ok == (self is Which.OK)


@dataclass(frozen=True, slots=True)
class Collected:
    """What a collection has brought: of the whole batch, and (`written`) the lines written by this run of it.

    `ok` and `failed` are lines, the tokens their sum, `seconds` the time of the batch from its opening; `complete`
    says that the batch has ended and all its results were read.
    """

    batch_id: str
    status: str
    ok: int
    failed: int
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0
    written: int = 0
    complete: bool = False


def collector_of(path: str | os.PathLike[str]) -> str:
    """Return the collector's name for an output file: the same for the same file of the same host, and readable."""
    return f"{socket.gethostname()}:{os.path.realpath(path)}"


def collector_of_stream() -> str:
    """Return a collector's name for this process's stdout, for a caller that hands results over with it."""
    return f"{socket.gethostname()}:stdout:{os.getpid()}"


async def collect_to_file(
    batches: Batches,
    batch_id: str,
    out: Output,
    *,
    which: Which = Which.ALL,
    follow: bool = True,
    collector: str | None = None,
    on_progress: OnCollect | None = None,
) -> Collected:
    """Write the results of a batch to `out`; with `follow` until it has ended, else those that are there.

    A file that takes all results is a collector of its own: Redis is told how far it has come, and may trim what is in
    it. For another output that takes over the results give `collector`; it is removed at the end. `on_progress` is told
    the batch's record about once a second. Raises what `Batches.results` does, and LLMQError when the disk is full:
    give the same command again then, it goes on from there.
    """
    if out.complete and isinstance(out, ResultFile):
        return await _of_complete(batches, batch_id, out)
    await batches.show(batch_id)  # an unknown batch, or no Redis at all, is said at once
    if isinstance(out, ResultFile) and collector is None and which is Which.ALL:
        collector = collector_of(out.path)
    collection = _Collection(batches, batch_id, out, which, collector)
    try:
        complete = await collection.run(follow, on_progress)
    finally:
        if collector is not None and not isinstance(out, ResultFile):
            await _remove(batches, batch_id, collector)
    return _summary(await batches.show(batch_id, patient=True), collection.written, complete=complete)


class _Collection:
    """One run of a collector: what it has taken, and what of that is certain."""

    def __init__(self, batches: Batches, batch_id: str, out: Output, which: Which, collector: str | None) -> None:
        self.written = 0
        self._batches = batches
        self._batch_id = batch_id
        self._out = out
        self._which = which
        self._collector = collector
        self._cursor = out.cursor or BEGINNING  # behind the last result taken
        self._taken = LineSet()
        self._unsynced = 0
        self._synced_at = time.monotonic()

    async def run(self, follow: bool, on_progress: OnCollect | None) -> bool:
        """Collect until there is no more; return whether the batch has ended."""
        if isinstance(self._out, ResultFile) and self._out.cursor:
            lines = self._out.lines()
            await _in_thread(lambda: self._taken.add_from(lines, self._batch_id))
        if self._collector is not None:
            # Before the first page: from now on nothing is trimmed that is not in the output.
            await self._say_written(self._collector)
        try:
            over = await self._collect(follow, on_progress)
            if over and await self._missing():
                # Redis lost results, and has others in their place with earlier ids (a failover to a slow clock).
                self._cursor = BEGINNING
                over = await self._collect(follow, on_progress)
        except asyncio.CancelledError:
            # Ctrl-C: leave the output with all that was read. A resumed run would read it again, but people look.
            self._out.sync(self._cursor)
            raise
        await self._sync()
        if over:
            await self._check_whole()
            await _in_thread(lambda: self._out.finish(self._cursor))
        return over

    async def _collect(self, follow: bool, on_progress: OnCollect | None) -> bool:
        reader = self._batches.reader(self._batch_id, self._cursor)
        while True:
            page = await self._batches.next_page(reader, self._until_sync() if follow else 0.0)
            self._take(page)
            if page.over or not (page.results or follow):
                return page.over
            if self._until_sync() <= 0 or self._unsynced >= SYNC_LINES:
                await self._sync()
                if on_progress is not None:
                    on_progress(await self._batches.show(self._batch_id, patient=True))

    def _take(self, page: Page) -> None:
        for cursor, record in page.results:
            if self._taken.add(record.line) and self._which.wants(record):
                self._out.append(render(record, self._batch_id))
                self.written += 1
            self._cursor = cursor
            self._unsynced += 1

    def _until_sync(self) -> float:
        return max(0.0, self._synced_at + SYNC_S - time.monotonic())

    async def _sync(self) -> None:
        await _in_thread(lambda: self._out.sync(self._cursor))
        self._unsynced = 0
        self._synced_at = time.monotonic()
        # Also when nothing has come: where the batch sleeps because of its results, this may wake it.
        if self._collector is not None:
            await self._say_written(self._collector)

    async def _say_written(self, collector: str) -> None:
        lasting = isinstance(self._out, ResultFile)  # nobody goes on with a pipe
        await self._batches.collected(self._batch_id, collector, self._cursor, lasting=lasting)

    async def _missing(self) -> int:
        """Return how many results the batch has that were not taken, in this run or an earlier one of this output."""
        if self._which is not Which.ALL:
            return 0  # what an earlier run passed over is not known
        return (await self._batches.show(self._batch_id, patient=True)).done - len(self._taken)

    async def _check_whole(self) -> None:
        if missing := await self._missing():
            raise LLMQError(
                f"batch {self._batch_id}: {missing:,} of its results are not in Redis any more; the output has the "
                "others. Redis lost data: check that its append-only file is on"
            )


async def _remove(batches: Batches, batch_id: str, collector: str) -> None:
    """Take away a collector that nobody will continue; if Redis is away just now, it stays until the batch goes."""
    with contextlib.suppress(TimeoutError, RedisUnavailable):
        async with asyncio.timeout(_REMOVE_S):
            await batches.collected(batch_id, collector, "")


async def _of_complete(batches: Batches, batch_id: str, out: ResultFile) -> Collected:
    """Return what a complete output holds; the batch may be gone by now."""
    try:
        return _summary(await batches.show(batch_id), 0, complete=True)
    except NotFoundError:
        counts = await asyncio.to_thread(count_ok_failed, out.path)
        return Collected(batch_id, "completed", counts.ok, counts.failed, complete=True)


def _summary(record: BatchRecord, written: int, *, complete: bool) -> Collected:
    return Collected(
        record.id,
        record.status.value,
        record.completed,
        record.failed,
        record.prompt_tokens,
        record.completion_tokens,
        record.seconds,
        written,
        complete,
    )


async def _in_thread(work: Callable[[], T]) -> T:
    """Do what waits for a disk in a thread, and never leave it running: it uses a file that is closed next."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
