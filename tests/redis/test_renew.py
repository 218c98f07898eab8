"""The scripts renew and first_delta: keeping leases, learning of cancellation, and that an answer has begun."""

from __future__ import annotations

import pytest

from llmq.scheduler import scripts
from llmq.scheduler.lease import ErrorCode
from llmq.scheduler.scripts import Verdict
from tests.scripted_queue import LEASE_MS, T0, ScriptedQueue, changes, names

pytestmark = pytest.mark.leaves("llmq:{q}:*")


async def test_a_renewed_lease_is_young_again_and_the_fence_stays(queue: ScriptedQueue) -> None:
    """Renewal resets the idle time alone, in several lanes at once (G4)."""
    await queue.batch("B", 2)
    await queue.submit("j1")
    leases = (await queue.claim(3)).leases
    await queue.lapse(*leases)
    before = await queue.state()
    renewed = await queue.renew(*leases)
    assert ([], []) == (renewed.lost, renewed.cancelled)
    assert {} == changes(before, await queue.state())
    for lane in ("batch:B", "i:t"):
        rows = await queue.redis.xpending_range(queue.keys.lane(lane), "workers", "-", "+", 10)
        assert all(row["time_since_delivered"] < LEASE_MS for row in rows)
        assert 0 == (await queue.sweep(lane)).reclaimed


async def test_lost_and_kept_leases_are_told_apart(queue: ScriptedQueue) -> None:
    """One that was reclaimed is named, the others are renewed all the same."""
    await queue.batch("B", 3)
    one, two, three = (await queue.claim(3)).leases
    await queue.crash(two)
    assert [two.fence] == (await queue.renew(one, two, three)).lost


async def test_more_leases_than_one_command_takes(queue: ScriptedQueue) -> None:
    """A worker with very many slots renews in one call."""
    await queue.batch("B", 1_200)
    leases = (await queue.claim(1_200)).leases
    await queue.lapse(*leases[::300])
    assert [] == (await queue.renew(*leases)).lost
    assert 0 == (await queue.sweep("batch:B", count=2_000)).reclaimed


async def test_it_tells_of_cancelled_jobs(queue: ScriptedQueue) -> None:
    """A running job or a line of a batch that somebody cancelled; the lease is kept until it is aborted (G14)."""
    await queue.submit("j1")
    await queue.submit("j2")
    await queue.batch("B", 1)
    one, two, line = (await queue.claim(3)).leases
    assert Verdict("signalled", "w") == await queue.cancel("j1")
    cancelled = await queue.cancel_batch("B")
    assert ("cancelling", ("w",)) == (cancelled.word, cancelled.consumers)
    renewed = await queue.renew(one, two, line)
    assert ([], [one.fence, line.fence]) == (renewed.lost, renewed.cancelled)


async def test_it_works_on_a_full_server(queue: ScriptedQueue) -> None:
    """Leases do not lapse because memory is short."""
    await queue.submit("j1")
    leases = (await queue.claim()).leases
    async with queue.at_maxmemory():
        assert [] == (await queue.renew(*leases)).lost
        assert await queue.first_delta(*leases)
        await queue.call(scripts.beat(queue.keys, "w", ttl_ms=1000, fields={"host": "h"}))
        assert (await queue.call(scripts.lead(queue.keys, "w", interval_ms=1000))).leads


async def test_a_heartbeat_says_everything_each_time(queue: ScriptedQueue) -> None:
    """Fields of the one before go; a Redis that came back empty knows worker and format again at once (F-022, G12)."""
    await queue.call(scripts.beat(queue.keys, "w", ttl_ms=LEASE_MS, fields={"host": "h", "busy": 1}))
    await queue.redis.delete(queue.keys.config, queue.keys.workers)
    await queue.set_clock(T0)
    beat = await queue.call(scripts.beat(queue.keys, "w", ttl_ms=LEASE_MS, fields={"host": "h2"}))
    assert (1, T0, b"1") == (beat.format, beat.now_ms, beat.config[b"format"])
    assert {
        "config format": "1",
        "worker:w host": "h2",
        "worker:w ttl": True,
        "workers ttl": True,
        "workers w": float(T0),
    } == await queue.state()


class TestFirstDelta:
    """An interactive job that has sent a delta is not run a second time (G18)."""

    async def test_it_is_noted_and_told(self, queue: ScriptedQueue) -> None:
        """The flag and the inbox's first entry come together."""
        await queue.submit("j1")
        (lease,) = (await queue.claim()).leases
        before = await queue.state()
        assert await queue.first_delta(lease)
        assert {
            "inbox:c": (None, 1),
            "inbox:c ttl": (None, True),
            "tries i:t|j1": (None, "0 0 0 0 s"),
        } == changes(before, await queue.state())

    async def test_after_a_crash_it_is_interrupted(self, queue: ScriptedQueue) -> None:
        """The sweeper ends it; nobody runs it."""
        await queue.submit("j1")
        (lease,) = (await queue.claim()).leases
        await queue.first_delta(lease)
        (doomed,) = await queue.crash(lease)
        assert "interrupted" == doomed.verdict
        assert [] == names(await queue.claim())
        assert await queue.end(doomed.lease, ErrorCode.INTERRUPTED, worker="s")
        assert "interrupted" == (await queue.state())["job:j1 state"]

    async def test_handed_back_it_is_interrupted_too(self, queue: ScriptedQueue) -> None:
        """A worker that hands it back all the same does not get it run again."""
        await queue.submit("j1")
        (lease,) = (await queue.claim()).leases
        await queue.first_delta(lease)
        await queue.hand_back(lease)
        claimed = await queue.claim()
        assert ([], ["interrupted"]) == (names(claimed), [doomed.verdict for doomed in claimed.doomed])

    async def test_a_crash_before_it_is_no_interruption(self, queue: ScriptedQueue) -> None:
        """Without a delta the job runs again (G5)."""
        await queue.submit("j1")
        assert [] == await queue.crash(*(await queue.claim()).leases)
        assert ["j1"] == names(await queue.claim())
