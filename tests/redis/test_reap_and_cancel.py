"""The scripts cancel_job, cancel_batch and reap: what waits does not start, what runs is told."""

from __future__ import annotations

import pytest

from llmq.scheduler import scripts
from llmq.scheduler.lease import ErrorCode
from llmq.scheduler.scripts import Verdict
from tests.scripted_queue import DATA, T0, ScriptedQueue, changes, names

waiting = pytest.mark.leaves("llmq:{q}:*")


class TestCancelJob:
    """One single job."""

    async def test_a_waiting_job_never_starts(self, queue: ScriptedQueue) -> None:
        """Its record says so, its client is told, and nothing else of it is left (G14, G11)."""
        await queue.submit("j1")
        before = await queue.state()
        assert Verdict("cancelled") == await queue.cancel("j1")
        assert {
            "counts i": ("1", None),
            "inbox:c": (None, 1),
            "inbox:c ttl": (None, True),
            "job:j1 attempts": (None, "0"),
            "job:j1 code": (None, "batch_cancelled"),
            "job:j1 crashes": (None, "0"),
            "job:j1 ended_at": (None, str(T0)),
            "job:j1 message": (None, "because"),
            "job:j1 preemptions": (None, "0"),
            "job:j1 state": (None, "cancelled"),
            "job:j1 ttl": (None, True),
            "lane:i:t": (1, None),
            "lanes i:t": ("+i|t|0000000000000", None),
            "order:i t|0000000000000|i:t": (0.0, None),
            "ready:i t": (0.0, None),
        } == changes(before, await queue.state())
        assert [] == names(await queue.claim())

    @waiting
    async def test_a_running_job_is_marked_for_its_worker(self, queue: ScriptedQueue) -> None:
        """The worker is named; whatever the attempt does then, the job does not run again (G14, F-124)."""
        await queue.submit("j1")
        (lease,) = (await queue.claim()).leases
        assert Verdict("signalled", "w") == await queue.cancel("j1")
        assert Verdict("signalled", "w") == await queue.cancel("j1")
        assert [lease.fence] == (await queue.renew(lease)).cancelled
        await queue.retry(lease, 0.5)
        await queue.pass_time(500)
        claimed = await queue.claim()
        assert ([], ["cancelled"]) == (names(claimed), [doomed.verdict for doomed in claimed.doomed])

    async def test_a_delayed_job_never_starts(self, queue: ScriptedQueue) -> None:
        """It waits for its next attempt, and is taken out of there."""
        await queue.submit("j1")
        await queue.retry((await queue.claim()).leases[0], 5.0)
        assert Verdict("cancelled") == await queue.cancel("j1")
        await queue.pass_time(5_000)
        assert [] == names(await queue.claim())

    async def test_a_job_that_ended_stays_as_it_ended(self, queue: ScriptedQueue) -> None:
        """The answer is its state; an unknown job is unknown (F-124)."""
        await queue.submit("j1")
        await queue.finish(*(await queue.claim()).leases)
        before = await queue.state()
        assert Verdict("ended", "completed") == await queue.cancel("j1")
        assert Verdict("unknown") == await queue.cancel("j2")
        assert {} == changes(before, await queue.state())

    async def test_its_neighbours_keep_their_place(self, queue: ScriptedQueue) -> None:
        """The others start in their order (F-129)."""
        for number in range(4):
            await queue.submit(f"j{number}")
        await queue.cancel("j1")
        assert ["j0", "j2", "j3"] == await queue.drain()

    async def test_only_what_waited_too_long_expires(self, queue: ScriptedQueue) -> None:
        """A waiter whose job ran out of time ends it; not before, and not when it runs."""
        await queue.submit("j1", ttl_ms=1_000)
        await queue.submit("j2", ttl_ms=1_000)
        (lease,) = (await queue.claim()).leases
        assert Verdict("running") == await queue.cancel("j2", state="expired")
        await queue.pass_time(1_000)
        assert Verdict("running") == await queue.cancel("j1", state="expired")
        assert Verdict("cancelled") == await queue.cancel("j2", state="expired")
        assert "expired" == (await queue.state())["job:j2 state"]
        await queue.finish(lease)

    async def test_it_works_on_a_full_server(self, queue: ScriptedQueue) -> None:
        """Cancelling frees memory."""
        await queue.submit("j1")
        await queue.submit("j2")
        await queue.claim()
        async with queue.at_maxmemory():
            assert ["signalled", "cancelled"] == [(await queue.cancel(job)).word for job in ("j1", "j2")]
        await queue.redis.delete(*await queue.redis.keys("*"))


