"""The queue's totals: what heartbeats add to them, once each, whatever is lost between; and the bucket's dry times."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis

from llmq.scheduler import scripts
from llmq.scheduler.inspect import read_status
from llmq.scheduler.queue import Queue
from llmq.scheduler.totals import read_totals
from tests.scripted_queue import ScriptedQueue

WEEK_MS = 7 * 24 * 3600 * 1000


async def beat(queue: ScriptedQueue, worker: str, totals: dict[str, int], told: dict[str, int]) -> None:
    """Write a heartbeat with totals; `told` is what the worker knows to be counted."""
    await queue.call(
        scripts.beat(queue.keys, worker, ttl_ms=60_000, fields={"id": worker, "slots": 4}, totals=totals, told=told)
    )


async def counted(queue: ScriptedQueue) -> dict[str, int]:
    """Return the queue's totals."""
    return read_totals(await queue.redis.hgetall(queue.keys.totals))


async def test_what_workers_count_adds_up(queue: ScriptedQueue) -> None:
    """Only what is new is added, worker by worker."""
    await beat(queue, "w1", {"retries|batch": 2}, {})
    await beat(queue, "w2", {"retries|batch": 5, "leases_lost": 1}, {})
    await beat(queue, "w1", {"retries|batch": 3, "leases_lost": 4}, {"retries|batch": 2})
    await beat(queue, "w1", {"retries|batch": 3, "leases_lost": 4}, {"retries|batch": 3, "leases_lost": 4})
    assert {"retries|batch": 8, "leases_lost": 5} == await counted(queue)
    assert WEEK_MS - 60_000 < await queue.redis.pttl(queue.keys.totals) <= WEEK_MS


async def test_a_heartbeat_whose_reply_was_lost_counts_once(queue: ScriptedQueue) -> None:
    """The worker tells it again, not knowing that it was written; Redis does (F-101)."""
    await beat(queue, "w1", {"n": 7}, {})
    await beat(queue, "w1", {"n": 9}, {})
    assert {"n": 9} == await counted(queue)


async def test_a_worker_that_was_silent_for_long_counts_on(queue: ScriptedQueue) -> None:
    """Its heartbeat is gone by then, and what it knows to be counted is not counted again."""
    await beat(queue, "w1", {"n": 7}, {})
    await queue.redis.delete(queue.keys.worker("w1"))
    await beat(queue, "w1", {"n": 8}, {"n": 7})
    assert {"n": 8} == await counted(queue)


async def test_totals_outlive_workers(queue: ScriptedQueue, redis: Redis) -> None:
    """A counter that fell when a worker leaves would be read as one that began anew."""
    await beat(queue, "w1", {"retries|batch": 7}, {})
    await queue.redis.delete(queue.keys.worker("w1"))
    await queue.redis.zrem(queue.keys.workers, "w1")
    await beat(queue, "w2", {"retries|batch": 1}, {})
    assert 8 == (await read_status(Queue(redis, "q"))).to_json()["totals"]["retries"]


async def test_a_redis_that_came_back_empty_counts_from_0(queue: ScriptedQueue) -> None:
    """As any counter that began anew; what was counted before is not made up (G12)."""
    await beat(queue, "w1", {"n": 7}, {})
    await queue.redis.flushall()
    await beat(queue, "w1", {"n": 9}, {"n": 7})
    assert {"n": 2} == await counted(queue)


async def test_a_heartbeat_with_every_total_there_is_stays_cheap(queue: ScriptedQueue) -> None:
    """Several hundred fields go in parts, and come out whole; a total is a field of the heartbeat too."""
    many = {f"n{number}": number for number in range(1, 600)}
    await beat(queue, "w1", many, {})
    assert many == await counted(queue)
    heartbeat: dict[bytes, Any] = await queue.redis.hgetall(queue.keys.worker("w1"))
    assert (b"4", b"599", 601) == (heartbeat[b"slots"], heartbeat[b"t.n599"], len(heartbeat))


@pytest.mark.leaves("llmq:{q}:*")
async def test_a_bucket_is_dry_only_while_batch_waits(queue: ScriptedQueue, redis: Redis) -> None:
    """A batch that was cancelled over an empty bucket does not make the next one's start a wait of a day."""
    await queue.configure(rate=1, burst=1)
    await queue.batch("A", 3)
    await queue.claim(8)
    await queue.claim(8)
    bucket = (await read_status(Queue(redis, "q"))).bucket
    assert 0.0 == bucket.dry_s
    await queue.call(scripts.cancel_batch(queue.keys, "A", lane="batch:A"))
    await queue.pass_time(86_400_000)
    assert None is (await read_status(Queue(redis, "q"))).bucket.dry_s
    await queue.batch("B", 3)
    await queue.claim(8)
    await queue.claim(8)
    await queue.pass_time(1_000)
    await queue.claim(8)
    bucket = (await read_status(Queue(redis, "q"))).bucket
    assert (1, 1.0, 1.0) == (bucket.exhausted, bucket.wait_s, bucket.waited_s)
