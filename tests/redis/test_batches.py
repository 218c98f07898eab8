"""Batches on a real server: opened, fed, shown, paused, cancelled, expired, retried, deleted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import pytest
from redis import exceptions
from redis.asyncio import Redis

from llmq.scheduler.batch_record import BatchRecord, BatchStatus
from llmq.scheduler.batches import Batches
from llmq.scheduler.connection import connect
from llmq.scheduler.errors import (
    LineFault,
    LLMQError,
    NotFoundError,
    QueueFull,
    RedisFull,
    RedisUnavailable,
    UsageError,
)
from llmq.scheduler.feeding import MAX_CHUNK_LINES, Feeder, FeedProgress, FeedState, encode_line
from llmq.scheduler.job import Job
from llmq.scheduler.lease import lane_of_batch
from llmq.scheduler.lines import InputLine, UnusableLine
from llmq.scheduler.queue import Queue
from llmq.scheduler.scripts import SubmitLine, run, submit_lines
from tests.conftest import OwnServer
from tests.line_worker import LineWorker, bad, good, good_but, lost
from tests.reply_eater import ReplyEater

DIGEST = "d" * 64
HOUR_MS = 3_600_000


@pytest.fixture
def queue(redis: Redis) -> Queue:
    """An empty queue."""
    return Queue(redis)


@pytest.fixture
def batches(queue: Queue) -> Batches:
    """Its batches."""
    return Batches(queue)


@pytest.fixture
def worker(queue: Queue) -> LineWorker:
    """A worker of the queue."""
    return LineWorker(queue)


def lines(first: int, last: int) -> Iterator[InputLine]:
    """Return lines `first` to `last` of a file."""
    for number in range(first, last + 1):
        body = {"messages": [{"role": "user", "content": f"question {number}"}]}
        yield InputLine(number, f"row-{number}", Job("/v1/chat/completions", body), 0)


async def opened(batches: Batches, **options: Any) -> str:
    """Open a batch; return its id."""
    return (await batches.open(name="prompts.jsonl", digest=DIGEST, **options)).id


async def queued(batches: Batches, count: int, **options: Any) -> str:
    """Open, feed and seal a batch of `count` lines; return its id."""
    batch_id = await opened(batches, **options)
    assert count == await batches.feed(batch_id, lines(1, count))
    return batch_id


async def waiting_lines(queue: Queue, batch_id: str) -> list[int]:
    """Return the numbers of all lines in a batch's lane."""
    stream = await cast(Any, queue.redis).xrange(queue.keys.of_batch(batch_id)[0])
    return [int(entry.split(b"-")[0]) for entry, _ in stream]


async def set_clock(queue: Queue, ms: int) -> None:
    """Set the queue's own clock."""
    await cast(Any, queue.redis).hset(queue.keys.config, "virtual", ms)


def counts(record: BatchRecord) -> tuple[int, int, int | None]:
    """Return completed, failed, total."""
    return record.completed, record.failed, record.total