class TestCancelBatch:
    """A whole batch."""

    @waiting
    async def test_no_line_starts_any_more(self, queue: ScriptedQueue) -> None:
        """At once, whatever waits; the lines that run are their workers' to abort (G14)."""
        await queue.batch("B", 3)
        await queue.claim(1, worker="w1")
        before = await queue.state()
        assert scripts.BatchCancel("cancelling", "cancelling", ("w1",)) == await queue.cancel_batch("B")
        assert {
            "b:B cancelling_at": (None, str(T0)),
            "b:B status": ("in_progress", "cancelling"),
            "bucket came:t": (str(T0), None),
            "bucket since": (str(T0), None),
            "bucket ttl": (True, None),
            "ending batch:B": (None, float(T0)),
            "lanes batch:B": ("+b|t|1314496000000", "xb|t|1314496000000"),
            "order:b t|1314496000000|batch:B": (0.0, None),
            "ready:b t": (10.0, None),
        } == changes(before, await queue.state())
        assert [] == names(await queue.claim(9))

    async def test_every_line_ends_once(self, queue: ScriptedQueue) -> None:
        """Finished, running, delayed, handed back, waiting: one result each, then the batch is cancelled (G16, G11)."""
        await queue.batch("B", 6)
        one, two, three, four = (await queue.claim(4)).leases
        await queue.finish(one)
        await queue.hand_back(two)
        await queue.retry(three, 60.0)
        await queue.cancel_batch("B")
        assert 4 == await queue.reap("B", count=2)
        assert 0 == await queue.reap("B")
        assert await queue.end(four, ErrorCode.CANCELLED)
        state = await queue.state()
        assert ("cancelled", "1", "5") == tuple(state[f"b:B {field}"] for field in ("status", "completed", "failed"))
        results = [state[f"b:B:results #{number}"] for number in range(1, 7)]
        assert ["1", "2", "3", "4", "5", "6"] == sorted(str(one["n"]) for one in results if isinstance(one, dict))
        line = {"n": "5", "k": "k5", "s": "cancelled", "e": "batch_cancelled", "m": "the batch was cancelled"}
        assert line | {"d": DATA.decode(errors="replace")} in results

    async def test_a_batch_without_lines_is_cancelled_at_once(self, queue: ScriptedQueue) -> None:
        """There is nothing to reap."""
        await queue.open("B")
        assert scripts.BatchCancel("ended", "cancelled") == await queue.cancel_batch("B")
        assert scripts.BatchCancel("ended", "cancelled") == await queue.cancel_batch("B")
        assert scripts.BatchCancel("unknown") == await queue.cancel_batch("C")

    async def test_an_open_batch_takes_no_line_after_it(self, queue: ScriptedQueue) -> None:
        """The producer is told; the lines that it had sent end (G16)."""
        await queue.open("B")
        await queue.append("B", 1, 3, bad=[2])
        await queue.cancel_batch("B")
        assert Verdict("closed", "cancelling") == await queue.append("B", 4, 3)
        assert Verdict("closed", "cancelling") == await queue.seal("B", 4)
        assert 2 == await queue.reap("B")
        assert Verdict("closed", "cancelled") == await queue.append("B", 4, 3)
        state = await queue.state()
        assert ("cancelled", "3", "3") == tuple(state[f"b:B {field}"] for field in ("status", "total", "failed"))

    async def test_it_works_on_a_full_server(self, queue: ScriptedQueue) -> None:
        """Cancel and reap free memory."""
        await queue.batch("B", 20)
        async with queue.at_maxmemory():
            assert "cancelling" == (await queue.cancel_batch("B")).word
            assert 20 == await queue.reap("B")


