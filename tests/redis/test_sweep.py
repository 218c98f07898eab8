"""The scripts sweep and forget: jobs whose worker is gone run elsewhere, and nothing is taken from the living."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from redis.asyncio import Redis

from llmq.scheduler import scripts
from llmq.scheduler.connection import connect
from llmq.scheduler.lease import ErrorCode, lane_of_batch
from tests.scripted_queue import LEASE_MS, T0, ScriptedQueue, changes, name, names

pytestmark = pytest.mark.leaves("llmq:{q}:*")

LANE = lane_of_batch("B")


async def test_a_job_whose_lease_ran_out_waits_again(queue: ScriptedQueue) -> None:
    """In its place, one crash more, its start no start, and a bell; its neighbour keeps running (G5, G7)."""
    await queue.batch("B", 2)
    gone, alive = (await queue.claim(2)).leases
    await queue.lapse(gone)
    await queue.redis.delete(queue.keys.bell("b"))
    before = await queue.state()
    assert scripts.Swept("0-0", 1, [], []) == await queue.sweep(LANE)
    assert {
        "bell:b": (None, 1),
        "bell:b ttl": (None, True),
        "bucket came:t": (None, str(T0)),
        "bucket since": (None, str(T0)),
        "bucket ttl": (None, True),
        "lane:batch:B running 1-0": ("w x1", None),
        "lane:batch:B:back 1-0": (None, 1.0),
        "order:b t|1314496000000|batch:B": (None, 0.0),
        "ready:b t": (None, 0.0),
        "starts batch:B|1-0": (-float(T0), None),
        "tries batch:B|1-0": (None, "1 0 1 0 -"),
    } == changes(before, await queue.state())
    assert 1 == await queue.finish(alive)


async def test_a_lease_that_is_renewed_is_never_taken(queue: ScriptedQueue) -> None:
    """However long the job runs (G4, F-002)."""
    await queue.batch("B", 1)
    (lease,) = (await queue.claim()).leases
    for _ in range(10):
        await queue.lapse(lease)
        assert [] == (await queue.renew(lease)).lost
        assert 0 == (await queue.sweep(LANE)).reclaimed
    assert 1 == await queue.finish(lease)


@pytest.mark.parametrize("lease", ["120000", "1", "-5", "1.5", "3600001", "nan", "a while"])
async def test_a_lease_that_was_made_longer_holds_for_who_has_not_heard_of_it(queue: ScriptedQueue, lease: str) -> None:
    """Of two lengths the longer one counts, and what is none does not (G4, F-070)."""
    await queue.batch("B", 1)
    await queue.lapse(*(await queue.claim()).leases)
    await queue.redis.hset(queue.keys.config, "lease", lease)
    assert (0 if lease == "120000" else 1) == (await queue.sweep(LANE)).reclaimed


async def test_a_large_lane_is_swept_in_steps(queue: ScriptedQueue) -> None:
    """The cursor leads through all that is pending, whatever the step."""
    await queue.batch("B", 250)
    await queue.lapse(*(await queue.claim(250)).leases)
    cursor, reclaimed, steps = "0-0", 0, 0
    while steps == 0 or cursor != "0-0":
        swept = await queue.sweep(LANE, cursor=cursor, count=20)
        cursor, reclaimed, steps = swept.cursor, reclaimed + swept.reclaimed, steps + 1
    assert (250, [f"B/{n}" for n in range(1, 251)]) == (reclaimed, await queue.drain())
    assert steps > 10


async def test_16_sweepers_reclaim_each_job_once(queue: ScriptedQueue, redis_url: str) -> None:
    """At the same time, each on a connection of its own (F-001)."""
    await queue.batch("B", 200)
    await queue.lapse(*(await queue.claim(200)).leases)
    clients: list[Redis] = [connect(redis_url) for _ in range(16)]

    async def sweep(number: int) -> int:
        own = ScriptedQueue(clients[number])
        cursor, reclaimed = "0-0", 0
        while True:
            swept = await own.sweep(LANE, worker=f"s{number}", cursor=cursor, count=10)
            cursor, reclaimed = swept.cursor, reclaimed + swept.reclaimed
            if cursor == "0-0":
                return reclaimed

    assert 200 == sum(await asyncio.gather(*(sweep(number) for number in range(16))))
    for client in clients:
        await client.aclose()
    assert {f"B/{n}": 1 for n in range(1, 201)} == Counter(await queue.drain())


class TestTheThirdDeath:
    """A job that was in flight at three deaths goes to the dead letters (G7)."""

    async def test_it_is_dead_and_nothing_else_is(self, queue: ScriptedQueue) -> None:
        """Its neighbours complete (F-117)."""
        await queue.batch("B", 3)
        for _ in range(2):
            lease = (await queue.claim()).leases[0]
            assert [] == await queue.crash(lease)
        lease = (await queue.claim()).leases[0]
        (doomed,) = await queue.crash(lease)
        assert ("B/1", "dead", 3) == (name(doomed.lease), doomed.verdict, doomed.lease.crashes)
        assert await queue.end(doomed.lease, ErrorCode.WORKER_LOST, worker="s", dead=True)
        assert ["B/2", "B/3"] == await queue.drain()
        state = await queue.state()
        assert ("completed", "2", "1") == tuple(state[f"b:B {field}"] for field in ("status", "completed", "failed"))
        letter = state["dead #1"]
        assert isinstance(letter, dict)
        assert ("k1", "worker_lost", "3") == (letter["key"], letter["code"], letter["crashes"])

    async def test_crashes_of_worker_and_engine_count_together(self, queue: ScriptedQueue) -> None:
        """Two deaths of the engine, one of the worker."""
        await queue.batch("B", 1)
        for _ in range(2):
            await queue.retry((await queue.claim()).leases[0], crashed=True)
        assert ["dead"] == [doomed.verdict for doomed in await queue.crash(*(await queue.claim()).leases)]

    async def test_its_start_is_no_start(self, queue: ScriptedQueue) -> None:
        """The deadline counts from the last start that was left to finish (G10)."""
        await queue.batch("B", 9)
        for _ in range(2):
            await queue.retry((await queue.claim()).leases[0], crashed=True)
        (lease,) = (await queue.claim()).leases
        await queue.pass_time(5_000)
        (doomed,) = await queue.crash(lease)
        assert await queue.end(doomed.lease, ErrorCode.WORKER_LOST, worker="s", dead=True)
        assert "starts batch:B|1-0" not in await queue.state()

    async def test_a_sweeper_that_dies_leaves_it_to_the_next(self, queue: ScriptedQueue) -> None:
        """What was to be ended is pending for the sweeper, and lapses like any lease (F-043)."""
        await queue.batch("B", 1)
        for _ in range(2):
            await queue.crash(*(await queue.claim()).leases)
        (doomed,) = await queue.crash(*(await queue.claim()).leases)
        (again,) = await queue.crash(doomed.lease, worker="s2")
        assert "dead" == again.verdict
        assert not await queue.end(doomed.lease, ErrorCode.WORKER_LOST, worker="s", dead=True)
        assert await queue.end(again.lease, ErrorCode.WORKER_LOST, worker="s2", dead=True)


async def test_a_cancelled_job_of_a_gone_worker_is_ended(queue: ScriptedQueue) -> None:
    """It does not run again: single jobs and lines (G14)."""
    await queue.submit("j1")
    await queue.batch("B", 1)
    leases = (await queue.claim(2)).leases
    await queue.cancel("j1")
    await queue.cancel_batch("B")
    doomed = await queue.crash(*leases)
    assert ["cancelled", "cancelled"] == [one.verdict for one in doomed]
    for one in doomed:
        assert await queue.end(one.lease, ErrorCode.CANCELLED, worker="s")
    state = await queue.state()
    assert ("cancelled", "cancelled") == (state["job:j1 state"], state["b:B status"])


async def test_a_step_that_comes_late_does_nothing(queue: ScriptedQueue) -> None:
    """It waited in a server that hung: its contact is broken, and the owners must renew first (G4)."""
    await queue.batch("B", 1)
    (lease,) = (await queue.claim(1)).leases
    await queue.lapse(lease)
    before = await queue.state()
    now = int((await queue.redis.hget(queue.keys.config, "virtual")) or 0)

    def late(not_after_ms: int) -> scripts.Call[scripts.Swept]:
        return scripts.sweep(queue.keys, "s", lane=LANE, lease_ms=1, cursor="0-0", not_after_ms=not_after_ms)

    assert scripts.Swept("0-0", 0, [], []) == await queue.call(late(now - 1))
    assert {} == changes(before, await queue.state())
    assert 1 == (await queue.call(late(now))).reclaimed


async def test_entries_that_somebody_deleted_are_named(queue: ScriptedQueue) -> None:
    """They are no longer pending, leave no trace in the queue's keys, and nothing else is harmed (F-068)."""
    await queue.batch("B", 3)
    leases = (await queue.claim(2)).leases
    await queue.lapse(*leases)
    await queue.redis.xdel(queue.keys.lane(LANE), "1-0")
    assert scripts.Swept("0-0", 1, [], ["1-0"]) == await queue.sweep(LANE)
    state = await queue.state()
    assert [] == [path for path in state if "1-0" in path]
    assert ["B/2", "B/3"] == names(await queue.claim(9))