class TestOpening:
    """A batch is there before its lines."""

    @pytest.mark.leaves("*")
    async def test_an_open_batch_has_no_lines_and_is_not_sealed(self, batches: Batches) -> None:
        """All that was given is in its record."""
        record = await batches.open(
            name="prompts.jsonl", digest=DIGEST, tenant="eval", window=60, extra={"endpoint": "/v1/embeddings"}
        )
        assert ("prompts.jsonl", DIGEST, "eval") == (record.name, record.digest, record.tenant)
        assert (BatchStatus.IN_PROGRESS, False, 0, 1, None) == (
            record.status,
            record.sealed,
            record.lines,
            record.next_line,
            record.total,
        )
        assert record.expires_at is not None
        assert 60 == pytest.approx(record.expires_at - record.created_at)
        assert {"endpoint": "/v1/embeddings"} == record.extra

    @pytest.mark.leaves("*")
    async def test_the_same_id_and_file_again_is_the_same_batch(self, batches: Batches) -> None:
        """A reply that was lost is asked for again, and an earlier run is resumed (F-084)."""
        await queued(batches, 3, batch_id="batch_run")
        record = await batches.open(name="prompts.jsonl", digest=DIGEST, batch_id="batch_run")
        assert (3, True) == (record.lines, record.sealed)

    async def test_a_lost_reply_leaves_no_batch_that_nobody_knows(self, redis: Redis, redis_url: str) -> None:
        """It is asked for again with the same id: an open batch without an owner would stay for ever (F-084, G11)."""
        async with ReplyEater(redis_url) as eater:
            client = connect(eater.url)
            through_eater = Batches(Queue(client))
            eater.swallow_reply_to("EVALSHA", cut=True)
            batch_id = await queued(through_eater, 0)
            await client.aclose()
        assert 1 == eater.swallowed
        assert [batch_id] == [record.id for record in await Batches(Queue(redis)).ls()]

    @pytest.mark.leaves("*")
    async def test_another_file_is_refused_with_both_digests(self, batches: Batches) -> None:
        """`--resume` with the wrong file would queue lines that belong to no batch."""
        batch_id = await opened(batches)
        with pytest.raises(UsageError, match=f"its digest is {DIGEST}, this file's is other"):
            await batches.reopen(batch_id, "other")

    async def test_resuming_a_batch_that_is_not_there_makes_none(self, batches: Batches) -> None:
        """A mistyped id is an error."""
        with pytest.raises(NotFoundError, match="batch_9"):
            await batches.reopen("batch_9", DIGEST)
        assert [] == await batches.ls()

    @pytest.mark.leaves("*")
    async def test_without_room_for_what_is_needed_nothing_is_opened(self, queue: Queue, batches: Batches) -> None:
        """`--no-wait`: exit 5, nothing queued (G15)."""
        await queue.set("cap_batch", "5")
        await queued(batches, 2)
        with pytest.raises(QueueFull, match="holds its 5 batch jobs; try again in 1 s"):
            await opened(batches, need=5)
        assert 1 == len(await batches.ls())

    async def test_more_lines_than_the_queue_may_hold_are_told_that_they_never_fit(
        self, queue: Queue, batches: Batches
    ) -> None:
        """To try again later would not help (G15)."""
        await queue.set("cap_batch", "5")
        with pytest.raises(QueueFull, match="6 jobs never fit at once into a queue of at most 5 batch jobs; let them"):
            await opened(batches, need=6)
        assert [] == await batches.ls()

    async def test_a_tenant_that_cannot_be_one_is_refused(self, batches: Batches) -> None:
        """A tenant's name is part of how its lanes are ordered."""
        with pytest.raises(UsageError):
            await opened(batches, tenant="a|b")


