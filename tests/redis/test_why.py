"""The snapshot that `llmq why` explains, on a real server: what is seen is what the scripts left."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from llmq.scheduler import why_line, why_reader
from llmq.scheduler.errors import NotFoundError
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.lease import ErrorCode
from llmq.scheduler.queue import Queue
from llmq.scheduler.state import JobState
from llmq.scheduler.why import explain
from llmq.scheduler.why_line import read_why_line
from llmq.scheduler.why_reader import read_why
from llmq.scheduler.why_view import BatchView, JobView, LaneView, LineView
from tests.scripted_queue import T0, ScriptedQueue

pytestmark = pytest.mark.leaves("llmq:{q}:*")


@pytest.fixture
def jobs(redis: Redis) -> Queue:
    """The queue of the `queue` fixture, as its users see it."""
    return Queue(redis, "q")


async def job(jobs: Queue, name: str) -> JobView:
    """Take the snapshot of a job."""
    view = await read_why(jobs, name)
    assert isinstance(view, JobView)
    return view


async def batch(jobs: Queue, name: str) -> BatchView:
    """Take the snapshot of a batch."""
    view = await read_why(jobs, name)
    assert isinstance(view, BatchView)
    return view


async def test_the_place_of_a_job_counts_those_that_wait_before_it(queue: ScriptedQueue, jobs: Queue) -> None:
    """New ones in the order of arrival, behind what was handed back; those that run do not wait (G17)."""
    for name in ("a", "b", "c", "d"):
        await queue.submit(name)
    assert [0, 3] == [(await job(jobs, name)).before for name in ("a", "d")]
    first, second = (await queue.claim(2)).leases
    assert [0, 1] == [(await job(jobs, name)).before for name in ("c", "d")]
    await queue.hand_back(second)
    assert [0, 1, 2] == [(await job(jobs, name)).before for name in ("b", "c", "d")]
    await queue.finish(first)


async def test_counting_ends_somewhere(queue: ScriptedQueue, jobs: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look does not hold up the server, however many wait."""
    monkeypatch.setattr(why_reader, "MOST_BEFORE", 8)
    for number in range(20):
        await queue.submit(f"j{number}")
    view = await job(jobs, "j19")
    assert (8, True) == (view.before, view.more)
    view = await job(jobs, "j5")
    assert (5, False) == (view.before, view.more)


async def test_a_job_that_is_due_later_is_seen_as_that(queue: ScriptedQueue, jobs: Queue) -> None:
    """Its lane sleeps until then."""
    await queue.submit("a")
    await queue.retry((await queue.claim()).leases[0], 5.0)
    view = await job(jobs, "a")
    assert LaneView("t", None, 0, 0, 5.0) == view.lane
    assert "its next attempt is due in 5 s" in [reason.text for reason in explain(view).reasons]


async def test_the_place_of_a_batch_is_that_of_tenant_and_due_time(queue: ScriptedQueue, jobs: Queue) -> None:
    """Tenants by service, batches of one tenant by their windows."""
    await queue.batch("A", 3, tenant="anna", cost=5_000)
    await queue.batch("B", 3, tenant="anna", window_ms=60_000, cost=5_000)
    await queue.batch("C", 3, tenant="ben")
    assert LaneView("anna", 1, 2, 1) == (await batch(jobs, "A")).lane
    (lease,) = (await queue.claim()).leases
    assert "B" == lease.batch_id
    assert LaneView("anna", 2, 2, 0) == (await batch(jobs, "B")).lane
    assert LaneView("ben", 1, 2, 0) == (await batch(jobs, "C")).lane
    await queue.pause_batch("A")
    assert LaneView("anna", None, 2, 0) == (await batch(jobs, "A")).lane


async def test_what_holds_for_the_queue_is_seen(queue: ScriptedQueue, jobs: Queue) -> None:
    """Pauses, chat, the bucket, the cap, and when the deadline comes (G9, G10)."""
    await queue.batch("A", 3)
    seen = (await batch(jobs, "A")).queue
    assert (frozenset(), False, 30.0, False, ()) == (
        seen.paused, seen.chat_waits, seen.deadline_in_s, seen.cap_reached, seen.workers,
    )  # fmt: skip
    await queue.submit("chat")
    await queue.configure(rate=1, burst=1, paused_b=1, cap_batch=3, preempt="off")
    await queue.pass_time(10_000)
    seen = (await batch(jobs, "A")).queue
    assert (frozenset({TrafficClass.BATCH}), True, 20.0, True, False) == (
        seen.paused, seen.chat_waits, seen.deadline_in_s, seen.cap_reached, seen.preempt,
    )  # fmt: skip
    assert (T0 / 1000 + 10, 1.0) == (seen.now, seen.bucket.tokens)


