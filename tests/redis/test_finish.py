"""The script finish: how jobs end, once, and what is left of them."""

from __future__ import annotations

import dataclasses

import pytest

from llmq.scheduler import scripts
from llmq.scheduler.lease import Answered, ErrorCode, Fence, Lease, Usage
from tests.scripted_queue import DATA, T0, ScriptedQueue, changes, names

waiting = pytest.mark.leaves("llmq:{q}:*")

TEXT = DATA.decode(errors="replace")


async def test_an_answered_job_leaves_its_result_alone(queue: ScriptedQueue) -> None:
    """Entry, lane, count and tries go; the record has the answer and a TTL; the client is told (G11)."""
    await queue.submit("j1")
    (lease,) = (await queue.claim()).leases
    before = await queue.state()
    assert 1 == await queue.finish(lease, body=b'{"a":1}', usage=Usage(3, 4))
    after = await queue.state()
    assert {
        "counts i": ("1", None),
        "inbox:c": (None, 1),
        "inbox:c ttl": (None, True),
        "job:j1 attempts": (None, "0"),
        "job:j1 body": (None, '{"a":1}'),
        "job:j1 code": (None, ""),
        "job:j1 crashes": (None, "0"),
        "job:j1 ended_at": (None, str(T0)),
        "job:j1 message": (None, ""),
        "job:j1 preemptions": (None, "0"),
        "job:j1 request": (None, "r"),
        "job:j1 state": (None, "completed"),
        "job:j1 status": (None, "200"),
        "job:j1 ttl": (None, True),
        "job:j1 usage": (None, "3:4"),
        "lane:i:t": (1, None),
        "lane:i:t running j1": ("w x1", None),
        "lanes i:t": ("+i|t|0000000000000", None),
    } == changes(before, after)


@waiting
async def test_a_finished_line_leaves_one_result(queue: ScriptedQueue) -> None:
    """Entry, count and start go; result and sums come; the deadline counts from its start (G16)."""
    await queue.batch("B", 9)
    (lease,) = (await queue.claim()).leases
    await queue.pass_time(5)
    before = await queue.state()
    assert 1 == await queue.finish(lease, usage=Usage(3, 4))
    assert {
        "b:B bytes": (None, "2"),
        "b:B completed": ("0", "1"),
        "b:B completion_tokens": (None, "4"),
        "b:B prompt_tokens": (None, "3"),
        "b:B:results #1": (None, {"n": "1", "k": "k1", "s": "completed", "h": "200", "q": "r", "b": "{}", "u": "3:4"}),
        "bucket start": (None, str(T0)),
        "counts b": ("9", "8"),
        "held": (None, "2"),
        "held ttl": (None, True),
        "lane:batch:B": (9, 8),
        "lane:batch:B running 1-0": ("w x1", None),
        "ready:b t": (10.0, 7.0),
        "starts batch:B|1-0": (-float(T0), None),
    } == changes(before, await queue.state())


async def test_the_last_line_ends_the_batch(queue: ScriptedQueue) -> None:
    """Status and times; the lane goes; record, results and list get their TTL (G11)."""
    await queue.batch("B", 1)
    (lease,) = (await queue.claim()).leases
    before = await queue.state()
    await queue.finish(lease)
    after = changes(before, await queue.state())
    ended = {"status": ("in_progress", "completed"), "completed_at": (None, str(T0)), "ended_at": (None, str(T0))}
    assert ended.items() <= {path.removeprefix("b:B "): change for path, change in after.items()}.items()
    assert {"b:B ttl", "b:B:results ttl", "batches ttl", "held ttl"} <= after.keys()
    assert ("+b|t|1314496000000", None) == after["lanes batch:B"]


@waiting
async def test_an_answer_of_400_is_a_failed_line_that_keeps_its_data(queue: ScriptedQueue) -> None:
    """It has status and body like any answer, and the encoded job, so that it can be queued again."""
    await queue.batch("B", 2)
    await queue.finish(*(await queue.claim()).leases, status=400, body=b"no")
    state = await queue.state()
    failed = {"n": "1", "k": "k1", "s": "failed", "h": "400", "q": "r", "b": "no", "u": "0:0", "d": TEXT}
    assert (failed, "1", "0") == (state["b:B:results #1"], state["b:B failed"], state["b:B completed"])


