"""The outage: a Redis that is away for a while, ridden out by whoever feeds, waits or collects.

Commands are never sent twice by the client (`connection.py`); what is repeated here is whole steps, of which the
caller knows that they may be repeated: a chunk that names its place, a read, a cursor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis import exceptions

from llmq.scheduler.errors import RedisFull, RedisUnavailable
from llmq.scheduler.redis_errors import MEANINGS, explain

T = TypeVar("T")

#: Seconds: what a restart that loads a large append-only file may take, and a failover always does.
PATIENCE_S = 300.0

#: Seconds before the first repetition; it doubles to the longest.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0

#: What a server says of itself that passes without anybody's doing.
_PASSING = tuple(
    MEANINGS[code]
    for code in (
        "LOADING",
        "BUSY",
        "READONLY",
        "UNBLOCKED",
        "CLUSTERDOWN",
        "MASTERDOWN",
        "MOVED",
        "TRYAGAIN",
        "NOREPLICAS",
    )
)

#: What every client of redis-py raises for what a server or a connection did.
REDIS_ERRORS = (exceptions.RedisError, exceptions.RedisClusterException)


class Pause:
    """Waits that grow from 50 ms to a second; a success sets them back."""

    def __init__(self) -> None:
        self._next = FIRST_PAUSE_S

    async def __call__(self) -> None:
        """Wait once."""
        pause, self._next = self._next, min(2 * self._next, LONGEST_PAUSE_S)
        await asyncio.sleep(pause)

    def reset(self) -> None:
        """Begin with short waits again."""
        self._next = FIRST_PAUSE_S


class Outage:
    """Repeats a step while Redis is away, for at most `patience_s` at a time.

    `advice` ends the message of the RedisUnavailable that follows: how to go on. `on_wait` is told before each wait.
    """

    def __init__(
        self, advice: str, *, patience_s: float = PATIENCE_S, on_wait: Callable[[], None] | None = None
    ) -> None:
        self._advice = advice
        self._patience_s = patience_s
        self._on_wait = on_wait

    async def ride_out(self, step: Callable[[], Awaitable[T]]) -> T:
        """Return what `step` returns; other errors than "Redis is away" pass through."""
        pause, away_since = Pause(), None
        while True:
            try:
                return await step()
            except REDIS_ERRORS as error:
                if not is_away(error):
                    raise
                now = time.monotonic()
                away_since = now if away_since is None else away_since
                if now - away_since >= self._patience_s:
                    raise self._unavailable(error, now - away_since) from error
            if self._on_wait is not None:
                self._on_wait()
            await pause()

    def _unavailable(self, error: Exception, away_s: float) -> RedisUnavailable:
        meaning = explain(error)
        what = meaning.what if meaning else "is away"
        return RedisUnavailable(f"Redis {what}, for {away_s:.0f} s by now; {self._advice}")


def is_away(error: BaseException) -> bool:
    """Whether an error says that Redis cannot be used now, and may well be in a moment, without anybody's doing."""
    if isinstance(error, exceptions.AuthenticationError):
        return False
    if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError):
        return True
    return explain(error) in _PASSING


def is_only_away(error: RedisUnavailable) -> bool:
    """Whether a server that could not be used may be usable in a moment; one of the wrong kind or version will not."""
    return error.__cause__ is not None and is_away(error.__cause__)


def is_full(error: BaseException) -> bool:
    """Whether an error says that Redis takes no more data (`maxmemory`)."""
    meaning = explain(error)
    return meaning is not None and meaning.error is RedisFull
