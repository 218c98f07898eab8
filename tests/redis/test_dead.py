"""Dead letters on a real server: listed without their jobs, queued again without loss, purged."""

from __future__ import annotations

from typing import Any, cast

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from llmq.scheduler import dead
from llmq.scheduler.batches import Batches
from llmq.scheduler.dead import DeadLetter, DeadLetters
from llmq.scheduler.errors import EncodingError, NotFoundError, QueueFull
from llmq.scheduler.job import Job, TrafficClass
from llmq.scheduler.lease import Ended, ErrorCode, Lease
from llmq.scheduler.queue import Queue
from llmq.scheduler.state import JobState
from tests.line_worker import LineWorker, good
from tests.redis.test_batches import queued

pytestmark = pytest.mark.leaves("*")

JOB = Job("/v1/chat/completions", {"messages": [{"role": "user", "content": "a secret"}]})


@pytest.fixture
def queue(redis: Redis) -> Queue:
    """An empty queue."""
    return Queue(redis)


@pytest.fixture
def letters(queue: Queue) -> DeadLetters:
    """Its dead letters."""
    return DeadLetters(queue)


@pytest.fixture
def worker(queue: Queue) -> LineWorker:
    """A worker of the queue."""
    return LineWorker(queue)


def given_up(lease: Lease) -> Ended:
    """End any job as one that crashed too often."""
    return Ended(ErrorCode.WORKER_LOST, f"{lease.key} killed three workers", dead=True)


async def died(queue: Queue, worker: LineWorker, count: int = 1, **options: Any) -> None:
    """Let single jobs become dead letters, one by one."""
    for _ in range(count):
        await queue.submit(JOB, **options)
        await worker.serve_all(given_up)


