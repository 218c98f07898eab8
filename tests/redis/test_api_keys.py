"""API keys as they are stored: made, read, changed by two at once, revoked, forgotten."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from llmq.scheduler.api_key import ApiKey, KeyLimits, KeyState
from llmq.scheduler.api_keys import REMEMBERED_S, ApiKeys
from llmq.scheduler.errors import EncodingError, NotFoundError, UsageError
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.queue import Queue

LIMITS = KeyLimits(600, 20_000, 8)


@pytest.fixture
def keys(redis: Redis) -> ApiKeys:
    """The keys of an empty queue, on the server's own clock."""
    return ApiKeys(Queue(redis, "q"))


async def test_a_key_comes_back_as_it_was_made(keys: ApiKeys) -> None:
    """Everything but the secret is kept, and only the secret opens it."""
    classes = frozenset({TrafficClass.BATCH})
    made, secret = await keys.create("anna", name="eval", classes=classes, limits=LIMITS, lasts_s=3600)
    other, _ = await keys.create("ben")
    assert made == await keys.show(made.id)
    listed = {key.id: key for key in await keys.ls()}  # made in the same ms, they may stand in either order
    assert {made.id: made, other.id: other} == listed
    assert (classes, LIMITS, 3600.0) == (made.classes, made.limits, (made.expires_at or 0) - made.created_at)
    assert made.opened_by(secret)
    assert not made.opened_by(secret[:-1] + ("0" if secret[-1] != "0" else "1"))
    assert not other.opened_by(secret)


async def test_the_secret_is_nowhere(redis: Redis, keys: ApiKeys) -> None:
    """Neither in Redis, nor in what is listed, nor in the text of the record: a digest is all there is."""
    made, secret = await keys.create("anna")
    proof = secret.rpartition("-")[2]
    stored: dict[bytes, bytes] = await cast(Any, redis).hgetall(QueueKeys("q").api_keys)
    assert proof.encode() not in b"".join([*stored, *stored.values()])
    assert proof not in str(made.to_json(0))
    assert "digest" not in made.to_json(0)
    assert made.digest not in repr(made)


async def test_a_key_ends_by_time_or_by_hand(keys: ApiKeys) -> None:
    """Revoked is for good, and says when; a second time changes nothing."""
    made, _ = await keys.create("anna", lasts_s=60)
    assert KeyState.ACTIVE is made.state(made.created_at + 59)
    assert KeyState.EXPIRED is made.state(made.created_at + 60)
    revoked = await keys.revoke(made.id)
    assert KeyState.REVOKED is revoked.state(made.created_at)
    assert revoked == await keys.revoke(made.id)


async def test_every_change_changes_the_stamp(keys: ApiKeys) -> None:
    """A gateway sees by one number whether to read again; 0 is a queue that never had a key."""
    stamps = [await keys.stamp()]
    made, _ = await keys.create("anna")
    stamps.append(await keys.stamp())
    await keys.change(made.id, lambda key, now: replace(key, name="new"))
    stamps.append(await keys.stamp())
    await keys.revoke(made.id)
    stamps.append(await keys.stamp())
    assert 0 == stamps[0]
    assert 4 == len(set(stamps))
    assert stamps[-1] == (await keys.ring()).stamp


async def test_two_who_change_a_key_lose_nothing(keys: ApiKeys) -> None:
    """Whoever is second reads again, and changes what the first has left (F-101)."""
    made, _ = await keys.create("anna")

    async def name(letter: str) -> None:
        await keys.change(made.id, lambda key, now: replace(key, name=key.name + letter))

    await asyncio.gather(*map(name, "abcdefgh"))
    assert "abcdefgh" == "".join(sorted((await keys.show(made.id)).name))


async def test_a_key_of_no_use_is_forgotten_after_90_days(keys: ApiKeys) -> None:
    """The next key that is made takes its place; those that may be used stay, however old."""

    async def aged(tenant: str, *, revoked_s: float | None = None, expired_s: float | None = None) -> None:
        def change(key: ApiKey, now: float) -> ApiKey:
            revoked_at, expires_at = (None if ago is None else now - ago for ago in (revoked_s, expired_s))
            return replace(key, created_at=now - 2 * REMEMBERED_S, revoked_at=revoked_at, expires_at=expires_at)

        key, _ = await keys.create(tenant)
        await keys.change(key.id, change)

    await aged("old")
    await aged("gone", revoked_s=REMEMBERED_S + 60)
    await aged("over", expired_s=REMEMBERED_S + 60)
    await aged("lately", revoked_s=REMEMBERED_S - 60)
    await keys.create("new")
    assert ["lately", "new", "old"] == sorted(key.tenant for key in await keys.ls())


async def test_what_cannot_be_read_opens_nothing(redis: Redis, keys: ApiKeys) -> None:
    """A record that somebody wrote by hand is left out of the ring, and keys are required all the same."""
    await cast(Any, redis).hset(QueueKeys("q").api_keys, mapping={b"abc": b"{}", b"\xff": b"{}"})
    ring = await keys.ring()
    assert ({}, 1) == (ring.keys, ring.stamp)
    with pytest.raises(EncodingError, match="abc"):
        await keys.show("abc")


async def test_what_is_not_there_is_said_with_the_next_step(keys: ApiKeys) -> None:
    """An unknown id, the stamp's own name, a tenant that cannot be one."""
    for key_id in ("000000000000", "stamp"):
        with pytest.raises(NotFoundError, match="llmq keys ls"):
            await keys.revoke(key_id)
    with pytest.raises(UsageError, match="tenant"):
        await keys.create("a|b")
    with pytest.raises(UsageError, match="name"):
        await keys.create("anna", name="two\nlines")
    assert 0 == await keys.stamp()
