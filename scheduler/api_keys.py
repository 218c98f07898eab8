"""The API keys of one queue: made, listed, changed and revoked here, and read by the gateways.

A key that is revoked stays in the list, so that a person sees what became of it; one that has been of no use for 90
days makes room when another is made. Limits that are running are kept beside it (`key_scripts.py`). Errors of redis-py
pass through.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from llmq.scheduler import scripts
from llmq.scheduler.api_key import NO_LIMITS, ApiKey, KeyLimits, KeyState, digest_of, id_in, new_secret
from llmq.scheduler.errors import EncodingError, LLMQError, NotFoundError, UsageError
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.key_scripts import keep_key
from llmq.scheduler.queue import Queue
from llmq.scheduler.settings import check_tenant
from llmq.scheduler.stored_number import whole

#: Every gateway holds all keys of its queue in memory, and reads them again when one is changed.
MOST_KEYS = 10_000

#: A key that nobody can use is remembered this long.
REMEMBERED_S = 90 * 86_400.0

LONGEST_NAME = 100

#: The field of the hash that is no key: it changes with every write.
STAMP = b"stamp"


@dataclass(frozen=True, slots=True)
class KeyRing:
    """All keys of a queue at one moment. `stamp` is 0 while no key has ever been made."""

    stamp: int
    keys: dict[str, ApiKey]


class ApiKeys:
    """The API keys of a queue."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._name = queue.keys.api_keys
        self._redis: Any = cast(Any, queue.redis)

    async def create(
        self,
        tenant: str,
        *,
        name: str = "",
        classes: frozenset[TrafficClass] = frozenset(TrafficClass),
        limits: KeyLimits = NO_LIMITS,
        lasts_s: float | None = None,
    ) -> tuple[ApiKey, str]:
        """Make a key; return it with its secret, which nobody can ask for a second time."""
        now = await self._queue.now_ms() / 1000
        secret = new_secret()
        key_id = id_in(secret)
        assert key_id is not None
        expires_at = None if lasts_s is None else now + lasts_s
        key = ApiKey(
            key_id, check_tenant(tenant), digest_of(secret), check_name(name), classes, limits, now, expires_at
        )
        await self._make_room(now)
        verdict = await self._keep(key, b"")
        if verdict == "full":
            raise UsageError(f"the queue has its {MOST_KEYS:,} API keys; one that is revoked makes room after 90 days")
        return key, secret

    async def ls(self) -> list[ApiKey]:
        """Return all keys, the oldest first."""
        return sorted((await self.ring()).keys.values(), key=lambda key: (key.created_at, key.id))

    async def show(self, key_id: str) -> ApiKey:
        """Return one key. Raises NotFoundError."""
        return (await self._read(key_id))[0]

    async def change(self, key_id: str, change: Callable[[ApiKey, float], ApiKey]) -> ApiKey:
        """Change a key; gateways go by it within a second or two. Raises NotFoundError.

        `change` takes the key and the time on Redis' clock, and may be asked again: somebody else may have changed it.
        """
        now = await self._queue.now_ms() / 1000
        while True:
            before, stored = await self._read(key_id)
            after = change(before, now)
            if await self._keep(after, stored) == "ok":
                return after

    async def revoke(self, key_id: str) -> ApiKey:
        """Revoke a key for good; it opens no gateway any more within a second or two."""
        return await self.change(key_id, lambda key, now: key if key.revoked_at else replace(key, revoked_at=now))

    async def stamp(self) -> int:
        """Return what changes with every change of a key; 0 while none has ever been made."""
        return _stamp(await self._redis.hget(self._name, STAMP))

    async def ring(self) -> KeyRing:
        """Return all keys. What cannot be read (by hand, of a newer llmq) opens nothing."""
        stored: dict[bytes, bytes] = await self._redis.hgetall(self._name)
        stamp, keys = _stamp(stored.pop(STAMP, None)), {}
        for name, data in stored.items():
            try:
                keys[name.decode()] = ApiKey.decode(name.decode(), data)
            except (EncodingError, UnicodeDecodeError):
                continue
        # Somebody may have written keys by other means: then too there has been one.
        return KeyRing(max(stamp, 1 if stored else 0), keys)

    async def _read(self, key_id: str) -> tuple[ApiKey, bytes]:
        stored: bytes | None = await self._redis.hget(self._name, key_id) if key_id.encode() != STAMP else None
        if stored is None:
            raise NotFoundError(
                f"queue {self._queue.name} has no API key {key_id!r}; see which there are: llmq keys ls"
            )
        return ApiKey.decode(key_id, stored), stored

    async def _keep(self, key: ApiKey, before: bytes) -> str:
        call = keep_key(self._queue.keys, key.id, record=key.encode(), before=before, most=MOST_KEYS)
        verdict = await scripts.run(self._queue.redis, call)
        if verdict.word == "changed" and not before:
            raise LLMQError(f"there is a key {key.id} already; try again")
        return verdict.word

    async def _make_room(self, now: float) -> None:
        gone = [key.id for key in (await self.ring()).keys.values() if _forgotten(key, now)]
        if gone:
            await self._redis.hdel(self._name, *gone)


def _stamp(stored: bytes | None) -> int:
    """Read the stamp. One that somebody changed still says that there were keys: it opens nothing."""
    return 0 if stored is None else max(1, whole(stored))


def check_name(name: str) -> str:
    """Return a key's name; raises UsageError for one that would not fit a line."""
    if len(name) > LONGEST_NAME or not name.isprintable():
        raise UsageError(f"expected a name of at most {LONGEST_NAME} characters on one line, got {name[:40]!r}")
    return name


def _forgotten(key: ApiKey, now: float) -> bool:
    if key.state(now) is KeyState.ACTIVE:
        return False
    ended = min(at for at in (key.revoked_at, key.expires_at) if at is not None)
    return ended + REMEMBERED_S < now