async def test_a_deleted_line_ends_with_an_error_line(queue: ScriptedQueue) -> None:
    """Its batch completes without it, and the counts are right (F-068, G16)."""
    await queue.batch("B", 2)
    first, second = (await queue.claim(2)).leases
    await queue.lapse(first)
    await queue.redis.xdel(queue.keys.lane(LANE), "1-0")
    swept = await queue.sweep(LANE)
    assert 1 == await queue.call(scripts.lose(queue.keys, lane=LANE, entries=swept.deleted))
    assert {"b": b"1"} == {k.decode(): v for k, v in (await queue.redis.hgetall(queue.keys.counts)).items()}
    await queue.finish(second)
    state = await queue.state()
    assert ("completed", "1", "1") == tuple(state[f"b:B {name}"] for name in ("status", "completed", "failed"))
    assert [] == [path for path in state if path.startswith(("counts", "lanes"))]


async def test_a_deleted_single_job_leaves_no_lane(queue: ScriptedQueue) -> None:
    """Nothing else waits there (F-068, G11); the count is set right by the self-check (F-050)."""
    verdict = await queue.submit("j1")
    (lease,) = (await queue.claim(1)).leases
    await queue.lapse(lease)
    await queue.redis.xdel(queue.keys.lane("i:t"), verdict.value)
    swept = await queue.sweep("i:t")
    await queue.call(scripts.lose(queue.keys, lane="i:t", entries=swept.deleted))
    assert {} == await queue.redis.hgetall(queue.keys.lanes)
    assert 1 == await queue.call(scripts.recount(queue.keys, lanes=[]))
    assert {} == await queue.redis.hgetall(queue.keys.counts)


