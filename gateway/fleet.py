"""The fleet as the gateway sees it: who works, how fast the queue drains, and when to come again.

One look at Redis serves all requests of a second. It changes nothing.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, cast

from llmq.gateway.contact import Contact
from llmq.scheduler.connection import redact, redis_errors
from llmq.scheduler.errors import LLMQError, RedisUnavailable
from llmq.scheduler.fleet import SILENT, WorkerStatus, read_workers
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.measures import merge
from llmq.scheduler.outage import REDIS_ERRORS
from llmq.scheduler.queue import Queue
from llmq.scheduler.stored_number import whole

#: How old a look may be: heartbeats come every 2.5 s.
FRESH_S = 1.0

#: What clients are told at least and at most; and where nothing was measured, with workers and without.
LEAST_RETRY_S, LONGEST_RETRY_S = 1.0, 60.0
UNKNOWN_RETRY_S, NOBODY_RETRY_S = 5.0, 30.0


@dataclass(frozen=True, slots=True)
class FleetView:
    """One look: the workers, and how many jobs of each class wait or run."""

    workers: tuple[WorkerStatus, ...]
    jobs: dict[TrafficClass, int]

    @property
    def alive(self) -> tuple[WorkerStatus, ...]:
        """Workers that have not fallen silent."""
        return tuple(worker for worker in self.workers if worker.state != SILENT)

    @property
    def models(self) -> dict[str, float]:
        """What the workers that live serve: each model with the time since when."""
        models: dict[str, float] = {}
        for worker in self.alive:
            for model in worker.models:
                models[model] = min(models.get(model, worker.started_at), worker.started_at)
        return models


class Fleet:
    """Looks at the fleet of one queue, at most once a second."""

    def __init__(self, queue: Queue, url: str, contact: Contact) -> None:
        self._queue = queue
        self._url = url
        self._contact = contact
        self._view = FleetView((), {})
        self._seen_at = float("-inf")
        self._looking: asyncio.Task[FleetView] | None = None
        self.steady_since: float | None = None
        """Since when every look has succeeded, on the monotonic clock; None: the last one failed, or there was none."""

    async def view(self) -> FleetView:
        """Return the fleet as it is, or was a second ago. Raises RedisUnavailable."""
        if time.monotonic() - self._seen_at < FRESH_S:
            return self._view
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
            # Those that asked may have left by then: nobody need hear of its failure.
            self._looking.add_done_callback(lambda looking: looking.cancelled() or looking.exception())
        with redis_errors(self._url):
            # Shielded: the look is everybody's, whoever of those that wait for it may leave.
            return await asyncio.shield(self._looking)

    async def retry_after(self, cls: TrafficClass) -> float:
        """Return in how many seconds the queue will have done what it holds, as fast as it goes now; bounded."""
        try:
            view = await self.view()
        except LLMQError:
            return UNKNOWN_RETRY_S
        return retry_after(view, cls)

    async def _look(self) -> FleetView:
        try:
            workers, counts = await self._contact.within(self._read())
        except TimeoutError:
            self.steady_since = None
            raise RedisUnavailable(f"Redis at {redact(self._url)} does not answer") from None
        except REDIS_ERRORS:
            self.steady_since = None
            raise
        self.steady_since = self.steady_since or time.monotonic()
        jobs = {cls: whole(counts.get(cls.letter.encode())) for cls in TrafficClass}
        self._view, self._seen_at = FleetView(tuple(workers), jobs), time.monotonic()
        return self._view

    async def _read(self) -> tuple[list[WorkerStatus], dict[bytes, bytes]]:
        return await read_workers(self._queue), await cast(Any, self._queue.redis).hgetall(self._queue.keys.counts)


def retry_after(view: FleetView, cls: TrafficClass) -> float:
    """Return the seconds that the jobs of a class take to be done, by what the workers measured; bounded."""
    if not view.alive:
        return NOBODY_RETRY_S
    figures = merge(worker.measures for worker in view.alive)
    if cls is TrafficClass.BATCH:
        per_second = figures.throughput_per_s or 0.0
    else:
        per_second = figures.total.count / figures.window_s if figures.window_s else 0.0
    if not per_second:
        return UNKNOWN_RETRY_S
    return min(LONGEST_RETRY_S, max(LEAST_RETRY_S, view.jobs.get(cls, 0) / per_second))
