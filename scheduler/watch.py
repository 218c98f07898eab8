"""The watch: one job that somebody may wait for, between the handle that holds it and the listener that serves it.

It keeps what has come of a job's answer until somebody takes it, and wakes whoever waits. It reads nothing itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from llmq.scheduler.deltas import DeltaOrder
from llmq.scheduler.job_record import JobRecord


class Watch:
    """One job that somebody may wait for; it lives as long as the handle that holds it."""

    __slots__ = (
        "__weakref__", "_ended", "failure", "foreign", "job_id", "look_at", "looks", "news", "on_deltas", "order",
        "overdue_at", "record", "rung", "seen_ended", "streams", "waiters",
    )  # fmt: skip

    def __init__(self, job_id: str, *, foreign: bool, overdue_at: float) -> None:
        self.job_id = job_id
        self.foreign = foreign
        self.overdue_at = overdue_at
        """When its time in the queue is over, on the monotonic clock; infinity where that is not known, or never."""
        self.look_at = 0.0
        self.looks = 0
        self.waiters = 0
        self.streams = 0
        self.rung = False
        self.seen_ended = False
        """Whether a look has found that the job has ended, of which the inbox had not told."""
        self.record: JobRecord | None = None
        self.failure: BaseException | None = None
        self.order = DeltaOrder()
        self.news = asyncio.Event()
        self.on_deltas: Callable[[], bool] | None = None
        """Takes deltas as they come, without a wake-up; says False where it cannot, and who waits is woken."""
        self._ended = asyncio.Event()

    @property
    def over(self) -> bool:
        """Whether the wait is over."""
        return self._ended.is_set()

    def tell(self) -> None:
        """Say that deltas have come."""
        try:
            if self.on_deltas is not None and self.on_deltas():
                return
        except Exception:
            # Not the listener's, which serves others too: who waits will run into it, and tell it.
            self.on_deltas = None
        self.news.set()

    def end(self, record: JobRecord | None, failure: BaseException | None = None) -> None:
        """End the wait: with the job's record (None: the job is lost), or with what ended the listener."""
        self.record, self.failure = record, failure
        self._ended.set()
        self.news.set()

    async def ended(self) -> JobRecord | None:
        """Wait for the end; return the record, None for a job that is lost."""
        await self._ended.wait()
        if self.failure is not None:
            raise self.failure
        return self.record
