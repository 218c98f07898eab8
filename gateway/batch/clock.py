"""The clock of files and batches: Redis' own, so that all gateways and the queue agree, with or without Redis.

Windows are judged by Redis' time in the queue, so a batch's times are Redis' too. The clock asks it now and then, and
goes on by this host's monotonic clock in between and while Redis is away; before it was ever reached, by the host's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from llmq.scheduler.outage import REDIS_ERRORS

#: Seconds for which an answer of Redis is gone by: clocks of hosts drift by far less than a second in that time.
_FRESH_S = 10.0

#: Seconds that asking may take: who wants to know the time does not want to wait for an outage to end.
_PATIENCE_S = 1.0


class QueueClock:
    """Tells the time in Unix seconds; `now_ms` asks the queue for it."""

    def __init__(self, now_ms: Callable[[], Awaitable[int]]) -> None:
        self._now_ms = now_ms
        self._offset = time.time() - time.monotonic()
        self._asked_at: float | None = None

    async def now(self) -> float:
        """Return the time; never raises."""
        if self._asked_at is None or time.monotonic() - self._asked_at > _FRESH_S:
            self._asked_at = time.monotonic()  # also where it fails: the next one need not wait as well
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    self._offset = await self._now_ms() / 1000 - time.monotonic()
            except (*REDIS_ERRORS, TimeoutError):
                pass
        return time.monotonic() + self._offset