@waiting
@pytest.mark.parametrize(
    ("code", "state"),
    [
        (ErrorCode.TIMEOUT, "expired"),
        (ErrorCode.CANCELLED, "cancelled"),
        (ErrorCode.INTERRUPTED, "interrupted"),
        (ErrorCode.WORKER_LOST, "failed"),
    ],
)
async def test_an_end_without_an_answer_has_a_code(queue: ScriptedQueue, code: ErrorCode, state: str) -> None:
    """States of jobs and lines say what happened; timeouts, losses and failures are told apart (F-130)."""
    await queue.submit("j1")
    await queue.batch("B", 2)
    for lease in (await queue.claim(2)).leases:
        assert await queue.end(lease, code)
    after = await queue.state()
    assert (state, code.value) == (after["job:j1 state"], after["job:j1 code"])
    line = {"n": "1", "k": "k1", "s": state, "e": code.value, "m": "because", "u": "0:0", "d": TEXT}
    assert line == after["b:B:results #1"]


async def test_a_dead_letter_keeps_the_whole_job(queue: ScriptedQueue) -> None:
    """What a person needs to see: job, error, attempts, crashes, host (F-051)."""
    await queue.submit("j1", tenant="anna")
    for _ in range(2):
        await queue.retry((await queue.claim()).leases[0], crashed=True)
    await queue.retry((await queue.claim()).leases[0])
    (lease,) = (await queue.claim()).leases
    await queue.finish(lease, status=500, body=b"oh", dead=True)
    letter = (await queue.state())["dead #1"]
    assert isinstance(letter, dict)
    assert lease.fence.entry == letter.pop("entry")
    assert {
        "key": "j1", "lane": "i:anna", "class": "i", "tenant": "anna", "data": TEXT, "status": "500",
        "error": "HTTP 500", "attempts": "1", "crashes": "2", "host": "h",
    } == letter  # fmt: skip


async def test_several_jobs_end_in_one_call(queue: ScriptedQueue) -> None:
    """Lines of two batches and single jobs, each in its place; one lost lease does not harm the others (G3)."""
    await queue.submit("j1")
    await queue.submit("j2")
    await queue.batch("A", 2)
    await queue.pass_time(1)
    await queue.batch("B", 1)
    claimed = await queue.claim(9)
    assert ["j1", "j2", "A/1", "A/2", "B/1"] == names(claimed)
    stolen = claimed.leases[2]
    await queue.crash(stolen)
    assert 4 == await queue.finish(*claimed.leases)
    assert ["A/1"] == await queue.drain()
    state = await queue.state()
    assert ("completed", "completed", "2") == (state["b:A status"], state["b:B status"], state["b:A completed"])


async def test_it_works_on_a_full_server(queue: ScriptedQueue) -> None:
    """Completion is what frees memory: at maxmemory lines and jobs end, dead letters and batches too."""
    await queue.batch("B", 1)
    await queue.submit("j1")
    job, line = (await queue.claim(2)).leases
    async with queue.at_maxmemory():
        assert 1 == await queue.finish(job, status=500, dead=True)
        assert 1 == await queue.finish(line)
    state = await queue.state()
    assert ("failed", "completed") == (state["job:j1 state"], state["b:B status"])


