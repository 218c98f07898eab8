"""The fleet watch: when batch yields to chat everywhere, for how long, and what is kept of it."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis

from llmq.scheduler.inspect import read_status
from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.queue import Queue
from llmq.workers.chat_signal import Evidence
from llmq.workers.fleet_watch import LEAST_SLOW, STANDS_MS, FleetWatch, Standing, judge

KEYS = QueueKeys("q")
FAST, SLOW = Evidence(100, 0), Evidence(100, 20)

pytestmark = pytest.mark.leaves("llmq:{q}:*")


async def beat(redis: Redis, worker: str, seen: Evidence, now_ms: int) -> None:
    """Write what a worker's heartbeat says of chat."""
    client: Any = redis
    facts = {"id": worker, "state": "ready", "chat_seen": seen.seen, "chat_far_over": seen.slow}
    await client.hset(KEYS.worker(worker), mapping=facts)
    await redis.pexpire(KEYS.worker(worker), 60_000)
    await redis.zadd(KEYS.workers, {worker: now_ms})


def test_a_breach_has_to_stand_for_five_seconds() -> None:
    """A burst of two seconds is the governors' business."""
    first = judge(1000, Standing(), SLOW)
    assert Standing(1000, 0) == first
    assert Standing(1000, 0) == judge(1000 + STANDS_MS - 1, first, SLOW)
    assert Standing(1000, 1000 + 2 * STANDS_MS) == judge(1000 + STANDS_MS, first, SLOW)


def test_it_ends_when_the_breach_does() -> None:
    """What yields goes on for as long as the breach stands, and five seconds longer."""
    yielding = judge(6000, Standing(1000, 0), SLOW)
    assert 6000 + STANDS_MS == yielding.yields_until
    assert 9000 + STANDS_MS == judge(9000, yielding, SLOW).yields_until
    assert Standing(0, 6000 + STANDS_MS) == judge(9000, yielding, FAST)


def test_a_breach_begins_anew_after_a_good_look() -> None:
    """Two bursts with peace between them are not one breach."""
    assert Standing(9000, 0) == judge(9000, judge(8000, Standing(1000, 0), FAST), SLOW)


def test_a_clock_that_is_set_back_makes_it_neither_longer_nor_later() -> None:
    """Batch does not yield for as long as the clock had been ahead, and a breach stands for five seconds from now."""
    ahead = Standing(3_600_000, 3_600_000)
    assert Standing(0, 1000 + STANDS_MS) == judge(1000, ahead, FAST)
    assert Standing(1000, 1000 + STANDS_MS) == judge(1000, ahead, SLOW)


def test_stragglers_and_a_share_that_a_p95_allows_are_no_breach() -> None:
    """Too few to mean anything, or one in twenty."""
    assert Standing() == judge(1000, Standing(), Evidence(3, LEAST_SLOW - 1))
    assert Standing() == judge(1000, Standing(), Evidence(100, 5))


async def test_what_all_workers_saw_counts_together(redis: Redis) -> None:
    """One slow worker of many is its own governor's business; the same in all of them makes batch yield."""
    queue, watch = Queue(redis, "q"), FleetWatch(redis, KEYS)
    await queue.set("ttft_p95", "200ms")
    now_ms = await queue.now_ms()
    await beat(redis, "a", Evidence(10, 4), now_ms)
    await beat(redis, "b", Evidence(90, 0), now_ms)
    await watch.look(now_ms - STANDS_MS)
    await watch.look(now_ms)
    assert not (await read_status(queue)).objective.yields
    await beat(redis, "b", Evidence(90, 40), now_ms)
    await watch.look(now_ms - STANDS_MS)
    await watch.look(now_ms)
    found = (await read_status(queue)).objective
    assert (0.2, True) == (found.ttft_p95_s, found.yields)
    assert [("yields", 100, 44, 2)] == [(d.batch, d.seen, d.far_over, d.workers) for d in found.decisions]
    assert 0 < await redis.pttl(KEYS.decisions)


async def test_another_worker_goes_on_where_one_stopped_looking(redis: Redis) -> None:
    """The state is in Redis: who sweeps next knows since when it stands, and that it is over."""
    queue = Queue(redis, "q")
    await queue.set("ttft_p95", "200ms")
    now_ms = await queue.now_ms()
    await beat(redis, "a", SLOW, now_ms)
    await FleetWatch(redis, KEYS).look(now_ms - STANDS_MS)
    await FleetWatch(redis, KEYS).look(now_ms)
    assert (await read_status(queue)).objective.yields
    await beat(redis, "a", FAST, now_ms)
    await FleetWatch(redis, KEYS).look(now_ms + STANDS_MS + 1)
    found = (await read_status(queue)).objective
    assert ["goes on", "yields"] == [decision.batch for decision in found.decisions]
    assert [None, None] == await redis.hmget(KEYS.config, "breach_b", "yields_b")


async def test_without_an_objective_nothing_is_written(redis: Redis) -> None:
    """Who states nothing gets the reserve and nothing else."""
    await beat(redis, "a", SLOW, await Queue(redis, "q").now_ms())
    watch = FleetWatch(redis, KEYS)
    await watch.look(1000)
    await watch.look(1000 + STANDS_MS)
    assert 0 == await redis.exists(KEYS.config, KEYS.decisions)


async def test_an_objective_that_is_taken_back_ends_it(redis: Redis) -> None:
    """`llmq set ttft_p95 off`: batch goes on with the next look."""
    queue, watch = Queue(redis, "q"), FleetWatch(redis, KEYS)
    await queue.set("ttft_p95", "200ms")
    now_ms = await queue.now_ms()
    await beat(redis, "a", SLOW, now_ms)
    await watch.look(now_ms - STANDS_MS)
    await watch.look(now_ms)
    await queue.set("ttft_p95", "default")
    await watch.look(now_ms + STANDS_MS + 1)
    assert None is await redis.hget(KEYS.config, "yields_b")