async def test_what_has_ended_is_explained_too(queue: ScriptedQueue, jobs: Queue) -> None:
    """Its lane is gone."""
    await queue.submit("a")
    await queue.batch("A", 1)
    await queue.drain()
    assert ["ended", "ended"] == [explain(await read_why(jobs, name)).reasons[0].code for name in ("a", "A")]


async def test_what_was_never_there_is_said(jobs: Queue) -> None:
    """Neither a job nor a batch."""
    with pytest.raises(NotFoundError, match="no job and no batch 'nope'"):
        await read_why(jobs, "nope")


class TestLine:
    """One line of a batch."""

    async def test_its_place_counts_the_lines_that_wait_before_it(self, queue: ScriptedQueue, jobs: Queue) -> None:
        """Those that run do not wait; what was handed back comes first (G17)."""
        await queue.batch("A", 4)
        assert [0, 3] == [(await read_why_line(jobs, "A", number)).before for number in ("1", "4")]
        first, second = (await queue.claim(2, free=2)).leases
        await queue.hand_back(second)
        seen = [await read_why_line(jobs, "A", number) for number in ("1", "2", "4")]
        assert [JobState.RUNNING, JobState.WAITING, JobState.WAITING] == [line.state for line in seen]
        assert ("w", [0, 0, 2]) == (seen[0].consumer, [line.before for line in seen])
        await queue.finish(first)

    async def test_what_happened_to_it_is_seen(self, queue: ScriptedQueue, jobs: Queue) -> None:
        """Attempts, crashes and preemptions, and when it is tried again."""
        await queue.batch("A", 2)
        (lease,) = (await queue.claim(1, free=1)).leases
        await queue.retry(lease, 5.0)
        line = await read_why_line(jobs, "A", "1")
        assert (JobState.DELAYED, 1, T0 / 1000 + 5) == (line.state, line.attempts, line.due_at)
        assert "its next attempt is due in 5 s" in [reason.text for reason in explain(line).reasons]

    async def test_it_is_found_by_its_custom_id(
        self, queue: ScriptedQueue, jobs: Queue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While it waits and when it has ended, as far as a search goes; which it is told where it ends."""
        await queue.batch("A", 600)
        waiting = await read_why_line(jobs, "A", "1")
        assert 600 == (await read_why_line(jobs, "A", waiting.key.replace("1", "600"))).number
        await queue.drain()
        ended = await read_why_line(jobs, "A", waiting.key)
        assert (1, JobState.COMPLETED) == (ended.number, ended.state)
        monkeypatch.setattr(why_line, "MOST_CALLS", 1)
        with pytest.raises(NotFoundError, match="name it by its number in the file: llmq why A NUMBER"):
            await read_why_line(jobs, "A", waiting.key.replace("1", "600"))
        far = await read_why_line(jobs, "A", "600")
        assert "how it ended stands in the results" in explain(far).reasons[0].text

    async def test_how_it_ended_is_seen(self, queue: ScriptedQueue, jobs: Queue) -> None:
        """The engine's status, or the error in its place."""
        await queue.batch("A", 2)
        first, second = (await queue.claim(2, free=2)).leases
        await queue.finish(first)
        await queue.end(second, ErrorCode.RESULT_TOO_LARGE)
        said = [explain(await read_why_line(jobs, "A", number)).reasons[0].text for number in ("1", "2")]
        assert "the line has ended as completed: HTTP 200" == said[0]
        assert said[1].startswith("the line has ended as failed: result_too_large: ")

    async def test_what_is_not_there_is_said(self, queue: ScriptedQueue, jobs: Queue) -> None:
        """A file that is not queued to the end, one that is shorter, a batch of another queue."""
        await queue.batch("A", 2)
        await queue.open("B")
        codes = [explain(await read_why_line(jobs, name, "7")).reasons[0].code for name in ("A", "B")]
        assert ["no_line", "unsealed"] == codes
        with pytest.raises(NotFoundError, match="there is no batch 'nope'"):
            await read_why_line(jobs, "nope", "1")
        assert isinstance(await read_why_line(jobs, "A", "1"), LineView)