class TestFeeding:
    """Lines get in once each, whatever happens meanwhile."""

    async def test_all_lines_of_a_file_run_and_the_batch_completes(self, batches: Batches, worker: LineWorker) -> None:
        """More than one chunk; ids and order are the file's."""
        batch_id = await queued(batches, 1234)
        first = await worker.claim(3)
        assert [("row-1", 1), ("row-2", 2), ("row-3", 3)] == [(lease.key, lease.line) for lease in first]
        await worker.end(first)
        assert 1231 == await worker.serve_all()
        record = await batches.show(batch_id)
        assert (BatchStatus.COMPLETED, (1234, 0, 1234)) == (record.status, counts(record))

    async def test_blank_lines_leave_gaps_and_nothing_else(self, queue: Queue, batches: Batches) -> None:
        """Line numbers are those of the file."""
        batch_id = await opened(batches)
        given: list[InputLine | LineFault] = [*lines(3, 4), *lines(9, 9)]
        assert 3 == await batches.feed(batch_id, given)
        assert [3, 4, 9] == await waiting_lines(queue, batch_id)
        await batches.cancel(batch_id)

    async def test_bad_lines_are_error_lines_and_harm_no_other(self, batches: Batches, worker: LineWorker) -> None:
        """`--skip-bad`: every line ends in exactly one result (G16)."""
        batch_id = await opened(batches)
        given: list[InputLine | LineFault] = [
            LineFault(1, "", "is not JSON"),
            *lines(2, 3),
            UnusableLine(4, "messages", "is missing", "row-4", 0),
        ]
        assert 4 == await batches.feed(batch_id, given)
        await worker.serve_all()
        found = {result.line: result async for _, result in batches.results(batch_id)}
        assert {1: False, 2: True, 3: True, 4: False} == {line: result.ok for line, result in found.items()}
        assert ("invalid_line", "line 4: messages: is missing", "row-4") == (
            found[4].error_code,
            found[4].error_message,
            found[4].key,
        )
        assert (2, 2, 4) == counts(await batches.show(batch_id))

    async def test_a_file_of_bad_lines_only_completes_when_it_is_sealed(self, batches: Batches) -> None:
        """Nobody will ever finish a line of it."""
        batch_id = await opened(batches)
        await batches.feed(batch_id, [LineFault(1, "", "is bad"), LineFault(2, "", "is bad")])
        assert (BatchStatus.COMPLETED, 2) == (
            (await batches.show(batch_id)).status,
            (await batches.show(batch_id)).failed,
        )

    async def test_a_file_without_lines_completes_at_once(self, batches: Batches) -> None:
        """Nothing to wait for."""
        assert BatchStatus.COMPLETED is (await batches.show(await queued(batches, 0))).status

    async def test_lines_that_finish_before_the_feed_ends_do_not_complete_the_batch(
        self, queue: Queue, batches: Batches, worker: LineWorker
    ) -> None:
        """Workers may be faster than the producer: the batch completes when it is sealed, and no sooner."""
        record = await batches.open(name="prompts.jsonl", digest=DIGEST)

        async def slow_file() -> AsyncIterator[SubmitLine]:
            for line in lines(1, MAX_CHUNK_LINES + 1):
                yield encode_line(line)
            served = 0
            while served < MAX_CHUNK_LINES:  # the first chunk is on its way, and worked off before the file goes on
                served += await worker.serve(100)
            assert BatchStatus.IN_PROGRESS is (await batches.show(record.id)).status
            for line in lines(MAX_CHUNK_LINES + 2, MAX_CHUNK_LINES + 3):
                yield encode_line(line)

        assert MAX_CHUNK_LINES + 3 == await Feeder(queue.redis, queue.keys, record).feed(slow_file())
        assert BatchStatus.IN_PROGRESS is (await batches.show(record.id)).status
        assert 3 == await worker.serve_all()
        assert BatchStatus.COMPLETED is (await batches.show(record.id)).status

    async def test_a_feed_that_was_broken_off_goes_on_at_the_next_line(self, queue: Queue, batches: Batches) -> None:
        """Ctrl-C, then `--resume`: nothing is lost and nothing is there twice (G1, F-084)."""
        batch_id = await opened(batches)
        fed = asyncio.Event()
        task = asyncio.create_task(batches.feed(batch_id, lines(1, 20_000), on_progress=lambda progress: fed.set()))
        await fed.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        record = await batches.show(batch_id)
        assert not record.sealed
        assert 0 < record.lines < 20_000
        assert 20_000 == await batches.feed(batch_id, lines(1, 20_000))
        assert list(range(1, 20_001)) == await waiting_lines(queue, batch_id)
        await batches.cancel(batch_id)

    async def test_feeding_a_sealed_batch_again_changes_nothing(self, queue: Queue, batches: Batches) -> None:
        """The last reply of a feed may be the one that was lost."""
        batch_id = await queued(batches, 3)
        assert 3 == await batches.feed(batch_id, lines(1, 3))
        assert [1, 2, 3] == await waiting_lines(queue, batch_id)
        await batches.cancel(batch_id)

    async def test_two_producers_at_once_make_one_batch(self, queue: Queue, redis_url: str) -> None:
        """Each skips forward over what the other has sent, and both end well."""
        others = [connect(redis_url) for _ in range(3)]
        batch_id = await opened(Batches(queue))
        try:
            totals = await asyncio.gather(
                *(Batches(Queue(redis)).feed(batch_id, lines(1, 5000)) for redis in (queue.redis, *others))
            )
        finally:
            for redis in others:
                await redis.aclose()
        assert [5000] * 4 == totals
        assert list(range(1, 5001)) == await waiting_lines(queue, batch_id)
        await Batches(queue).cancel(batch_id)

    @pytest.mark.parametrize("seed", range(3))
    async def test_replies_that_are_lost_make_no_line_twice(self, queue: Queue, seed: int) -> None:
        """The chunk was taken and its reply never came: sent again, it is skipped (F-084)."""
        chance = random.Random(seed)
        lossy = Queue(cast(Redis, LosesReplies(queue.redis, chance)))
        states: set[FeedState] = set()
        batch_id = await opened(Batches(queue))
        total = await Batches(lossy).feed(
            batch_id, lines(1, 5000), on_progress=lambda progress: states.add(progress.state)
        )
        assert 5000 == total
        assert list(range(1, 5001)) == await waiting_lines(queue, batch_id)
        assert FeedState.WAITING_FOR_REDIS in states
        await Batches(queue).cancel(batch_id)

    async def test_a_full_queue_is_waited_for_and_takes_what_it_has_room_for(
        self, queue: Queue, batches: Batches, worker: LineWorker
    ) -> None:
        """The chunk shrinks to the room; the state says `waiting for room`; the queue never holds more (G15)."""
        await queue.set("cap_batch", "5")
        batch_id = await opened(batches)
        waits = asyncio.Event()
        states: list[FeedProgress] = []

        def on_progress(progress: FeedProgress) -> None:
            states.append(progress)
            if progress.state is FeedState.WAITING_FOR_ROOM:
                waits.set()

        feeding = asyncio.create_task(batches.feed(batch_id, lines(1, 12), on_progress=on_progress))
        served = 0
        while served < 12:
            if not feeding.done():
                await waits.wait()
                waits.clear()
            assert len(await waiting_lines(queue, batch_id)) <= 5
            served += await worker.serve(2)
            if served >= 8:
                waits.set()
        assert 12 == await feeding
        assert "waiting for room" == states[1].state
        assert FeedProgress(5, 6, FeedState.QUEUEING) == states[0]
        assert (12, 0, 12) == counts(await batches.show(batch_id))

    async def test_without_waiting_a_feed_that_finds_no_room_leaves_nothing(
        self, queue: Queue, batches: Batches
    ) -> None:
        """The room was there at the opening and vanished: the batch is taken back (exit 5, nothing queued)."""
        batch_id = await opened(batches, need=12)
        await queue.set("cap_batch", "5")
        with pytest.raises(QueueFull, match="holds its 5 batch jobs"):
            await batches.feed(batch_id, lines(1, 12), wait=False)
        assert [] == await batches.ls()
        assert [] == await waiting_lines(queue, batch_id)

    async def test_without_waiting_what_an_earlier_feed_has_queued_stays(self, queue: Queue, batches: Batches) -> None:
        """`--resume` with `--no-wait` on a full queue: lines and results of before are not deleted (G1, G15)."""
        batch_id = await opened(batches)
        first = [encode_line(line) for line in lines(1, 5)]
        lane = lane_of_batch(batch_id)
        await run(queue.redis, submit_lines(queue.keys, batch_id, lane=lane, first=1, after=6, lines=first))
        before = await batches.show(batch_id)
        await queue.set("cap_batch", "5")
        with pytest.raises(QueueFull):
            await batches.feed(batch_id, lines(1, 12), wait=False)
        assert before == await batches.show(batch_id)
        await batches.cancel(batch_id)

    async def test_a_batch_that_somebody_cancels_ends_its_feed_with_a_clear_error(self, batches: Batches) -> None:
        """The message says where, and what to do."""
        batch_id = await opened(batches)
        cancelling: list[asyncio.Task[BatchRecord]] = []

        def on_progress(progress: FeedProgress) -> None:
            if not cancelling:
                cancelling.append(asyncio.create_task(batches.cancel(batch_id)))

        with pytest.raises(LLMQError, match=rf"batch {batch_id} takes no more lines .*: somebody cancelled it"):
            await batches.feed(batch_id, lines(1, 100_000), on_progress=on_progress)
        assert BatchStatus.CANCELLED is (await cancelling[0]).status

    async def test_a_batch_that_is_deleted_under_its_feed_is_lost(self, queue: Queue, batches: Batches) -> None:
        """FLUSHALL in the middle: an error that says so (G13)."""
        batch_id = await opened(batches)
        flushing: list[asyncio.Task[Any]] = []

        def on_progress(progress: FeedProgress) -> None:
            if not flushing:
                flushing.append(asyncio.create_task(cast(Any, queue.redis).flushall()))

        with pytest.raises(LLMQError, match="Redis no longer knows it"):
            await batches.feed(batch_id, lines(1, 100_000), on_progress=on_progress)


