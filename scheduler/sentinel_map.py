"""The map of a set with Sentinel: the one primary that the sentinels name.

They are asked again all the time, not only after an error: a primary that was replaced by hand, or that was cut off
from the sentinels for a while, goes on to take writes for seconds, and all of them are thrown away (F-088).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from redis import exceptions
from redis.sentinel import MasterNotFoundError

from llmq.scheduler.route import Address

#: How old the sentinels' word may be.
LOOK_AGAIN_S = 1.0


class SentinelMap:
    """Which server is the primary of a service; `doubtful` until `read` has been told anew."""

    cluster = False

    def __init__(self, sentinels: Iterable[Address], service: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.question: tuple[str, ...] = ("SENTINEL GET-MASTER-ADDR-BY-NAME", service)
        self.doubtful = True
        self._guides = list(sentinels)
        self._service = service
        self._clock = clock
        self._asked_at = 0.0
        self._primary: Address | None = None

    @property
    def due(self) -> bool:
        """Whether the sentinels' word is old; asking once is enough for everybody."""
        if (now := self._clock()) - self._asked_at < LOOK_AGAIN_S:
            return False
        self._asked_at = now
        return True

    @property
    def primaries(self) -> list[Address]:
        """The primary."""
        return [] if self._primary is None else [self._primary]

    @property
    def known(self) -> set[Address]:
        """The primary: nobody else takes writes."""
        return set(self.primaries)

    def owner(self, key: bytes | None) -> Address:
        """Return the primary, whatever the key."""
        if self._primary is None:
            raise MasterNotFoundError(f"no sentinel named a primary of {self._service!r}")
        return self._primary

    def guides(self) -> list[Address]:
        """Return the sentinels; the one that answered last is the first, those that failed are the last."""
        return list(self._guides)

    def read(self, reply: Any, guide: Address) -> None:
        """Take over the address that a sentinel gave."""
        if reply is None:
            raise MasterNotFoundError(f"this sentinel knows no service {self._service!r}")
        host, port = (part.decode() if isinstance(part, bytes) else part for part in reply)
        self._primary = (host, int(port))
        self._asked_at = self._clock()
        self.doubtful = False

    def doubt(self, failed: Address) -> None:
        """Note that the primary, or a sentinel, failed."""
        if failed in self._guides:
            self._guides.remove(failed)
            self._guides.append(failed)
        else:
            self.doubtful = True

    def moved(self, error: exceptions.MovedError, asked: Address) -> None:
        """Refuse: only nodes of a cluster say this."""
        raise error
