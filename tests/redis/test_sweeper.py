"""The sweeper's housekeeping: what nobody else would set right."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.lease import Lease, Outcome
from llmq.workers.contact import Contact
from llmq.workers.sweeper import Sweeper

KEYS = QueueKeys("q")

pytestmark = pytest.mark.leaves("llmq:{q}:*")


def nobody(lease: Lease, outcome: Outcome) -> None:
    """End a job; none is ended here."""
    raise AssertionError(f"ended {lease}: {outcome}")


async def test_results_that_went_with_their_ttl_are_no_longer_counted(redis: Redis) -> None:
    """Else `results_max_bytes` would be reached for good, and all batch would wait for a collector (F-095, G10)."""
    await redis.zadd(KEYS.batches, {"lives": 1, "gone": 2, "empty": 3})
    await redis.hset(KEYS.batch("lives"), mapping={"id": "lives", "bytes": 40})
    await redis.hset(KEYS.batch("empty"), mapping={"id": "empty"})
    await redis.set(KEYS.held, 100, ex=60)
    sweeper = Sweeper(redis, KEYS, "w", Contact(10.0), lambda: 10.0, nobody)
    await sweeper._recount_results()
    assert b"40" == await redis.get(KEYS.held)
    assert [b"lives", b"empty"] == await redis.zrange(KEYS.batches, 0, -1)
    assert 0 < await redis.ttl(KEYS.held)


async def test_where_nothing_is_held_no_key_is_made(redis: Redis) -> None:
    """A key without a TTL would stay for ever (G11)."""
    await redis.zadd(KEYS.batches, {"lives": 1})
    await redis.hset(KEYS.batch("lives"), mapping={"id": "lives", "bytes": 40})
    await Sweeper(redis, KEYS, "w", Contact(10.0), lambda: 10.0, nobody)._recount_results()
    assert 0 == await redis.exists(KEYS.held)