async def test_counts_that_are_wrong_are_set_right(queue: ScriptedQueue) -> None:
    """The self-check repairs what a foreign hand broke, and says how much (F-050); a count that is right stays."""
    await queue.batch("B", 3)
    await queue.submit("j1")
    await queue.redis.hset(queue.keys.counts, mapping={"b": 7, "i": 1})
    assert 4 == await queue.call(scripts.recount(queue.keys, lanes=[LANE, "i:t"]))
    assert {b"b": b"3", b"i": b"1"} == await queue.redis.hgetall(queue.keys.counts)
    await queue.redis.hset(queue.keys.counts, "b", 9)
    assert 0 == await queue.call(scripts.recount(queue.keys, lanes=[LANE]))


async def test_a_single_job_that_somebody_deleted_is_lost_to_its_waiter(queue: ScriptedQueue) -> None:
    """Asked to cancel it, the queue says what became of it, and counts it no longer (F-068, G13)."""
    verdict = await queue.submit("j1")
    await queue.submit("j2")
    await queue.redis.xdel(queue.keys.lane("i:t"), verdict.value)
    await queue.cancel("j1")
    state = await queue.state()
    assert ("lost", "1") == (state["job:j1 state"], state["counts i"])


async def test_a_job_that_waits_cannot_be_ended_as_lost(queue: ScriptedQueue) -> None:
    """Who found the entry gone may have seen an earlier job of the same key; the one that is there runs (G1, F-016)."""
    await queue.submit("j1")
    before = await queue.state()
    assert scripts.Verdict("running") == await queue.cancel("j1", state="lost")
    assert {} == changes(before, await queue.state())
    assert ["j1"] == await queue.drain()


