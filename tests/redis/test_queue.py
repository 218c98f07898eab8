"""The queue on a real server: derived states, cancelling, overdue jobs, late replies, plans of windows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from llmq.scheduler.connection import connect
from llmq.scheduler.errors import NotFoundError, UsageError
from llmq.scheduler.job import Job, TrafficClass
from llmq.scheduler.lease import ErrorCode
from llmq.scheduler.queue import CancelResult, Queue
from llmq.scheduler.state import JobState
from tests.reply_eater import ReplyEater
from tests.scripted_queue import T0, ScriptedQueue

JOB = Job("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]})
DAY_MS = 24 * 3_600_000

pytestmark = pytest.mark.leaves("llmq:{q}:*")


@pytest.fixture
def jobs(redis: Redis) -> Queue:
    """The queue of the `queue` fixture, as its users see it."""
    return Queue(redis, "q")


@pytest.fixture
async def eater(redis_url: str) -> AsyncIterator[ReplyEater]:
    """A proxy in front of the server, which swallows replies when it is told to."""
    async with ReplyEater(redis_url) as eater:
        yield eater


class TestDeletingAJob:
    """What is left of a job goes before its time."""

    async def test_only_a_job_that_has_ended_goes(self, queue: ScriptedQueue, jobs: Queue) -> None:
        """Waiting, running and delayed ones are refused, and their records stay as they are (G1)."""
        with pytest.raises(NotFoundError):
            await jobs.delete_job("j")
        await queue.submit("j")
        for state in JobState.WAITING, JobState.RUNNING, JobState.DELAYED:
            if state is JobState.RUNNING:
                (lease,) = (await queue.claim()).leases
            if state is JobState.DELAYED:
                await queue.retry(lease, 5.0)
            before = await queue.state()
            assert state is (await jobs.job("j")).state
            with pytest.raises(UsageError, match="llmq job cancel j"):
                await jobs.delete_job("j")
            assert before == await queue.state()
        await queue.pass_time(5_000)
        await queue.finish(*(await queue.claim()).leases)
        await jobs.delete_job("j")
        assert not [path for path in await queue.state() if path.startswith("job:")]


class TestJob:
    """What is known of a job, by where it is."""

    async def test_every_state_is_derived(self, queue: ScriptedQueue, jobs: Queue) -> None:
        """A job goes from waiting through a retry to its end; at each step its state is what the keys say."""
        await queue.submit("j")
        assert JobState.WAITING is (await jobs.job("j")).state

        (lease,) = (await queue.claim(worker="w1")).leases
        running = await jobs.job("j")
        assert (JobState.RUNNING, "w1", 0) == (running.state, running.consumer, running.attempts)

        await queue.retry(lease, 5.0, worker="w1")
        delayed = await jobs.job("j")
        assert (JobState.DELAYED, None, 1) == (delayed.state, delayed.consumer, delayed.attempts)
        assert T0 / 1000 + 5 == delayed.due_at

        await queue.pass_time(5_000)
        assert JobState.WAITING is (await jobs.job("j")).state

        (lease,) = (await queue.claim(worker="w2")).leases
        await queue.finish(lease, worker="w2", body=b'{"a":1}')
        ended = await jobs.job("j")
        assert (JobState.COMPLETED, 200, b'{"a":1}') == (ended.state, ended.status_code, ended.body)
        assert T0 / 1000 + 5 == ended.ended_at

    @pytest.mark.parametrize(
        ("code", "state"),
        [
            (ErrorCode.INTERRUPTED, JobState.INTERRUPTED),
            (ErrorCode.TIMEOUT, JobState.EXPIRED),
            (ErrorCode.CANCELLED, JobState.CANCELLED),
            (ErrorCode.ENGINE_ERROR, JobState.FAILED),
        ],
    )
    async def test_ends_have_states_of_their_own(
        self, queue: ScriptedQueue, jobs: Queue, code: ErrorCode, state: JobState
    ) -> None:
        """A timeout is not a cancel, and neither is a failure (F-130)."""
        await queue.submit("j")
        (lease,) = (await queue.claim()).leases
        await queue.end(lease, code)
        record = await jobs.job("j")
        assert (state, code.value, "because", None) == (record.state, record.code, record.message, record.status_code)

    async def test_a_job_whose_entry_was_deleted_is_lost(self, queue: ScriptedQueue, jobs: Queue) -> None:
        """Somebody deleted it from the stream by hand: visible, not waiting for ever (F-068, G13)."""
        await queue.submit("j")
        await queue.redis.delete(jobs.keys.lane("i:t"))
        assert JobState.LOST is (await jobs.job("j")).state

    async def test_a_record_shows_its_figures(self, queue: ScriptedQueue, jobs: Queue) -> None:
        """`job show --json`: id, class, state, attempts, times."""
        await queue.submit("j", ttl_ms=30_000)
        shown = (await jobs.job("j")).to_json()
        assert ("j", "interactive", "waiting", 0) == tuple(shown[k] for k in ("id", "class", "state", "attempts"))
        assert (T0 / 1000, T0 / 1000 + 30, None) == tuple(shown[k] for k in ("submitted_at", "expires_at", "ended_at"))


class TestCancel:
    """Cancelling a job, by where it is."""

    async def test_a_cancelled_waiting_job_never_starts(self, queue: ScriptedQueue, jobs: Queue) -> None:
        """Its entry is gone (G14)."""
        await queue.submit("j")
        assert CancelResult.CANCELLED is await jobs.cancel_job("j")
        assert [] == (await queue.claim()).leases
        assert JobState.CANCELLED is (await jobs.job("j")).state

    async def test_the_worker_of_a_running_job_is_told(self, queue: ScriptedQueue, jobs: Queue) -> None:
        """By its control list, with the lane and the entry; the list goes after a minute (G14, F-126)."""
        await queue.submit("j", tenant="my team")
        (lease,) = (await queue.claim(worker="w1")).leases
        assert CancelResult.SIGNALLED is await jobs.cancel_job("j")
        control = jobs.keys.control("w1")
        assert [f"cancel i:my team {lease.fence.entry}".encode()] == await queue.redis.lrange(control, 0, -1)
        assert 0 < await queue.redis.pttl(control) <= 60_000
        assert [lease.fence] == (await queue.renew(lease, worker="w1")).cancelled

    async def test_a_job_that_has_ended_stays_as_it_is(self, queue: ScriptedQueue, jobs: Queue) -> None:
        """Cancelling says so (F-124)."""
        await queue.submit("j")
        await queue.finish(*(await queue.claim()).leases)
        assert CancelResult.ENDED is await jobs.cancel_job("j")
        assert JobState.COMPLETED is (await jobs.job("j")).state


class TestEndOverdue:
    """A job that nobody took in time, ended by who waits for it."""

    async def test_a_job_over_its_time_is_ended(self, queue: ScriptedQueue, jobs: Queue) -> None:
        """No worker lives that would (G13)."""
        await queue.submit("j", ttl_ms=1_000)
        await queue.pass_time(1_000)
        assert await jobs.end_overdue("j")
        record = await jobs.job("j")
        assert (JobState.EXPIRED, "request_timeout") == (record.state, record.code)

    async def test_a_job_that_is_early_or_runs_is_left_alone(self, queue: ScriptedQueue, jobs: Queue) -> None:
        """Redis' clock decides, whatever the caller's says."""
        await queue.submit("j", ttl_ms=1_000)
        assert not await jobs.end_overdue("j")
        (lease,) = (await queue.claim()).leases
        await queue.pass_time(1_000)
        assert not await jobs.end_overdue("j")
        assert 1 == await queue.finish(lease)
        assert await jobs.end_overdue("j")

    async def test_an_unknown_job_has_not_ended(self, jobs: Queue) -> None:
        """There is nothing to end."""
        assert not await jobs.end_overdue("nobody")


class TestSubmit:
    """What only a real connection shows."""

    async def test_a_lost_reply_makes_no_second_job(self, redis: Redis, eater: ReplyEater) -> None:
        """The reply to submit never comes; it is sent again with the same id, and the job is there once (F-084)."""
        client = connect(eater.url, timeout_s=0.3)
        queue = Queue(client, "q")
        await queue.submit(JOB)  # the script is loaded, and the connection made
        eater.swallow_reply_to("EVALSHA")
        job_id = await queue.submit(JOB)
        assert 1 == eater.swallowed
        assert 2 == await redis.xlen(queue.keys.lane("i:default"))
        assert b"2" == await redis.hget(queue.keys.counts, "i")
        assert JobState.WAITING is (await queue.job(job_id)).state
        await client.aclose()

    async def test_many_at_once_with_one_key_are_one_job(self, redis: Redis, jobs: Queue) -> None:
        """Whoever comes first makes it."""
        ids = await asyncio.gather(*(jobs.submit(JOB, key="k", cls=TrafficClass.BATCH) for _ in range(20)))
        assert 1 == len(set(ids))
        assert 1 == await redis.xlen(jobs.keys.lane("b:default"))


class TestPlan:
    """Windows, as the claim script goes by them."""

    async def test_a_closed_window_holds_batch_back(self, queue: ScriptedQueue, jobs: Queue) -> None:
        """Not chat; when the window opens, batch starts. T0 is a Sunday, 01:46 UTC."""
        await jobs.set("windows", "01:00-02:00 closed")
        await queue.submit("b", cls="b")
        await queue.submit("i")
        claimed = await queue.claim(2)
        assert (["i"], "window") == ([lease.key for lease in claimed.leases], claimed.reason)
        await queue.pass_time(20 * 60_000)
        assert ["b"] == [lease.key for lease in (await queue.claim(2)).leases]

    async def test_after_a_window_with_a_rate_the_plain_rate_holds(self, queue: ScriptedQueue, jobs: Queue) -> None:
        """A step `-` of the plan takes back what an earlier step said."""
        await jobs.set("windows", "01:00-02:00 1/h")
        await queue.batch("B", 10)
        assert 1 == len((await queue.claim(5)).leases)
        await queue.pass_time(20 * 60_000)
        assert 5 == len((await queue.claim(5)).leases)

    async def test_the_plan_moves_on(self, queue: ScriptedQueue, jobs: Queue) -> None:
        """It is written anew when the week ahead has moved, and only then."""
        await jobs.set("windows", "mon-fri 08:00-20:00 5/s")
        assert not await jobs.refresh_plan()
        await queue.pass_time(3 * DAY_MS)
        assert await jobs.refresh_plan()
        assert not await jobs.refresh_plan()

    async def test_windows_that_cannot_be_read_leave_the_plan_as_it_is(self, queue: ScriptedQueue, jobs: Queue) -> None:
        """Of a newer llmq, or written by hand: no worker's sweeper ends for it (F-046)."""
        await jobs.set("windows", "mon-fri 08:00-20:00 5/s")
        for windows in ("on full moon 5/s", b"\xff"):
            await queue.redis.hset(jobs.keys.config, "windows", windows)
            assert not await jobs.refresh_plan()

    async def test_windows_set_meanwhile_win(self, queue: ScriptedQueue, redis: Redis) -> None:
        """A refresh that read the windows before they were set does not leave the old plan behind."""

        class Interrupted(Queue):
            """A queue whose windows are set by somebody else between two steps of a refresh."""

            async def now_ms(self) -> int:
                if not interruptions:
                    interruptions.append("closed")
                    await Queue(redis, "q").set("windows", "closed")
                return await super().now_ms()

        interruptions: list[str] = []
        jobs = Queue(redis, "q")
        await jobs.set("windows", "mon-fri 08:00-20:00 5/s")
        await queue.pass_time(3 * DAY_MS)
        await Interrupted(redis, "q").refresh_plan()
        plan = await queue.redis.hget(jobs.keys.config, "plan")
        assert b"closed" in plan
        assert b"job" not in plan


async def test_a_job_of_another_queue_is_not_found(queue: ScriptedQueue, redis: Redis) -> None:
    """Queues share nothing."""
    await queue.submit("j")
    with pytest.raises(NotFoundError):
        await Queue(redis, "other").job("j")