class TestFeedingThroughOutages:
    """Redis goes away, or is full, in mid-feed."""

    async def test_a_feed_outlives_a_restart_of_redis(self, own_server: OwnServer) -> None:
        """Killed and started again: the feed goes on by itself, nothing is lost or doubled (G1, F-081)."""
        server = own_server()
        redis = connect(server.url)
        queue, states = Queue(redis), []
        batches = Batches(queue)

        def on_progress(progress: FeedProgress) -> None:
            states.append(progress.state)
            if states.count(FeedState.QUEUEING) == 3 and FeedState.WAITING_FOR_REDIS not in states:
                server.kill()
            elif states[-1] is FeedState.WAITING_FOR_REDIS and states[-2] is FeedState.QUEUEING:
                server.start()

        batch_id = await opened(batches)
        assert 5000 == await batches.feed(batch_id, lines(1, 5000), on_progress=on_progress)
        assert FeedState.WAITING_FOR_REDIS in states
        assert list(range(1, 5001)) == await waiting_lines(queue, batch_id)
        await redis.aclose()

    async def test_a_redis_that_stays_away_is_an_error_with_the_command_that_goes_on(
        self, own_server: OwnServer
    ) -> None:
        """Bounded: nobody waits for ever (F-083, G13)."""
        server = own_server()
        redis = connect(server.url)
        batches = Batches(Queue(redis), patience_s=0.2)
        batch_id = await opened(batches)

        def on_progress(progress: FeedProgress) -> None:
            if progress.state is FeedState.QUEUEING:
                server.close()

        with pytest.raises(RedisUnavailable, match=f"llmq submit-batch FILE --resume {batch_id}"):
            await batches.feed(batch_id, lines(1, 5000), on_progress=on_progress)
        await redis.aclose()

    async def test_a_redis_without_memory_is_waited_for(self, own_server: OwnServer) -> None:
        """As a full queue, and it says which (F-095)."""
        server = own_server()
        redis = connect(server.url)
        queue = Queue(redis)
        batches = Batches(queue)
        batch_id = await opened(batches)
        with server.client() as admin:
            admin.config_set("maxmemory", 1)

            def on_progress(progress: FeedProgress) -> None:
                if progress.state is FeedState.WAITING_FOR_MEMORY:
                    admin.config_set("maxmemory", 0)

            assert 700 == await batches.feed(batch_id, lines(1, 700), on_progress=on_progress)
        assert list(range(1, 701)) == await waiting_lines(queue, batch_id)
        await redis.aclose()

    async def test_without_waiting_a_redis_without_memory_leaves_nothing(self, own_server: OwnServer) -> None:
        """Cancelling and deleting are allowed at maxmemory."""
        server = own_server()
        redis = connect(server.url)
        batches = Batches(Queue(redis))
        batch_id = await opened(batches)
        with server.client() as admin:
            admin.config_set("maxmemory", 1)
            with pytest.raises(RedisFull, match="maxmemory"):
                await batches.feed(batch_id, lines(1, 700), wait=False)
        assert [] == await batches.ls()
        await redis.aclose()


