"""Queueing a file and collecting its results side by side.

A file that is larger than the queue is fed as its lines end, and lines end only as long as their results have room:
so whoever takes the results has to take them while the file is still being queued, or both would wait for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from llmq.cli.errors import Interrupted
from llmq.cli.progress import Meter, meter
from llmq.cli.results import show
from llmq.scheduler.batch_record import BatchRecord
from llmq.scheduler.batches import Batches
from llmq.scheduler.collecting import Collected, collect_to_file
from llmq.scheduler.output import Output


class CollectingBeside:
    """Collects a batch into an output from the start, and shows it once the batch is queued (`on_queued`)."""

    def __init__(
        self,
        batches: Batches,
        batch_id: str,
        out: Output,
        collector: str | None,
        on_queued: Callable[[BatchRecord], None] = lambda record: None,
    ) -> None:
        self._batches = batches
        self._batch_id = batch_id
        self._out = out
        self._collector = collector
        self._on_queued = on_queued
        self._shown: Meter | None = None

    async def run(self, feeding: Coroutine[Any, Any, None]) -> Collected:
        """Feed and collect to the end of the batch; both have stopped when this returns or raises."""
        feed = asyncio.create_task(feeding)
        collect = asyncio.create_task(self._collect())
        try:
            await asyncio.wait({feed, collect}, return_when=asyncio.FIRST_COMPLETED)
            if collect.done() and collect.exception() is not None:
                return collect.result()  # raises: the output takes no more, so there is no use in queueing more
            await feed
            record = await self._batches.show(self._batch_id, patient=True)
            self._on_queued(record)
            with meter("running", total=record.total, begin=record.done) as self._shown:
                show(self._shown, record)
                return await collect
        except asyncio.CancelledError:
            await _stop(feed, collect)
            if not feed.cancelled() and isinstance(error := feed.exception(), Interrupted):
                raise error from None  # it knows the command that goes on with the file
            raise
        finally:
            await _stop(feed, collect)

    async def _collect(self) -> Collected:
        return await collect_to_file(
            self._batches, self._batch_id, self._out, collector=self._collector, on_progress=self._show
        )

    def _show(self, record: BatchRecord) -> None:
        if self._shown is not None:
            show(self._shown, record)


async def _stop(feed: asyncio.Task[None], collect: asyncio.Task[Collected]) -> None:
    for task in (feed, collect):
        task.cancel()
    await asyncio.wait([feed, collect])
    for task in (feed, collect):
        if not task.cancelled():
            task.exception()  # the one that matters was raised already
