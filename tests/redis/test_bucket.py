"""The shared token bucket: whatever happens, no more batch starts than rate and burst allow (G8)."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import pytest
from redis.asyncio import Redis

from llmq.scheduler.connection import connect
from llmq.scheduler.lease import Why
from tests.scripted_queue import T0, ScriptedQueue, names

pytestmark = pytest.mark.leaves("llmq:{q}:*")


@dataclass(frozen=True)
class Start:
    """One batch start: when, by the clock that never goes back, and what it took from the bucket."""

    at: int
    cost: int
    why: Why


def worst_excess(starts: list[Start], rate: float, burst: float) -> float:
    """Return by how much the starts of any span of time exceed rate * span + burst; below 0 is well."""
    paid = [start for start in starts if start.why is Why.BUCKET]
    worst = -burst
    for first in range(len(paid)):
        total = 0
        for last in range(first, len(paid)):
            total += paid[last].cost
            span = (paid[last].at - paid[first].at) / 1000
            worst = max(worst, total - (rate * span + burst))
    return worst


async def tokens(queue: ScriptedQueue) -> float:
    """Return what the bucket holds."""
    return float(str((await queue.state())["bucket tokens"]))


@pytest.mark.parametrize("unit", ["job", "tok"])
@pytest.mark.parametrize(("rate", "burst"), [(0.5, 4), (3, 1), (20, 10)])
async def test_no_history_exceeds_the_bound(queue: ScriptedQueue, rate: float, burst: int, unit: str) -> None:
    """Random claims, hand backs, settings and a clock that goes back: any span stays within it (G8, F-097, F-099)."""
    choose = random.Random(rate)
    cost = 1 if unit == "job" else 7
    await queue.configure(rate=rate, burst=burst, unit=unit, deadline=20_000)
    await queue.batch("B", 3_000, cost=cost)
    latest, starts = T0, list[Start]()
    for _ in range(400):
        await queue.pass_time(choose.choice((0, 1, 10, 100, 900, 2_000, 4_000, -500, -2_500)))
        latest = max(latest, queue.now)
        claimed = await queue.claim(choose.choice((1, 3, 8)))
        starts += [Start(latest, cost, lease.why) for lease in claimed.leases]
        if claimed.leases and choose.random() < 0.5:
            await queue.hand_back(claimed.leases[0])
        if choose.random() < 0.1:
            await queue.configure(reserve=choose.randrange(3))
    assert len(starts) >= 15
    assert worst_excess(starts, rate, burst) <= (0 if unit == "job" else cost) + 1e-6


async def test_50_claimers_share_one_bucket(queue: ScriptedQueue, redis_url: str) -> None:
    """At the same time and by the server's own clock: together no more than the bound (F-101)."""
    await queue.redis.hdel(queue.keys.config, "virtual")
    await queue.configure(rate=200, burst=20)
    await queue.batch("B", 2_000)
    clients: list[Redis] = [connect(redis_url, max_connections=1) for _ in range(50)]
    loop = asyncio.get_running_loop()
    began = loop.time()

    async def claim_for_a_second(number: int) -> int:
        own, started = ScriptedQueue(clients[number]), 0
        while loop.time() < began + 1.0:
            started += len((await own.claim(4, worker=f"w{number}")).leases)
        return started

    started = sum(await asyncio.gather(*(claim_for_a_second(number) for number in range(50))))
    for client in clients:
        await client.aclose()
    assert 20 < started <= 200 * (loop.time() - began) + 20


async def test_a_token_is_taken_only_for_a_job_that_starts(queue: ScriptedQueue) -> None:
    """No slot, expired jobs, chat, nothing there: none of it costs a token (F-103)."""
    await queue.configure(rate=0.001, burst=3)
    await queue.submit("old", cls="b", ttl_ms=10)
    await queue.batch("B", 9)
    await queue.submit("j1")
    await queue.pass_time(10)
    await queue.claim(1, free=0)
    await queue.claim(0)
    assert "bucket tokens" not in await queue.state()
    claimed = await queue.claim(2)
    assert (["B/1", "B/2"], 1) == (names(claimed), len(claimed.doomed))
    assert 1.0 == pytest.approx(await tokens(queue), abs=0.001)


async def test_it_fills_with_time_and_not_beyond_the_burst(queue: ScriptedQueue) -> None:
    """Rate by rate, to the burst."""
    await queue.configure(rate=2, burst=4)
    await queue.batch("B", 99)
    counts = []
    for ms in (0, 0, 499, 1, 1_500, 600_000):
        await queue.pass_time(ms)
        counts.append(len((await queue.claim(50)).leases))
    assert [4, 0, 0, 1, 3, 4] == counts


async def test_a_clock_that_goes_back_gives_nothing(queue: ScriptedQueue) -> None:
    """Time that passes twice fills the bucket once (F-097)."""
    await queue.configure(rate=1, burst=2)
    await queue.batch("B", 99)
    counts = []
    for ms in (0, 1_000, -1_000, 1_000, -5_000, 5_000, 1_000):
        await queue.pass_time(ms)
        counts.append(len((await queue.claim(50)).leases))
    assert [2, 1, 0, 0, 0, 0, 1] == counts


async def test_deadline_starts_are_debt(queue: ScriptedQueue) -> None:
    """They come on top, at most one a deadline, and are paid back; the debt is never more than the burst."""
    await queue.configure(rate=0.01, burst=2, deadline=10_000)
    await queue.batch("B", 99)
    assert 2 == len((await queue.claim(9)).leases)
    levels = []
    for _ in range(4):
        await queue.pass_time(10_000)
        assert [Why.DEADLINE] == [lease.why for lease in (await queue.claim(9)).leases]
        levels.append(await tokens(queue))
    assert pytest.approx([-0.9, -1.8, -2.0, -2.0]) == levels


