"""The guard of a request's body: how large it may be, and how slowly it may come.

It stands between the server and whoever reads the body, and raises ApiError there: 413 for a body that is too large, as
soon as that is known, 408 for one that trickles (slowloris). Time in which nobody reads is not held against the client.
What of a body was not read when the answer is out, its connection reads and throws away for a moment
(`connection_guard.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from llmq.gateway.errors import ApiError
from llmq.scheduler.units import format_size

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]


@dataclass(frozen=True, slots=True)
class Pace:
    """How slowly a body may come: the longest silence, and so many seconds more than its size at the least rate."""

    silence_s: float = 15.0
    grace_s: float = 15.0
    bytes_per_second: float = 1024.0


class BodyGuard:
    """The receive channel of one request, guarded. `declared` is its Content-Length, None where it is chunked."""

    def __init__(self, receive: Receive, declared: int | None, limit: int, pace: Pace) -> None:
        self._receive = receive
        self._declared = declared
        self._limit = limit
        self._pace = pace
        self._received = 0
        self._waited_s = 0.0
        self._over = False
        if declared is not None and declared > limit:
            raise self._too_large()

    async def __call__(self) -> Message:
        """Return the next message; once the body has come, that is the client's leaving, for which nobody hurries."""
        if self._over:
            return await self._receive()
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._patience()):
                message = await self._receive()
        except TimeoutError:
            raise self._too_slow() from None
        self._waited_s += time.monotonic() - began
        if message["type"] == "http.request":
            self._received += len(message.get("body", b""))
            self._over = not message.get("more_body", False)
        if self._received > self._limit:
            raise self._too_large()
        return message

    def _patience(self) -> float:
        pace = self._pace
        return min(pace.silence_s, max(0.0, pace.grace_s + self._received / pace.bytes_per_second - self._waited_s))

    def _too_large(self) -> ApiError:
        came = "more" if self._declared is None else format_size(self._declared)
        message = f"expected a body of at most {format_size(self._limit)}, got {came}"
        return ApiError(413, message, code="body_too_large")

    def _too_slow(self) -> ApiError:
        message = f"the body came too slowly ({format_size(self._received)} in {self._waited_s:.0f} s); send it again"
        return ApiError(408, message, code="body_timeout")