class TestShowing:
    """What is seen of batches."""

    async def test_waiting_and_running_are_told_apart(self, batches: Batches, worker: LineWorker) -> None:
        """Waiting is what is in the lane and not pending."""
        batch_id = await queued(batches, 5)
        running = await worker.claim(2)
        await worker.serve(1)
        record = await batches.show(batch_id)
        assert (2, 2, 1) == (record.waiting, record.running, record.completed)
        await worker.end(running)
        await worker.serve_all()

    async def test_batches_are_listed_with_the_newest_first(self, batches: Batches) -> None:
        """At most as many as asked for."""
        made = [await queued(batches, 0) for _ in range(3)]
        listed = [record.id for record in await batches.ls()]
        assert sorted(made, reverse=True) == sorted(listed, reverse=True)
        assert 2 == len(await batches.ls(limit=2))

    async def test_an_unknown_batch_is_not_found(self, batches: Batches) -> None:
        """By every verb, with the id."""
        for verb in (batches.show, batches.pause, batches.resume, batches.cancel, batches.delete, batches.retry):
            with pytest.raises(NotFoundError, match="batch_9"):
                await verb("batch_9")
        with pytest.raises(NotFoundError, match="batch_9"):
            await batches.wait("batch_9")

    async def test_a_batch_whose_results_nobody_takes_away_says_why_it_stands(
        self, queue: Queue, batches: Batches, worker: LineWorker
    ) -> None:
        """The reason is `results not collected`, and it goes when they are (F-095)."""
        await cast(Any, queue.redis).hset(queue.keys.config, "results_max_bytes", "100")
        batch_id = await queued(batches, 20)
        await worker.serve(10)
        assert "results not collected" == (await batches.show(batch_id)).reason
        assert 0 == await worker.serve(10)
        cursor = [cursor async for cursor, _ in batches.results(batch_id)][-1]
        assert 10 == await batches.collected(batch_id, "host:/out", cursor)
        record = await batches.show(batch_id)
        assert ("", 10, {"host:/out": cursor}) == (record.reason, record.trimmed, record.collectors)
        await worker.serve(1)
        await batches.cancel(batch_id)