class TestFence:
    """A write of an attempt that no longer holds the lease changes nothing (G3)."""

    async def refused(self, queue: ScriptedQueue, lease: Lease, worker: str = "w") -> None:
        """Try every write of an attempt, and see that nothing changes."""
        before = await queue.state()
        assert 0 == await queue.finish(lease, worker=worker)
        assert not await queue.end(lease, ErrorCode.WORKER_LOST, worker=worker, dead=True)
        assert 0 == await queue.hand_back(lease, worker=worker)
        assert not await queue.retry(lease, 5, worker=worker)
        assert not await queue.first_delta(lease, worker=worker)
        assert [lease.fence] == (await queue.renew(lease, worker=worker)).lost
        assert {} == changes(before, await queue.state())

    @waiting
    async def test_after_another_worker_claimed_it(self, queue: ScriptedQueue) -> None:
        """The slow worker's write is refused, the rescuer's is taken: one result (F-012, F-013, F-016)."""
        await queue.batch("B", 2)
        (slow,) = (await queue.claim(worker="slow")).leases
        await queue.crash(slow)
        (rescued,) = (await queue.claim(worker="rescuer")).leases
        assert slow.fence.entry == rescued.fence.entry
        await self.refused(queue, slow, "slow")
        assert 1 == await queue.finish(rescued, worker="rescuer")
        await self.refused(queue, slow, "slow")
        assert "1" == (await queue.state())["b:B completed"]

    @waiting
    async def test_after_the_same_worker_claimed_it_again(self, queue: ScriptedQueue) -> None:
        """The name is the same, the delivery is another."""
        await queue.batch("B", 2)
        (first,) = (await queue.claim()).leases
        await queue.crash(first)
        (second,) = (await queue.claim()).leases
        assert (1, 2) == (first.fence.delivery, second.fence.delivery)
        await self.refused(queue, first)
        assert 1 == await queue.finish(second)

    @waiting
    async def test_while_it_waits_again(self, queue: ScriptedQueue) -> None:
        """Handed back or reclaimed, it is nobody's."""
        await queue.batch("B", 2)
        (lease,) = (await queue.claim()).leases
        await queue.hand_back(lease)
        await self.refused(queue, lease)

    @waiting
    async def test_by_somebody_else(self, queue: ScriptedQueue) -> None:
        """Another consumer with the right numbers."""
        await queue.batch("B", 2)
        (lease,) = (await queue.claim()).leases
        await self.refused(queue, lease, "thief")
        later = dataclasses.replace(lease, fence=Fence(lease.fence.lane, lease.fence.entry, 2))
        await self.refused(queue, later)

    async def test_when_it_has_ended(self, queue: ScriptedQueue) -> None:
        """Entry and lane are gone: the second end of a job changes nothing (F-084)."""
        await queue.batch("B", 1)
        await queue.submit("j1")
        job, line = (await queue.claim(2)).leases
        assert 2 == await queue.finish(job, line)
        await self.refused(queue, job)
        await self.refused(queue, line)

    @waiting
    async def test_when_the_sweeper_is_to_end_it(self, queue: ScriptedQueue) -> None:
        """Also where sweeper and worker are the same consumer (F-018)."""
        await queue.submit("j1")
        (lease,) = (await queue.claim()).leases
        await queue.first_delta(lease)
        (doomed,) = await queue.crash(lease, worker="w")
        await self.refused(queue, lease)
        assert await queue.end(doomed.lease, ErrorCode.INTERRUPTED)


@waiting
async def test_an_entry_whose_id_came_a_second_time_is_not_ended_by_the_first(queue: ScriptedQueue) -> None:
    """A lane that was removed may be made again with the same id, by a clock that went back; a late finish is sent
    twice; and the other job, same worker and same delivery, must not get that answer, nor be lost (G1, G3)."""
    await queue.submit("first")
    (first,) = (await queue.claim()).leases
    assert 1 == await queue.finish(first, body=b"first")
    await queue.submit("second")
    lane, record = queue.keys.lane("i:t"), queue.keys.job("second")
    ((_, fields),) = await queue.redis.xrange(lane)
    await queue.redis.delete(lane)
    await queue.redis.xadd(lane, fields, id=first.fence.entry)
    await queue.redis.xgroup_create(lane, "workers", 0)
    await queue.redis.hset(record, "entry", first.fence.entry)
    (second,) = (await queue.claim()).leases
    assert first.fence == second.fence
    assert 0 == await queue.finish(first, body=b"first")
    assert 1 == await queue.finish(second, body=b"second")
    assert b"second" == await queue.redis.hget(record, "body")


async def test_a_count_of_tokens_that_no_engine_has_used_harms_no_line(queue: ScriptedQueue) -> None:
    """A sum over 64 bits ended the script in its middle, and the batch never completed (G16)."""
    await queue.batch("B", 2)
    one, two = (await queue.claim(2)).leases
    assert 2 == await queue.finish(one, two, usage=Usage(2**63, 10**30))
    state = await queue.state()
    assert ("completed", "2") == (state["b:B status"], state["b:B completed"])
    assert str(2 * scripts.MOST_TOKENS) == state["b:B completion_tokens"]