class TestLooking:
    """`ls` and `show`."""

    async def test_what_is_known_of_a_letter_is_all_there(
        self, queue: Queue, letters: DeadLetters, worker: LineWorker
    ) -> None:
        """Job, class, tenant, error, attempts, crashes, host; of its job only the size (F-051)."""
        job_id = await queue.submit(JOB, tenant="anna")
        await worker.serve_all(given_up)
        (letter,) = await letters.ls(10)
        shown = letter.to_json()
        assert letter == await letters.show(letter.id)
        assert {"key": job_id, "class": "interactive", "tenant": "anna", "batch": None, "line": None} == {
            name: shown[name] for name in ("key", "class", "tenant", "batch", "line")
        }
        assert ("worker_lost", f"{job_id} killed three workers", "host") == (letter.code, letter.error, letter.host)
        assert len(JOB.encode()) == letter.size
        assert "secret" not in str(shown)
        assert JOB == await letters.job(letter)

    async def test_a_line_is_named_by_its_batch(self, queue: Queue, letters: DeadLetters, worker: LineWorker) -> None:
        """Batch, number and custom_id."""
        batch_id = await queued(Batches(queue), 1)
        await worker.serve_all(given_up)
        (letter,) = await letters.ls()
        assert (batch_id, 1, "row-1") == (letter.batch_id, letter.line, letter.key)

    async def test_the_newest_come_first_and_no_more_than_asked_for(
        self, queue: Queue, letters: DeadLetters, worker: LineWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However many pages a list is read in, it is whole and in order."""
        monkeypatch.setattr(dead, "_PAGE_BYTES", 100)
        await died(queue, worker, 11)
        found = [letter.id for letter in await letters.ls()]
        assert 11 == await letters.count() == len(found)
        assert sorted(found, key=_place, reverse=True) == found
        assert found[:6] == [letter.id for letter in await letters.ls(6)]

    @pytest.mark.parametrize("letter_id", ["nope", "-", "+", "5", "1-1", "(1-1"])
    async def test_an_unknown_letter_is_said(
        self, queue: Queue, letters: DeadLetters, worker: LineWorker, letter_id: str
    ) -> None:
        """What is not the id of a letter that is there finds none."""
        await died(queue, worker)
        with pytest.raises(NotFoundError, match="llmq dead ls"):
            await letters.show(letter_id)


class TestRetrying:
    """`retry`: the job runs again, and is lost at no point."""

    async def test_a_single_job_becomes_a_new_one(self, queue: Queue, letters: DeadLetters, worker: LineWorker) -> None:
        """Of the same class and tenant; it waits as long as it takes, and its attempts are counted anew."""
        await died(queue, worker, cls=TrafficClass.BATCH, tenant="anna")
        (job_id,) = (await letters.retry(await letters.ls())).jobs
        record = await queue.job(job_id)
        assert (JobState.WAITING, "batch", "anna", 0, None) == (
            record.state, record.cls, record.tenant, record.attempts, record.expires_at,
        )  # fmt: skip
        assert 0 == await letters.count()
        (lease,) = await worker.claim(1)
        assert JOB.encode() == lease.data

    async def test_the_lines_of_each_batch_become_one_new_batch(
        self, queue: Queue, letters: DeadLetters, worker: LineWorker
    ) -> None:
        """Custom_ids, tenant and name are kept, in the order in which the lines died (G16)."""
        batches = Batches(queue)
        first, second = await queued(batches, 3, tenant="anna"), await queued(batches, 1)
        await worker.serve_all(given_up)
        done = await letters.retry(await letters.ls())
        new = {batch.retry_of: batch for batch in done.batches}
        assert {first: (3, "anna"), second: (1, "default")} == {
            old: (batch.total, batch.tenant) for old, batch in new.items()
        }
        assert (4, 0) == (done.count, await letters.count())
        await worker.serve_all(good)
        results = [result async for _, result in batches.results(new[first].id)]
        assert ["row-1", "row-2", "row-3"] == [result.key for result in results]
        assert "prompts.jsonl" == new[first].name

    async def test_a_retry_that_dies_again_can_be_retried_again(
        self, queue: Queue, letters: DeadLetters, worker: LineWorker
    ) -> None:
        """The names of its batches do not grow, and `batch retry` takes them too."""
        batches = Batches(queue)
        old = await queued(batches, 1)
        await worker.serve_all(given_up)
        for _ in range(3):
            (new,) = (await letters.retry(await letters.ls())).batches
            await worker.serve_all(given_up)
        assert len(old) + len("-dead-") + 12 == len(new.id)
        assert f"{new.id}-r1" == (await batches.retry(new.id)).id

    async def test_cut_off_before_the_letters_went_it_queues_nothing_twice(
        self, queue: Queue, letters: DeadLetters, worker: LineWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The letters are still there, and the same retry again finds the jobs that it made (G1, G3)."""
        await died(queue, worker)
        await queued(Batches(queue), 2)
        await worker.serve_all(given_up)
        chosen = await letters.ls()

        async def cut_off(_: object) -> int:
            raise RedisConnectionError("gone")

        for kind in ("i", "b"):
            some = [letter for letter in chosen if letter.cls.letter == kind]
            with monkeypatch.context() as patch:
                patch.setattr(letters, "purge", cut_off)
                with pytest.raises(RedisConnectionError):
                    await letters.retry(some)
        assert 3 == await letters.count()
        done = await letters.retry(chosen)
        assert (1, [2], 0) == (len(done.jobs), [batch.total for batch in done.batches], await letters.count())
        assert 3 == await worker.serve_all()

    async def test_a_batch_that_is_kept_no_longer_is_not_needed(
        self, queue: Queue, letters: DeadLetters, worker: LineWorker
    ) -> None:
        """Letters are kept for 30 days, batches for a week."""
        batches = Batches(queue)
        old = await queued(batches, 1)
        await worker.serve_all(given_up)
        await batches.delete(old)
        (new,) = (await letters.retry(await letters.ls())).batches
        assert (old, f"dead letters of {old}") == (new.retry_of, new.name)

    async def test_a_letter_without_a_job_stays(self, queue: Queue, letters: DeadLetters, worker: LineWorker) -> None:
        """One that nobody can run is named, and harms no other."""
        redis = cast(Any, queue.redis)
        await redis.xadd(queue.keys.dead, {"key": "a", "lane": "i:t", "class": "i", "data": b"\xc1"})
        await redis.xadd(queue.keys.dead, {"lane": "batch:b", "class": "b", "attempts": "many"})
        await died(queue, worker)
        done = await letters.retry(await letters.ls())
        assert (1, 2) == (done.count, len(done.unreadable))
        assert 2 == await letters.count()
        with pytest.raises(EncodingError):
            await letters.job(done.unreadable[0])

    async def test_a_full_queue_takes_no_letter_away(
        self, queue: Queue, letters: DeadLetters, worker: LineWorker
    ) -> None:
        """It says so, and the letter stays (G15)."""
        await died(queue, worker, 2)
        await queue.set("cap_interactive", "1")
        with pytest.raises(QueueFull):
            await letters.retry(await letters.ls())
        assert 1 == await letters.count()

    async def test_a_letter_chosen_twice_is_one(self, queue: Queue, letters: DeadLetters, worker: LineWorker) -> None:
        """What a person types is no reason to run a job twice."""
        await died(queue, worker)
        (letter,) = await letters.ls()
        assert [letter] == await letters.choose([letter.id, letter.id])


async def test_purged_letters_are_gone_and_others_stay(queue: Queue, letters: DeadLetters, worker: LineWorker) -> None:
    """Only those that were chosen: what died since then nobody has seen."""
    await died(queue, worker, 3)
    chosen: list[DeadLetter] = await letters.ls()
    await died(queue, worker)
    assert (3, 0) == (await letters.purge(chosen), await letters.purge(chosen))
    assert 1 == await letters.count()


def _place(letter_id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in letter_id.split("-"))