class TestPausing:
    """A batch out of its order, and back."""

    async def test_a_paused_batch_starts_nothing_until_it_is_resumed(
        self, batches: Batches, worker: LineWorker
    ) -> None:
        """Running lines go on."""
        batch_id = await queued(batches, 4)
        running = await worker.claim(1)
        assert (await batches.pause(batch_id)).paused
        assert [] == await worker.claim(5)
        await worker.end(running)
        assert not (await batches.resume(batch_id)).paused
        assert 3 == await worker.serve_all()
        assert BatchStatus.COMPLETED is (await batches.wait(batch_id)).status

    async def test_a_batch_that_has_ended_cannot_be_paused(self, batches: Batches) -> None:
        """The message says how it ended."""
        batch_id = await queued(batches, 0)
        with pytest.raises(UsageError, match="is completed: there is nothing to pause"):
            await batches.pause(batch_id)


class TestCancelling:
    """Waiting lines end at once; workers are told of those that run."""

    async def test_waiting_lines_are_cancelled_without_any_worker(self, batches: Batches, worker: LineWorker) -> None:
        """More than one step of the reaper; a cancelled line never starts (G14), each has its error line (G16)."""
        batch_id = await queued(batches, 1234)
        record = await batches.cancel(batch_id)
        assert (BatchStatus.CANCELLED, (0, 1234, 1234)) == (record.status, counts(record))
        assert [] == await worker.claim(5)
        codes = [result.error_code async for _, result in batches.results(batch_id)]
        assert ["batch_cancelled"] * 1234 == codes

    async def test_the_workers_that_run_lines_of_it_are_told(self, queue: Queue, batches: Batches) -> None:
        """Each once, on its own list, for a minute (F-123, F-126)."""
        first, second = LineWorker(queue, "worker-1"), LineWorker(queue, "worker-2")
        batch_id = await queued(batches, 6)
        running = [await first.claim(2), await second.claim(1)]
        record = await batches.cancel(batch_id)
        assert (BatchStatus.CANCELLING, 3, 3) == (record.status, record.failed, record.running)
        for name in ("worker-1", "worker-2"):
            commands = await cast(Any, queue.redis).lrange(queue.keys.control(name), 0, -1)
            assert [f"cancel-lane batch:{batch_id}".encode()] == commands
            assert 0 < await queue.redis.pttl(queue.keys.control(name)) <= 60_000
        await first.end(running[0], lost)
        await second.end(running[1])
        record = await batches.show(batch_id)
        assert (BatchStatus.CANCELLED, (1, 5, 6)) == (record.status, counts(record))

    async def test_a_batch_that_has_ended_stays_as_it_is(self, batches: Batches, worker: LineWorker) -> None:
        """Cancelling twice is no error (F-124)."""
        done = await queued(batches, 1)
        await worker.serve_all()
        assert BatchStatus.COMPLETED is (await batches.cancel(done)).status
        gone = await queued(batches, 1)
        await batches.cancel(gone)
        assert BatchStatus.CANCELLED is (await batches.cancel(gone)).status

    async def test_a_batch_that_is_being_fed_or_paused_can_be_cancelled(self, batches: Batches) -> None:
        """Not sealed, not in any order."""
        batch_id = await opened(batches)
        record = await batches.cancel(batch_id)
        assert (BatchStatus.CANCELLED, 0) == (record.status, record.total)
        batch_id = await queued(batches, 3)
        await batches.pause(batch_id)
        assert BatchStatus.CANCELLED is (await batches.cancel(batch_id)).status


