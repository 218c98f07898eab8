"""The map of a set with Sentinel: the one primary that the sentinels name.

They are asked again all the time, not only after an error: a primary that was replaced by hand, or that was cut off
from the sentinels for a while, goes on to take writes for seconds, and all of them are thrown away (F-088).

Nor is one sentinel's word enough where there is a doubt: one that was cut off, or has just started, names a server that
is a replica by now. Reads there would not fail, they would only hear of nothing. So a server shows its role before it
is the primary here, and when the primary fails, another sentinel is asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from redis import exceptions
from redis.sentinel import MasterNotFoundError

from llmq.scheduler.route import Address

#: How old the sentinels' word may be.
LOOK_AGAIN_S = 1.0


class SentinelMap:
    """Which server is the primary of a service; `doubtful` until one was named anew and has shown that it is one."""

    cluster = False
    proof: tuple[str, ...] = ("INFO", "replication")

    def __init__(self, sentinels: Iterable[Address], service: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.question: tuple[str, ...] = ("SENTINEL GET-MASTER-ADDR-BY-NAME", service)
        self.doubtful = True
        self._guides = list(sentinels)
        self._service = service
        self._clock = clock
        self._asked_at = 0.0
        self.named: Address | None = None
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
        self.named = (host, int(port))
        self._asked_at = self._clock()

    def proved(self, told: Any) -> None:
        """Take over what the named server says of itself; None: it may not say. Raises where it is no primary."""
        if isinstance(told, Exception):
            raise told
        if isinstance(told, Mapping) and told.get("role") not in (None, "master"):
            raise exceptions.ConnectionError("the server that a sentinel names is a replica")
        self._primary = self.named
        self.doubtful = False

    def doubt(self, failed: Address) -> None:
        """Note that a sentinel failed, or the primary: then it is another sentinel's turn, which may know better."""
        if failed in self._guides:
            self._guides.remove(failed)
            self._guides.append(failed)
        else:
            self._guides.append(self._guides.pop(0))
            self.doubtful = True

    def moved(self, error: exceptions.MovedError, asked: Address) -> None:
        """Refuse: only nodes of a cluster say this."""
        raise error