class TestWindow:
    """A batch whose window is over."""

    async def test_what_did_not_start_expires(self, queue: ScriptedQueue) -> None:
        """What runs may finish; then the batch is expired (G16)."""
        await queue.batch("B", 5, window_ms=1_000)
        one, two = (await queue.claim(2)).leases
        await queue.retry(two, 5.0)
        assert 0 == await queue.reap("B")
        await queue.pass_time(1_000)
        assert 4 == await queue.reap("B")
        assert "expiring" == (await queue.state())["b:B status"]
        assert 1 == await queue.finish(one)
        state = await queue.state()
        assert ("expired", "1", "4") == tuple(state[f"b:B {field}"] for field in ("status", "completed", "failed"))
        line = state["b:B:results #1"]
        assert isinstance(line, dict)
        assert ("2", "expired", "batch_expired") == (line["n"], line["s"], line["e"])

    async def test_an_open_batch_is_closed_by_it(self, queue: ScriptedQueue) -> None:
        """Lines that come after the reaper are refused."""
        await queue.open("B", window_ms=1_000)
        await queue.append("B", 1, 3)
        await queue.pass_time(1_000)
        assert 3 == await queue.reap("B")
        assert Verdict("closed", "expired") == await queue.append("B", 4, 3)

    async def test_a_paused_batch_expires_all_the_same(self, queue: ScriptedQueue) -> None:
        """A pause does not stop the clock."""
        await queue.batch("B", 2, window_ms=1_000)
        await queue.pause_batch("B")
        await queue.pass_time(1_000)
        assert 2 == await queue.reap("B")
        assert "expired" == (await queue.state())["b:B status"]


async def test_cancelling_100_000_lines_blocks_nobody(queue: ScriptedQueue) -> None:
    """The cancel and the claims beside it cost as ever; the reaper goes in bounded steps."""
    await queue.batch("huge", 100_000)
    await queue.batch("B", 30, tenant="other")
    await queue.redis.config_resetstat()
    await queue.cancel_batch("huge")
    cursor, steps, started = "0-0", 0, []
    while steps == 0 or cursor != "0-0":
        cursor, _ = await queue.call(scripts.reap(queue.keys, "huge", lane="batch:huge", cursor=cursor))
        steps += 1
        if steps % 10 == 1:
            started += names(await queue.claim(1))
    assert ([f"B/{n}" for n in range(1, len(started) + 1)], 200) == (started, steps)
    assert [b"cancelled", b"100000"] == await queue.redis.hmget(queue.keys.batch("huge"), "status", "failed")
    await queue.redis.flushall()


@waiting
async def test_large_lines_are_ended_a_few_at_a_time(queue: ScriptedQueue) -> None:
    """A step copies about one MiB, not 500 lines of one MiB each: the server would stand still for seconds (F-096)."""
    await queue.open("B")
    data = b"x" * 2**20
    for n in range(1, 11):
        lines = [scripts.SubmitLine(n, f"k{n}", data, 1)]
        call = scripts.submit_lines(queue.keys, "B", lane="batch:B", first=n, after=n + 1, lines=lines)
        await queue.call(call)
    await queue.cancel_batch("B")
    cursor, ended = await queue.call(scripts.reap(queue.keys, "B", lane="batch:B", cursor="0-0"))
    assert (f"{ended}-0", True) == (cursor, 1 <= ended <= 2)
    assert 10 - ended == await queue.reap("B")
    state = await queue.state()
    assert ("cancelled", "10", str(10 * 2**20)) == (state["b:B status"], state["b:B failed"], state["held"])


async def test_an_entry_that_llmq_did_not_write_does_not_hold_up_the_reaper(queue: ScriptedQueue) -> None:
    """It ends as what it is, a line without a job, and the batch ends (G16)."""
    await queue.batch("B", 2)
    await queue.redis.xadd(queue.keys.lane("batch:B"), {"a": "b"}, id="3-0")
    await queue.cancel_batch("B")
    await queue.reap("B")
    assert "cancelled" == (await queue.state())["b:B status"]
