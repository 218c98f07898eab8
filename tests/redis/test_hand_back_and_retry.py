"""The scripts hand_back and retry: a job that ran waits again, in its place, with what it went through noted."""

from __future__ import annotations

import pytest

from llmq.scheduler import scripts
from llmq.scheduler.lease import Answered, HandedBack, Reason, Retry, Usage
from llmq.scheduler.scripts import settle
from tests.scripted_queue import T0, ScriptedQueue, changes, names

pytestmark = pytest.mark.leaves("llmq:{q}:*")


async def test_a_handed_back_line_waits_in_its_place(queue: ScriptedQueue) -> None:
    """Not pending, in `back` under its number, no attempt spent, its start no start, and a bell (G6)."""
    await queue.batch("B", 3)
    leases = (await queue.claim(3)).leases
    await queue.redis.delete(queue.keys.bell("b"))
    before = await queue.state()
    assert 1 == await queue.hand_back(leases[1])
    assert {
        "bell:b": (None, 1),
        "bell:b ttl": (None, True),
        "bucket came:t": (None, str(T0)),
        "bucket since": (None, str(T0)),
        "bucket ttl": (None, True),
        "lane:batch:B running 2-0": ("w x1", None),
        "lane:batch:B:back 2-0": (None, 2.0),
        "order:b t|1314496000000|batch:B": (None, 0.0),
        "ready:b t": (None, 0.0),
        "starts batch:B|2-0": (-float(T0), None),
        "tries batch:B|2-0": (None, "1 0 0 0 -"),
    } == changes(before, await queue.state())


async def test_with_a_delay_it_sleeps_until_then(queue: ScriptedQueue) -> None:
    """The lane sleeps with it, and wakes in time."""
    await queue.batch("B", 1)
    await queue.hand_back(*(await queue.claim()).leases, reason=Reason.OVERLOAD, delay=2.0)
    state = await queue.state()
    assert (T0 + 2_000.0, T0 + 2_000.0) == (state["lane:batch:B:back 1-0"], state["asleep batch:B"])
    await queue.pass_time(1_999)
    assert [] == names(await queue.claim())
    await queue.pass_time(1)
    assert ["B/1"] == names(await queue.claim())


async def test_what_a_job_went_through_adds_up(queue: ScriptedQueue) -> None:
    """Deliveries, attempts, crashes and preemptions, each counted on its own; the third preemption protects."""
    await queue.batch("B", 1)
    await queue.retry((await queue.claim()).leases[0])
    await queue.retry((await queue.claim()).leases[0], crashed=True)
    for _ in range(3):
        (lease,) = (await queue.claim()).leases
        assert not lease.protected()
        await queue.hand_back(lease, reason=Reason.PREEMPTED)
    await queue.crash(*(await queue.claim()).leases)
    (lease,) = (await queue.claim()).leases
    assert (7, 1, 2, 3) == (lease.fence.delivery, lease.attempts, lease.crashes, lease.preemptions)
    assert lease.protected()


async def test_a_retry_spends_an_attempt_and_waits(queue: ScriptedQueue) -> None:
    """Its start counts as one, for it was left to finish."""
    await queue.batch("B", 1)
    (lease,) = (await queue.claim()).leases
    before = await queue.state()
    assert await queue.retry(lease, 0.5)
    assert {
        "asleep batch:B": (None, T0 + 500.0),
        "bucket start": (None, str(T0)),
        "bucket ttl": (None, True),
        "lane:batch:B running 1-0": ("w x1", None),
        "lane:batch:B:back 1-0": (None, T0 + 500.0),
        "starts batch:B|1-0": (-float(T0), None),
        "tries batch:B|1-0": (None, "1 1 0 0 -"),
    } == changes(before, await queue.state())


