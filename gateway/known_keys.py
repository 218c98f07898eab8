"""The keys that a gateway knows: all API keys of its queue, in memory, at most a second old.

Who calls is asked of every request, so it may cost no trip to Redis. One small read a second sees whether any key has
changed; all of them are read again only then. A key that is not known costs nothing more than one that is, whoever
tries many. While Redis is away, what is known goes on for five minutes, and an open gateway stays open.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from llmq.gateway.contact import Contact
from llmq.scheduler.api_key import ApiKey
from llmq.scheduler.api_keys import ApiKeys, KeyRing
from llmq.scheduler.errors import RedisUnavailable
from llmq.scheduler.outage import REDIS_ERRORS, is_away

#: How old what is known may be: a key that is revoked opens this gateway for so long.
FRESH_S = 1.0

#: A key that is not known may have been made a moment ago: then it is looked for again, ten times a second at most.
LOOK_AGAIN_S = 0.1

#: While Redis is away: what a restart takes that loads a lot of data. Nobody can revoke a key meanwhile, except where
#: only this gateway has lost Redis.
STALE_S = 300.0


class KnownKeys:
    """What a gateway knows of its queue's API keys; `clock` is monotonic, in seconds."""

    def __init__(self, keys: ApiKeys, contact: Contact, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys = keys
        self._contact = contact
        self._clock = clock
        self._ring: KeyRing | None = None
        self._read_at = 0.0
        self._tried_at: float | None = None
        self._reading = asyncio.Lock()
        self._required = False

    @property
    def seen(self) -> bool:
        """Whether a key was ever seen by this process."""
        return self._required

    @property
    def unseen(self) -> bool:
        """Whether Redis has never said which keys there are."""
        return self._ring is None

    async def required(self, key_id: str | None = None) -> bool:
        """Whether callers need a key: one has been made, now or at any time that this process remembers.

        Also after the last one was revoked, and for a Redis that came back empty: a gateway that was closed may not
        open by itself. `key_id` is the key that a caller has: it may be the first. Raises RedisUnavailable.
        """
        await self._refresh(FRESH_S if self._required or key_id is None else LOOK_AGAIN_S)
        if self._ring is None:
            raise _unknown()
        return self._required

    async def find(self, key_id: str) -> ApiKey | None:
        """Return a key by its id; None where there is none. Raises RedisUnavailable."""
        return await self._look(key_id, FRESH_S) or await self._look(key_id, LOOK_AGAIN_S)

    async def _look(self, key_id: str, fresh_s: float) -> ApiKey | None:
        await self._refresh(fresh_s)
        if self._ring is None or self._clock() - self._read_at > STALE_S:
            raise _unknown()
        return self._ring.keys.get(key_id)

    async def _refresh(self, fresh_s: float) -> None:
        if self._due(fresh_s):
            async with self._reading:  # those who come meanwhile wait for the one answer
                if self._due(fresh_s):
                    await self._read()

    def _due(self, fresh_s: float) -> bool:
        """Whether to ask again. While Redis is away, no more than once a second: every caller would wait for it."""
        now = self._clock()
        pause = fresh_s if self._tried_at == self._read_at else FRESH_S
        return self._tried_at is None or now - self._tried_at >= pause

    async def _read(self) -> None:
        self._tried_at = now = self._clock()
        try:
            self._ring = await self._contact.within(self._newest())
        except TimeoutError:
            return
        except REDIS_ERRORS as error:
            if not is_away(error):
                raise
            return
        self._read_at = now
        self._required = self._required or self._ring.stamp > 0

    async def _newest(self) -> KeyRing:
        if self._ring is not None and await self._keys.stamp() == self._ring.stamp:
            return self._ring
        return await self._keys.ring()


def _unknown() -> RedisUnavailable:
    return RedisUnavailable("Redis does not say which API keys there are; try again in a moment")