async def test_llm_tokens_are_overdrawn_by_one_job_at_most(queue: ScriptedQueue) -> None:
    """A job starts while one token is there, and its whole cost is taken."""
    await queue.configure(rate=10, burst=15, unit="tok")
    await queue.batch("B", 99, cost=10)
    assert 2 == len((await queue.claim(9)).leases)
    assert -5.0 == await tokens(queue)
    claimed = await queue.claim(9)
    assert ([], "bucket", 0.6) == (claimed.leases, claimed.reason, claimed.wait)
    await queue.pass_time(600)
    assert 1 == len((await queue.claim(9)).leases)


class TestSettings:
    """A change acts on the next claim, and is no way around the bucket."""

    async def test_a_new_rate_counts_from_now_on(self, queue: ScriptedQueue) -> None:
        """What filled before did so at the old rate."""
        await queue.configure(rate=1, burst=100)
        await queue.batch("B", 999)
        await queue.claim(100)
        await queue.pass_time(5_000)
        await queue.configure(rate=50)
        assert 5 == len((await queue.claim(99)).leases)

    async def test_any_change_leaves_the_level_alone(self, queue: ScriptedQueue) -> None:
        """Setting something else, again and again, gives no token, also while the plan has another rate."""
        await queue.configure(rate=1_000, burst=1_000, plan=f"{T0} 1 1 job;")
        await queue.batch("B", 999)
        started = 0
        for deadline in range(30_000, 30_050):
            started += len((await queue.claim(9)).leases)
            await queue.pass_time(20)
            await queue.configure(deadline=deadline)
        assert 1 == started
        await queue.pass_time(20)
        assert 1 == len((await queue.claim(9)).leases)

    async def test_off_is_unlimited_and_on_begins_full(self, queue: ScriptedQueue) -> None:
        """No bucket, then a full one."""
        await queue.batch("B", 99)
        assert 50 == len((await queue.claim(50)).leases)
        await queue.configure(rate=0.001, burst=3)
        assert 3 == len((await queue.claim(50)).leases)
        await queue.configure(rate="", burst="")
        assert 9 == len((await queue.claim(9)).leases)

    async def test_a_rate_without_a_burst_allows_a_second_at_once(self, queue: ScriptedQueue) -> None:
        """And one job at least: a setting that was made by hand stops no worker."""
        await queue.batch("B", 99)
        await queue.configure(rate=3)
        assert 3 == len((await queue.claim(50)).leases)
        await queue.redis.delete(queue.keys.bucket)
        await queue.configure(rate=0.1)
        assert 1 == len((await queue.claim(50)).leases)

    @pytest.mark.parametrize("by_plan", [False, True])
    async def test_debt_is_of_its_unit(self, queue: ScriptedQueue, by_plan: bool) -> None:
        """A line of 100,000 LLM tokens is no debt of 99,000 jobs, which would be five hours of 5 a second (G8)."""
        await queue.configure(rate=1_000, burst=1_000, unit="tok", plan=f"{T0 + 1_000} 5 5 job;" if by_plan else "")
        await queue.batch("B", 99, cost=100_000)
        assert 1 == len((await queue.claim(9)).leases)
        await queue.pass_time(999)
        assert 0 == len((await queue.claim(9)).leases)
        if not by_plan:
            await queue.configure(rate=5, burst=5, unit="job")
        await queue.pass_time(201)
        assert 1 <= len((await queue.claim(9)).leases) <= 5

    async def test_a_change_of_the_unit_and_back_gives_nothing(self, queue: ScriptedQueue) -> None:
        """What was saved up is no more for being counted otherwise, and never more than the burst."""
        await queue.configure(rate=0.001, burst=2)
        await queue.batch("B", 99)
        assert 2 == len((await queue.claim(9)).leases)
        for _ in range(5):
            await queue.configure(rate=0.001, burst=1_000, unit="tok")
            assert 0 == len((await queue.claim(9)).leases)
            await queue.configure(rate=0.001, burst=2, unit="job")
            assert 0 == len((await queue.claim(9)).leases)

    async def test_the_plan_sets_the_rate_for_its_time(self, queue: ScriptedQueue) -> None:
        """Its last change that has begun is in force; `-` is what was set, `off` unlimited, `closed` nothing."""
        await queue.configure(rate=0.001, burst=1)
        steps = (
            f"{T0 + 1_000} off - -",
            f"{T0 + 2_000} closed - -",
            f"{T0 + 3_000} 0.001 4 job",
            f"{T0 + 4_000} - - -",
        )
        await queue.configure(plan="".join(f"{step};" for step in steps))
        await queue.batch("B", 99)
        counts = []
        for _ in range(5):
            counts.append(len((await queue.claim(20)).leases))
            await queue.redis.hdel(queue.keys.bucket, "tokens", "at")
            await queue.pass_time(1_000)
        assert [1, 20, 0, 4, 1] == counts


async def test_its_keys_end_by_themselves(queue: ScriptedQueue) -> None:
    """A queue that is not used any more leaves no bucket (F-102)."""
    await queue.configure(rate=1, burst=1)
    await queue.batch("B", 2)
    await queue.claim(1)
    assert "exhausted" not in {path.partition(" ")[2] for path in await queue.state()}
    await queue.claim(1)
    await queue.pass_time(1_000)
    await queue.claim(1)
    state = await queue.state()
    assert ("1", "1000", True) == (state["bucket exhausted"], state["bucket dry_ms"], state["bucket ttl"])
