"""The sweeper's housekeeping: what nobody else would set right."""

from __future__ import annotations

from typing import Any, cast

import pytest
from redis.asyncio import Redis

from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.lease import Lease, Outcome
from llmq.workers import sweeper as sweeper_module
from llmq.workers.contact import Contact
from llmq.workers.sweeper import FEW_LANES, Sweeper
from tests.scripted_queue import ScriptedQueue

KEYS = QueueKeys("q")

#: Longer than any machine stands still; what `lapse` ages is older.
LEASE_S = 30.0

pytestmark = pytest.mark.leaves("llmq:{q}:*")


def nobody(lease: Lease, outcome: Outcome) -> None:
    """End a job; none is ended here."""
    raise AssertionError(f"ended {lease}: {outcome}")


class Clock:
    """The clock of a worker, which goes on when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Return the time, as `time.monotonic` does."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The sweeper's clock."""
    clock = Clock()
    monkeypatch.setattr(sweeper_module, "time", clock)
    return clock


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


async def test_what_is_finished_during_the_recount_is_counted_once(redis: Redis) -> None:
    """A line that ends between two looks at Redis is in the sum or comes on top of it, never both (F-095)."""
    await redis.zadd(KEYS.batches, {"lives": 1})
    await redis.hset(KEYS.batch("lives"), mapping={"id": "lives", "bytes": 40})
    await redis.set(KEYS.held, 40, ex=60)

    class Finishing:
        """The client, with a line of 2 bytes that ends after each of its calls."""

        def __getattr__(self, name: str) -> Any:
            call = getattr(redis, name)

            async def then_a_line_ends(*arguments: Any, **options: Any) -> Any:
                answer = await call(*arguments, **options)
                await redis.hincrby(KEYS.batch("lives"), "bytes", 2)
                await redis.incrby(KEYS.held, 2)
                return answer

            return call if name == "pipeline" else then_a_line_ends

    await Sweeper(cast(Redis, Finishing()), KEYS, "w", Contact(10.0), lambda: 10.0, nobody)._recount_results()
    assert await redis.hget(KEYS.batch("lives"), "bytes") == await redis.get(KEYS.held)


async def test_where_nothing_is_held_no_key_is_made(redis: Redis) -> None:
    """A key without a TTL would stay for ever (G11)."""
    await redis.zadd(KEYS.batches, {"lives": 1})
    await redis.hset(KEYS.batch("lives"), mapping={"id": "lives", "bytes": 40})
    await Sweeper(redis, KEYS, "w", Contact(10.0), lambda: 10.0, nobody)._recount_results()
    assert 0 == await redis.exists(KEYS.held)


async def test_a_clock_that_leaps_gives_no_job_away(queue: ScriptedQueue, clock: Clock) -> None:
    """G4: Redis' host slept, or its clock was set on: who runs a job has had no time to renew its lease."""
    contact = Contact(LEASE_S, clock.monotonic)
    sweeper = Sweeper(queue.redis, queue.keys, "s", contact, lambda: LEASE_S, nobody)
    await queue.batch("B", 1)
    (lease,) = (await queue.claim()).leases

    async def sweep() -> int:
        """Sweep, and return how many jobs run."""
        contact.seen(clock.now)
        await sweep_now(queue, sweeper)
        return await running(queue, lease)

    a_lease_of(contact, clock)
    await queue.renew(lease)
    assert 1 == await sweep()
    await queue.pass_time(60_000)
    await queue.lapse(lease)
    assert 1 == await sweep()
    a_lease_of(contact, clock)
    assert 0 == await sweep()


async def test_a_sweep_that_lost_contact_is_made_up_for(queue: ScriptedQueue, clock: Clock) -> None:
    """G5: of very many lanes all are visited once a minute; a visit that could reclaim nothing does not count."""
    contact = Contact(LEASE_S, clock.monotonic)
    sweeper = Sweeper(queue.redis, queue.keys, "s", contact, lambda: LEASE_S, nobody)
    for tenant in range(FEW_LANES + 1):
        await queue.submit(f"j{tenant}", tenant=f"t{tenant}")
    (lease,) = (await queue.claim()).leases
    await queue.lapse(lease)
    contact.server("the one before")
    a_lease_of(contact, clock)
    await sweep_now(queue, sweeper)
    assert 1 == await running(queue, lease)
    a_lease_of(contact, clock)
    await sweep_now(queue, sweeper)
    assert 0 == await running(queue, lease)


def a_lease_of(contact: Contact, clock: Clock) -> None:
    """See Redis until the contact is long enough."""
    while not contact.long_enough():
        contact.seen(clock.now)
        clock.now += 1.0


async def sweep_now(queue: ScriptedQueue, sweeper: Sweeper) -> None:
    """Sweep, whoever has just done so."""
    await queue.redis.delete(queue.keys.sweeper)
    assert await sweeper.sweep()


async def running(queue: ScriptedQueue, lease: Lease) -> int:
    """Return how many jobs of a lease's lane run."""
    return int((await queue.redis.xpending(queue.keys.lane(lease.fence.lane), "workers"))["pending"])