async def test_scripts_are_loaded_again_when_the_server_forgot_them(queue: ScriptedQueue) -> None:
    """After SCRIPT FLUSH single calls and pipelines of several go on, each call made once (F-089, F-090, G12)."""
    await queue.batch("B", 3)
    one, two, three = (await queue.claim(3)).leases
    await queue.redis.script_flush()
    assert 1 == await queue.finish(one)
    await queue.redis.script_flush()
    endings = [scripts.Finish(lease, Answered(200, b"{}", "r")) for lease in (two, three)]
    calls = [scripts.finish(queue.keys, "w", "h", [ending]) for ending in endings]
    claim = scripts.claim(queue.keys, "w", room=1, free=1, reserve=0, suspects=0, candidates=[])
    *refused, claimed = await scripts.run_all(queue.redis, [*calls, claim])
    assert ([[], []], "empty") == (refused, claimed.reason)
    state = await queue.state()
    assert ("completed", "3") == (state["b:B status"], state["b:B completed"])


class TestUncollectedResults:
    """Results are the largest thing in Redis."""

    @waiting
    async def test_a_lane_over_the_limit_sleeps_until_results_are_collected(self, queue: ScriptedQueue) -> None:
        """Its lines do not start, time does not wake it, retries neither; the collector does, and trims."""
        await queue.configure(results_max_bytes=100)
        await queue.batch("B", 9)
        one, two, three, four = (await queue.claim(4)).leases
        await queue.finish(one, two, body=b"x" * 60)
        assert ([], "empty") == (names(await queue.claim()), (await queue.claim()).reason)
        await queue.hand_back(three)
        await queue.retry(four, 1.0)
        await queue.pass_time(10_000)
        assert [] == names(await queue.claim())
        last = (await queue.redis.xrange(queue.keys.results("B")))[-1][0].decode()
        collect = scripts.collect(queue.keys, "B", collector="out", cursor=last)
        assert 2 == await queue.call(collect)
        assert ["B/3", "B/4", "B/5"] == names(await queue.claim(3))

    @waiting
    @pytest.mark.parametrize("how", ["deleted", "expired"])
    async def test_another_batch_that_makes_room_wakes_it_too(self, queue: ScriptedQueue, how: str) -> None:
        """A lane does not sleep for ever because of results that are gone."""
        await queue.configure(results_max_bytes=100)
        await queue.batch("A", 1)
        await queue.finish(*(await queue.claim()).leases, body=b"x" * 90)
        await queue.batch("B", 9)
        await queue.finish(*(await queue.claim()).leases, body=b"x" * 20)
        assert [] == names(await queue.claim())
        if how == "deleted":
            await queue.call(scripts.delete_batch(queue.keys, "A", lane="batch:A"))
        else:
            await queue.redis.set(queue.keys.held, 20, keepttl=True)
            await queue.call(scripts.lead(queue.keys, "s", interval_ms=1000))
        assert ["B/2"] == names(await queue.claim())

    @waiting
    async def test_a_pipe_that_was_killed_holds_no_results_for_ever(self, queue: ScriptedQueue) -> None:
        """It is silent for long, so it is gone; a file's is waited for, since it can be gone on with (G10)."""
        await queue.configure(results_max_bytes=100)
        await queue.batch("B", 9)
        one, two = (await queue.claim(2)).leases

        async def collect(name: str, cursor: str, lapse_ms: int = 0) -> int:
            return await queue.call(scripts.collect(queue.keys, "B", collector=name, cursor=cursor, lapse_ms=lapse_ms))

        await collect("file", "0-0")
        await collect("pipe", "0-0", 60_000)
        await collect("killed pipe", "0-0", 60_000)
        await queue.finish(one, two, body=b"x" * 60)
        last = (await queue.redis.xrange(queue.keys.results("B")))[-1][0].decode()
        await queue.pass_time(59_999)
        assert 0 == await collect("pipe", last, 60_000)
        await queue.pass_time(1)
        assert 0 == await collect("pipe", last, 60_000)
        assert [] == names(await queue.claim())
        assert 2 == await collect("file", last)
        assert ["B/3"] == names(await queue.claim())
        state = await queue.state()
        assert {"b:B collector:file", "b:B collector:pipe", "b:B lapses:pipe"} == {
            name for name in state if name.startswith(("b:B collector:", "b:B lapses:"))
        }
        await collect("pipe", "", 60_000)
        assert not any(name.startswith("b:B lapses:") for name in await queue.state())

    @waiting
    async def test_results_stay_while_there_is_room(self, queue: ScriptedQueue) -> None:
        """Below half of the limit nothing is trimmed; above it only what every collector has."""
        await queue.configure(results_max_bytes=100)
        await queue.batch("B", 9)
        leases = (await queue.claim(6)).leases
        await queue.finish(*leases[:2], body=b"x" * 20)
        ids = [entry.decode() for entry, _ in await queue.redis.xrange(queue.keys.results("B"))]

        async def collect(name: str, cursor: str) -> int:
            call = scripts.collect(queue.keys, "B", collector=name, cursor=cursor)
            return await queue.call(call)

        assert 0 == await collect("fast", ids[1])
        assert 0 == await collect("slow", ids[0])
        await queue.finish(leases[2], body=b"x" * 20)
        assert 1 == await collect("fast", ids[1])
        assert 0 == await collect("fast", ids[1])
        await queue.finish(leases[3], body=b"x" * 20)
        assert 1 == await collect("slow", "")
        state = await queue.state()
        assert ("40", "40", "2") == (state["held"], state["b:B bytes"], state["b:B trimmed"])

    @waiting
    async def test_who_collects_goes_on_whatever_others_hold(self, queue: ScriptedQueue) -> None:
        """Results of a batch that nobody collects, or of one that was cancelled, stop no batch that is (G10, F-095)."""
        await queue.configure(results_max_bytes=6400)
        await queue.batch("A", 1, tenant="anna")
        await queue.finish(*(await queue.claim()).leases, body=b"x" * 9000)
        await queue.batch("B", 9)
        await queue.finish(*(await queue.claim()).leases, body=b"x" * 80)
        assert [] == names(await queue.claim())

        async def collect() -> int:
            last = (await queue.redis.xrevrange(queue.keys.results("B"), count=1))[0][0].decode()
            return await queue.call(scripts.collect(queue.keys, "B", collector="out", cursor=last))

        assert 1 == await collect()
        for line in (2, 3):
            claimed = await queue.claim()
            assert [f"B/{line}"] == names(claimed)
            await queue.finish(*claimed.leases, body=b"x" * 40)
        # Its collector is behind now: it holds some results of its own, and waits for it.
        await queue.finish(*(await queue.claim()).leases, body=b"x" * 40)
        assert [] == names(await queue.claim())
        assert 3 == await collect()
        assert ["B/5"] == names(await queue.claim())

    @waiting
    async def test_large_results_are_trimmed_a_few_at_a_time(self, queue: ScriptedQueue) -> None:
        """A step copies a few MiB, not 500 answers of 8 MiB each (F-096)."""
        await queue.configure(results_max_bytes=2**20)
        await queue.batch("B", 9)
        for lease in (await queue.claim(8)).leases:
            await queue.finish(lease, body=b"x" * 2**22)
        last = (await queue.redis.xrevrange(queue.keys.results("B"), count=1))[0][0].decode()
        call = scripts.collect(queue.keys, "B", collector="out", cursor=last)
        trimmed = [await queue.call(call) for _ in range(9)]
        assert (8, 2, 0) == (sum(trimmed), max(trimmed), trimmed[-1])

    @waiting
    async def test_the_limit_is_a_quarter_of_what_the_server_may_use(self, queue: ScriptedQueue) -> None:
        """A server with less than 4 GiB would be full before the 1 GiB of one without `maxmemory` (F-095)."""
        await queue.redis.config_set("maxmemory", 2**27)
        try:
            await queue.call(scripts.lead(queue.keys, "s", interval_ms=1000))
            await queue.batch("B", 9)
            leases = (await queue.claim(2)).leases
            await queue.finish(leases[0], body=b"x" * 2**24)
            assert ["B/3"] == names(await queue.claim())
            await queue.finish(leases[1], body=b"x" * (2**24 + 1))
            assert [] == names(await queue.claim())
        finally:
            await queue.redis.config_set("maxmemory", 0)
        await queue.redis.delete(queue.keys.sweeper)
        await queue.call(scripts.lead(queue.keys, "s", interval_ms=1000))
        assert ["B/4"] == names(await queue.claim())


@waiting
@pytest.mark.parametrize("name", ["deadline", "cap_interactive", "cap_batch", "queue_ttl", "keep_interactive",
                                  "keep_batch", "results_max_bytes", "weight.t", "rate", "burst"])  # fmt: skip
async def test_a_setting_that_somebody_wrote_by_hand_stops_nobody(queue: ScriptedQueue, name: str) -> None:
    """What is no number counts for nothing: jobs are taken, claimed and finished all the same (G2)."""
    await queue.redis.hset(queue.keys.config, name, "soon")
    await queue.submit("j1")
    await queue.batch("B", 2)
    assert ["j1", "B/1", "B/2"] == await queue.drain()