class TestExpiry:
    """A window that is over, without any worker alive: whoever waits ends it (G13)."""

    async def test_a_waiter_returns_when_the_window_is_over(
        self, queue: Queue, batches: Batches, worker: LineWorker
    ) -> None:
        """What has not started is an error line; what was answered stays."""
        await set_clock(queue, 1_000_000)
        batch_id = await queued(batches, 10, window=3600)
        await worker.serve(4)
        waiting = asyncio.create_task(batches.wait(batch_id))
        await set_clock(queue, 1_000_000 + HOUR_MS)
        record = await waiting
        assert (BatchStatus.EXPIRED, (4, 6, 10)) == (record.status, counts(record))

    async def test_a_follower_ends_when_the_window_is_over(self, queue: Queue, batches: Batches) -> None:
        """It gets the error lines of what has not started."""
        await set_clock(queue, 1_000_000)
        batch_id = await queued(batches, 3, window=3600)
        await set_clock(queue, 1_000_000 + HOUR_MS)
        codes = [result.error_code async for _, result in batches.results(batch_id, follow=True)]
        assert ["batch_expired"] * 3 == codes

    async def test_looking_at_a_batch_ends_nothing(self, queue: Queue, batches: Batches) -> None:
        """Reading does not write."""
        await set_clock(queue, 1_000_000)
        batch_id = await queued(batches, 3, window=3600)
        await set_clock(queue, 1_000_000 + HOUR_MS)
        await batches.show(batch_id)
        await batches.ls()
        assert [1, 2, 3] == await waiting_lines(queue, batch_id)
        assert 3 == (await batches.wait(batch_id)).failed

    async def test_feeding_past_the_window_is_an_error_that_says_so(self, queue: Queue, batches: Batches) -> None:
        """The rest needs a batch of its own."""
        await set_clock(queue, 1_000_000)
        batch_id = await opened(batches, window=3600)
        await set_clock(queue, 1_000_000 + HOUR_MS)
        await batches.reap(batch_id)
        with pytest.raises(LLMQError, match="its window was over"):
            await batches.feed(batch_id, lines(1, 3))


class TestDeleting:
    """A batch that has ended, gone."""

    async def test_a_batch_that_runs_is_not_deleted(self, batches: Batches) -> None:
        """The message has the command that comes first."""
        batch_id = await queued(batches, 3)
        with pytest.raises(UsageError, match=f"is in_progress; cancel it first: llmq batch cancel {batch_id}"):
            await batches.delete(batch_id)
        await batches.cancel(batch_id)

    async def test_of_a_deleted_batch_nothing_is_left(self, queue: Queue, batches: Batches, worker: LineWorker) -> None:
        """Record, lines, results, and its bytes in the total (G11)."""
        batch_id = await queued(batches, 5)
        await worker.serve_all()
        await batches.delete(batch_id)
        with pytest.raises(NotFoundError):
            await batches.show(batch_id)
        keys = [key async for key in queue.redis.scan_iter(f"*{batch_id}*")]
        assert [] == keys
        assert [] == await batches.ls()
        assert 0 == await queue.redis.exists(queue.keys.held)


