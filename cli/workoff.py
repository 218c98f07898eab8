"""Working off a batch in one process: a feeder, a worker and a collector side by side, until the batch has ended.

The three know nothing of each other: they meet in Redis. Here they are started, and ended in the right order whatever
happens: the worker hands back what it holds, the collector writes what has ended, and only then an error is raised.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from typing import Any

from llmq.cli.errors import Interrupted
from llmq.cli.render import count_of, notice
from llmq.cli.results import collect
from llmq.cli.session import Session
from llmq.scheduler.batch_record import BatchRecord
from llmq.scheduler.batches import Batches
from llmq.scheduler.collecting import Collected, collect_to_file, collector_of_stream
from llmq.scheduler.errors import LineFault, LLMQError
from llmq.scheduler.feeding import FeedProgress, FeedState
from llmq.scheduler.fleet import read_workers
from llmq.scheduler.lines import InputLine
from llmq.scheduler.outage import REDIS_ERRORS
from llmq.scheduler.output import Output, ResultFile
from llmq.workers.engines.base import Engine
from llmq.workers.shutdown import Shutdown
from llmq.workers.worker import WorkerOptions, serve

#: Whoever presses Ctrl-C waits for the prompt: requests that are nearly done may end, the rest runs again.
GRACE_S = 2.0

_RESUME = "give the same command again to go on"

#: What keeps lines from being queued, and what would help.
_SHORT_OF = {
    FeedState.WAITING_FOR_ROOM: "the others wait for room in the queue (cap_batch)",
    FeedState.WAITING_FOR_MEMORY: (
        "the others wait, because Redis is full: delete batches that are done (llmq batch delete ID), "
        "or give it more: CONFIG SET maxmemory SIZE"
    ),
}

#: Between two looks at the engine's state.
_LOOK_S = 2.0


class WorkOff:
    """One run of one batch; `shutdown` interrupts it."""

    def __init__(self, session: Session, record: BatchRecord, engine: Engine, shutdown: Shutdown) -> None:
        self._session = session
        self._batches = Batches(session.queue)
        self._record = record
        self._engine = engine
        self._shutdown = shutdown

    async def run(self, lines: Iterable[InputLine | LineFault], total: int, out: Output) -> Collected:
        """Feed, serve and collect until all lines have ended. Raises Interrupted, and what one of the three died of.

        `lines` are `total` lines in all, less those that the batch has.
        """
        feeding = asyncio.create_task(self._feed(lines))
        serving = asyncio.create_task(self._serve())
        collecting = asyncio.create_task(self._collect(out, total))
        watching = asyncio.create_task(self._watch_engine())
        asked = asyncio.create_task(self._shutdown.quiet())
        tasks: tuple[asyncio.Task[Any], ...] = (feeding, serving, collecting, watching, asked)
        try:
            await _first_end(feeding, {serving, collecting, asked})
            if not asked.done():
                self._shutdown.request_at_once()
            feeding.cancel()
            await asyncio.wait([feeding, serving])
            if not collecting.done():
                await self._collect_rest(collecting, out)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in (collecting, serving, feeding):
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        if collecting.cancelled():
            raise Interrupted("interrupted")
        return collecting.result()

    async def _feed(self, lines: Iterable[InputLine | LineFault]) -> None:
        if self._record.sealed:
            return
        said = FeedState.QUEUEING

        def show(progress: FeedProgress) -> None:
            nonlocal said
            if progress.state in _SHORT_OF and progress.state is not said:
                notice(f"{count_of(progress.lines, 'line')} queued; {_SHORT_OF[progress.state]}")
            said = progress.state

        await self._batches.feed(self._record.id, lines, resume=_RESUME, on_progress=show)

    async def _serve(self) -> None:
        settings = self._session.settings
        # No chat comes to this queue: nothing is reserved for it.
        options = WorkerOptions(
            queue=self._session.queue.name,
            concurrency=settings.concurrency,
            reserve=0,
            grace=GRACE_S,
            keyring=settings.keyring(),
            announce=lambda line: None,
        )
        await serve(self._session.url, self._engine, options, self._shutdown)

    async def _collect(self, out: Output, total: int) -> Collected:
        # What goes to stdout is handed over, as what goes to a file is: Redis may let go of it.
        collector = None if isinstance(out, ResultFile) else collector_of_stream()
        return await collect(self._batches, self._record, out, title="running", total=total, collector=collector)

    async def _collect_rest(self, collecting: asyncio.Task[Collected], out: Output) -> None:
        """Write what ended while the worker drained."""
        collecting.cancel()
        await asyncio.wait([collecting])
        with contextlib.suppress(LLMQError, *REDIS_ERRORS):
            await collect_to_file(self._batches, self._record.id, out, follow=False)

    async def _watch_engine(self) -> None:
        """Say when the engine has gone, and when it is back."""
        down = False
        while True:
            await asyncio.sleep(_LOOK_S)
            try:
                workers = await read_workers(self._session.queue)
            except REDIS_ERRORS:
                continue
            if down != (now := any(worker.state == "engine_down" for worker in workers)):
                down = now
                notice("the engine does not answer; waiting for it" if down else "the engine is back")


async def _first_end(feeding: asyncio.Task[None], others: set[asyncio.Task[Any]]) -> None:
    """Wait until one of the tasks ends; that all lines are queued is no end."""
    waiting: set[asyncio.Task[Any]] = {feeding, *others}
    while True:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if done != {feeding} or feeding.cancelled() or feeding.exception() is not None:
            return