async def test_a_group_that_was_deleted_is_made_again(queue: ScriptedQueue) -> None:
    """What ran then waits again, also where the lane had nothing more to claim (F-056)."""
    await queue.batch("B", 2)
    await queue.claim(2)
    await queue.redis.xgroup_destroy(queue.keys.lane(LANE), "workers")
    assert [] == names(await queue.claim(2))
    await queue.sweep(LANE)
    assert ["B/1", "B/2"] == names(await queue.claim(2))


async def test_a_lane_without_a_stream_is_passed_over(queue: ScriptedQueue) -> None:
    """An open batch without lines has none yet."""
    await queue.open("B")
    before = await queue.state()
    assert scripts.Swept("0-0", 0, [], []) == await queue.sweep(LANE)
    assert {} == changes(before, await queue.state())


async def test_it_works_on_a_full_server(queue: ScriptedQueue) -> None:
    """Reclaiming is never refused."""
    await queue.batch("B", 2)
    leases = (await queue.claim(2)).leases
    await queue.lapse(*leases)
    async with queue.at_maxmemory():
        assert 2 == (await queue.sweep(LANE)).reclaimed


class TestForget:
    """A consumer is removed only when nothing is lost by it (F-048, F-049)."""

    async def forget(self, queue: ScriptedQueue) -> bool:
        """Ask for the removal of worker `w`."""
        return await queue.call(scripts.forget(queue.keys, "w", lane=LANE))

    async def test_not_while_it_has_pending_entries(self, queue: ScriptedQueue) -> None:
        """They would be destroyed."""
        await queue.batch("B", 2)
        (lease,) = (await queue.claim()).leases
        assert not await self.forget(queue)
        await queue.hand_back(lease)
        assert await self.forget(queue)
        assert [] == await queue.redis.xinfo_consumers(queue.keys.lane(LANE), "workers")

    async def test_not_while_its_worker_lives(self, queue: ScriptedQueue) -> None:
        """A heartbeat keeps the name."""
        await queue.batch("B", 2)
        await queue.hand_back(*(await queue.claim()).leases)
        await queue.call(scripts.beat(queue.keys, "w", ttl_ms=LEASE_MS, fields={"host": "h"}))
        assert not await self.forget(queue)
        await queue.redis.delete(queue.keys.worker("w"))
        assert await self.forget(queue)


async def test_one_sweeper_leads_at_a_time(queue: ScriptedQueue) -> None:
    """The lock ends by itself, so that a sweeper that died is followed by another (F-043)."""
    await queue.batch("B", 1, window_ms=10)
    lead = scripts.lead(queue.keys, "s1", interval_ms=5_000)
    first = await queue.call(lead)
    assert (True, {"batch:B": "+b|t|1000000000010"}, T0) == (first.leads, first.lanes, first.now_ms)
    assert not (await queue.call(scripts.lead(queue.keys, "s2", interval_ms=5_000))).leads
    assert 0 < await queue.redis.pttl(queue.keys.sweeper) <= 5_000
