"""The contact with Redis: how long a request waits for a reply before its client is told that the queue is away.

A client is to know within a second; but a reply may also be late because this host is busy, and then nothing is away.
So the second counts from the last reply that anybody here got: while others are answered, a late one is waited for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

#: A Redis that has said nothing to anybody for so long is away.
SILENCE_S = 0.9

#: What is sent to Redis takes its time: a picture of 16 MiB gets 4 s more, which a slow network needs.
BYTES_PER_SECOND = 4 * 2**20

#: A reply that takes longer is of no use, whatever others get.
LONGEST_S = 10.0


class Contact:
    """What one gateway knows of its Redis: when it was heard last."""

    def __init__(self) -> None:
        self._heard_at = float("-inf")

    async def within(self, work: Coroutine[Any, Any, T], size: int = 0) -> T:
        """Return what a coroutine returns that asks Redis, and sends it `size` bytes.

        Raises TimeoutError where Redis is silent.
        """
        loop, began = asyncio.get_running_loop(), time.monotonic() + size / BYTES_PER_SECOND
        timer: asyncio.TimerHandle
        async with asyncio.timeout(None) as limit:

            def look() -> None:
                nonlocal timer
                if (left := self._deadline(began) - time.monotonic()) > 0:  # others have been answered meanwhile
                    timer = loop.call_later(left, look)
                else:
                    limit.reschedule(loop.time())

            timer = loop.call_later(max(0.0, self._deadline(began) - time.monotonic()), look)
            try:
                result = await work
            finally:
                timer.cancel()
        self._heard_at = time.monotonic()
        return result

    def _deadline(self, began: float) -> float:
        return min(max(began, self._heard_at) + SILENCE_S, began + LONGEST_S)