class TestRetrying:
    """The failed lines again, without the file."""

    async def test_failed_lines_are_a_new_batch_with_the_same_ids(self, batches: Batches, worker: LineWorker) -> None:
        """And with the same jobs; the good ones are not run again."""
        batch_id = await queued(batches, 6, tenant="eval")
        await worker.serve_all(good_but("row-2", "row-5"))
        retried = await batches.retry(batch_id)
        assert (f"{batch_id}-r1", batch_id, "eval", 2, True) == (
            retried.id,
            retried.retry_of,
            retried.tenant,
            retried.lines,
            retried.sealed,
        )
        leases = await worker.claim(5)
        assert [("row-2", 1), ("row-5", 2)] == [(lease.key, lease.line) for lease in leases]
        questions = [Job.decode(lease.data).body["messages"][0]["content"] for lease in leases]
        assert ["question 2", "question 5"] == questions
        await worker.end(leases)
        assert (2, 0, 2) == counts(await batches.show(retried.id))

    async def test_a_retry_of_a_retry_and_a_cancelled_batch_work_alike(
        self, batches: Batches, worker: LineWorker
    ) -> None:
        """Cancelled lines count as failed: they can be queued again."""
        batch_id = await queued(batches, 4)
        await worker.serve(1)
        await batches.cancel(batch_id)
        first = await batches.retry(batch_id)
        assert 3 == first.lines
        await worker.serve_all(bad)
        second = await batches.retry(first.id)
        assert (f"{batch_id}-r2", 3) == (second.id, second.lines)
        await worker.serve_all(good)

    async def test_a_batch_that_still_runs_is_not_retried(self, batches: Batches) -> None:
        """Its lines may yet succeed."""
        batch_id = await queued(batches, 1)
        with pytest.raises(UsageError, match="is in_progress; retry it when it has ended"):
            await batches.retry(batch_id)
        await batches.cancel(batch_id)

    async def test_without_failed_lines_there_is_nothing_to_retry(self, batches: Batches, worker: LineWorker) -> None:
        """No batch is made."""
        batch_id = await queued(batches, 2)
        await worker.serve_all()
        with pytest.raises(UsageError, match="has no failed lines: there is nothing to retry"):
            await batches.retry(batch_id)
        assert 1 == len(await batches.ls())

    async def test_bad_lines_of_the_file_cannot_be_retried(self, batches: Batches) -> None:
        """There is no job to run; the message says what to do instead."""
        batch_id = await opened(batches)
        await batches.feed(batch_id, [LineFault(1, "", "is bad")])
        with pytest.raises(UsageError, match="its 1 failed lines are bad lines of the file"):
            await batches.retry(batch_id)

    async def test_a_second_retry_is_refused(self, batches: Batches, worker: LineWorker) -> None:
        """No line is run by two batches."""
        batch_id = await queued(batches, 2)
        await worker.serve_all(bad)
        await batches.retry(batch_id)
        with pytest.raises(UsageError, match=f"was retried already, as {batch_id}-r1"):
            await batches.retry(batch_id)
        await worker.serve_all()

    async def test_a_retry_that_was_broken_off_goes_on(
        self, queue: Queue, batches: Batches, worker: LineWorker
    ) -> None:
        """The same command again continues it: no line is lost or doubled (G16)."""
        batch_id = await queued(batches, 3000)
        await worker.serve_all(bad)
        fed = asyncio.Event()
        task = asyncio.create_task(batches.retry(batch_id, on_progress=lambda progress: fed.set()))
        await fed.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not (await batches.show(f"{batch_id}-r1")).sealed
        retried = await batches.retry(batch_id)
        assert 3000 == retried.lines
        assert list(range(1, 3001)) == await waiting_lines(queue, retried.id)
        await batches.cancel(retried.id)

    async def test_a_batch_whose_results_were_trimmed_says_where_they_are(
        self, queue: Queue, batches: Batches, worker: LineWorker
    ) -> None:
        """What is gone cannot be retried from here."""
        await cast(Any, queue.redis).hset(queue.keys.config, "results_max_bytes", "1000")
        batch_id = await queued(batches, 20)
        await worker.serve_all(bad)
        cursor = [cursor async for cursor, _ in batches.results(batch_id)][9]
        assert 10 == await batches.collected(batch_id, "host:/out.jsonl", cursor)
        with pytest.raises(UsageError, match=r"10 of 20 results are no longer in Redis.*host:/out\.jsonl"):
            await batches.retry(batch_id)


class LosesReplies:
    """A client some of whose scripts run without their reply ever coming, and some of which never arrive."""

    def __init__(self, redis: Redis, chance: random.Random) -> None:
        self._redis = redis
        self._chance = chance

    def __getattr__(self, name: str) -> Any:
        return getattr(self._redis, name)

    async def evalsha(self, *args: Any) -> Any:
        """Run a script, or not; then say that nobody answered."""
        fate = self._chance.random()
        if fate < 0.2:
            raise exceptions.ConnectionError("Connection refused")
        reply = await cast(Any, self._redis).evalsha(*args)
        if fate < 0.5:
            raise exceptions.TimeoutError("Timeout reading from socket")
        return reply