async def test_a_lane_with_more_to_do_does_not_sleep(queue: ScriptedQueue) -> None:
    """One line that is due later holds no other line up, and comes before those that have not started (G17)."""
    await queue.batch("B", 5)
    await queue.retry((await queue.claim()).leases[0], 1.0)
    assert ["B/2", "B/3"] == names(await queue.claim(2))
    await queue.pass_time(1_000)
    assert ["B/1", "B/4"] == names(await queue.claim(2))


async def test_the_earliest_of_several_wakes_the_lane(queue: ScriptedQueue) -> None:
    """In whichever order the delays came."""
    await queue.batch("B", 3)
    for lease, delay in zip((await queue.claim(3)).leases, (3.0, 1.0, 2.0), strict=True):
        await queue.retry(lease, delay)
    started = []
    for _ in range(3):
        await queue.pass_time(1_000)
        started += names(await queue.claim(3))
    assert ["B/2", "B/3", "B/1"] == started


@pytest.mark.parametrize("cls", ["i", "b"])
async def test_a_full_queue_takes_back_what_it_gave(queue: ScriptedQueue, cls: str) -> None:
    """Over the cap and at maxmemory, hand back and retry are never refused (G15, F-067)."""
    for number in range(3):
        await queue.submit(f"j{number}", cls=cls)
    await queue.configure(cap_interactive=1, cap_batch=1)
    one, two, _ = (await queue.claim(3)).leases
    async with queue.at_maxmemory():
        assert 1 == await queue.hand_back(one)
        assert await queue.retry(two)
    assert ["j0", "j1"] == names(await queue.claim(3))


async def test_outcomes_of_every_kind_settle_in_one_trip(queue: ScriptedQueue) -> None:
    """Ends in one call, hand backs in one, each retry in one; all of them hold."""
    await queue.batch("B", 5)
    one, two, three, four, _ = (await queue.claim(5)).leases
    outcomes = (
        (one, Answered(200, b"{}", "r", Usage(1, 1))),
        (two, HandedBack(Reason.SHUTDOWN)),
        (three, Retry(1.0, "went wrong")),
        (four, Answered(200, b"{}", "r")),
    )
    calls = settle(queue.keys, "w", "h", outcomes)
    assert ["finish", "hand_back", "retry"] == [call.script.name for call in calls]
    assert [[], [], True] == await scripts.run_all(queue.redis, calls)
    state = await queue.state()
    assert ("2", 2.0, T0 + 1_000.0) == (
        state["b:B completed"],
        state["lane:batch:B:back 2-0"],
        state["lane:batch:B:back 3-0"],
    )


async def test_a_line_of_a_cancelled_batch_does_not_run_again(queue: ScriptedQueue) -> None:
    """Handed back after the cancel, it waits for the reaper (G14)."""
    await queue.batch("B", 2)
    (lease,) = (await queue.claim()).leases
    await queue.cancel_batch("B")
    await queue.hand_back(lease)
    assert [] == names(await queue.claim(9))
    assert 2 == await queue.reap("B")
    assert "cancelled" == (await queue.state())["b:B status"]


async def test_what_is_kept_of_an_answer_comes_back_with_the_line(queue: ScriptedQueue) -> None:
    """Any bytes, through hand back, claim and a crash; a retry begins anew, and the end leaves nothing (G11)."""
    kept = bytes(range(256)) + b" 1 2 3 \n"
    await queue.batch("B", 1)
    (lease,) = (await queue.claim()).leases
    assert b"" == lease.kept
    await queue.call(scripts.hand_back(queue.keys, "w", [(lease.fence, HandedBack(Reason.PREEMPTED, kept=kept))]))
    (lease,) = (await queue.claim()).leases
    assert (kept, 1) == (lease.kept, lease.preemptions)
    await queue.crash(lease)
    (lease,) = (await queue.claim()).leases
    assert (kept, 1, 1) == (lease.kept, lease.preemptions, lease.crashes)
    await queue.retry(lease)
    (lease,) = (await queue.claim()).leases
    assert (b"", 1) == (lease.kept, lease.attempts)
