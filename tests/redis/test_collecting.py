"""Results on a real server: read page by page, followed, collected into an output, trimmed, and never lost."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
from redis.asyncio import Redis

from llmq.scheduler import collecting, result_file
from llmq.scheduler.batch_record import BatchRecord
from llmq.scheduler.batches import Batches
from llmq.scheduler.collecting import Collected, Which, collect_to_file, collector_of, collector_of_stream
from llmq.scheduler.connection import connect
from llmq.scheduler.errors import LLMQError, NotFoundError, UsageError
from llmq.scheduler.job import Job
from llmq.scheduler.lease import Answered, Lease
from llmq.scheduler.lines import InputLine
from llmq.scheduler.output import ResultFile, open_output
from llmq.scheduler.queue import Queue
from llmq.scheduler.records import ResultRecord
from llmq.scheduler.result_reader import MOST_RESULTS, PAGE_BYTES
from tests.conftest import OwnServer
from tests.line_worker import LineWorker, bad, good_but

DIGEST = "d" * 64


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


async def queued(batches: Batches, count: int, **options: Any) -> str:
    """Queue a batch of `count` lines; return its id."""
    record = await batches.open(name="prompts.jsonl", digest=DIGEST, **options)
    await batches.feed(record.id, lines(1, count))
    return record.id


async def read(batches: Batches, batch_id: str, after: str = "0-0", *, follow: bool = False) -> list[str]:
    """Return the ids of the results after a cursor."""
    return [result.key async for _, result in batches.results(batch_id, after=after, follow=follow)]


async def cursors(batches: Batches, batch_id: str) -> list[str]:
    """Return the cursors of all results."""
    return [cursor async for cursor, _ in batches.results(batch_id)]


def rows(first: int, last: int) -> list[str]:
    """Return the ids of lines."""
    return [f"row-{number}" for number in range(first, last + 1)]


def written(path: Path) -> list[str]:
    """Return the ids in an output file."""
    return [orjson.loads(line)["custom_id"] for line in path.read_bytes().splitlines()]


async def hold_little(queue: Queue, count: int = 100) -> None:
    """Let the queue hold this many bytes of results: collected ones are trimmed above the half of it."""
    await cast(Any, queue.redis).hset(queue.keys.config, "results_max_bytes", count)


class TestReading:
    """Results in the order of completion, after a cursor."""

    async def test_results_come_in_the_order_of_completion_with_all_that_is_known(
        self, batches: Batches, worker: LineWorker
    ) -> None:
        """Good and bad in one stream, each as it was ended."""
        batch_id = await queued(batches, 3)
        first, second, third = await worker.claim(3)
        for lease in (third, first, second):
            await worker.end([lease], good_but("row-2"))
        found = [result async for _, result in batches.results(batch_id)]
        assert [3, 1, 2] == [result.line for result in found]
        assert [True, True, False] == [result.ok for result in found]
        assert (400, b'{"error":{"message":"no row-2"}}') == (found[2].status_code, found[2].body)
        assert b"" == found[0].data
        assert "question 2" == Job.decode(found[2].data).body["messages"][0]["content"]

    async def test_a_cursor_is_where_reading_goes_on(self, batches: Batches, worker: LineWorker) -> None:
        """More than one page; without `follow` it is what is there so far."""
        batch_id = await queued(batches, 100)
        await worker.serve(80)
        places = await cursors(batches, batch_id)
        assert rows(1, 80) == await read(batches, batch_id)
        assert rows(51, 80) == await read(batches, batch_id, places[49])
        assert [] == await read(batches, batch_id, places[-1])
        await worker.serve_all()
        places = await cursors(batches, batch_id)
        assert (await batches.reader(batch_id, places[-1]).next_page()).over

    async def test_a_follower_gets_what_comes_and_ends_with_the_batch(
        self, batches: Batches, worker: LineWorker
    ) -> None:
        """It blocks in between, and returns with the last result (G13)."""
        batch_id = await queued(batches, 5)
        got = []
        serving = asyncio.create_task(worker.serve(1))
        async for _, result in batches.results(batch_id, follow=True):
            got.append(result.key)
            await serving
            serving = asyncio.create_task(worker.serve(1))
        await serving
        assert rows(1, 5) == got

    async def test_a_follower_of_a_batch_without_lines_ends(self, batches: Batches) -> None:
        """Nothing will ever come."""
        assert [] == await read(batches, await queued(batches, 0), follow=True)

    async def test_a_follower_of_a_batch_that_is_deleted_is_told(self, batches: Batches, worker: LineWorker) -> None:
        """It does not wait for ever (G13, F-059)."""
        batch_id = await queued(batches, 2)
        await worker.serve(1)
        following = batches.results(batch_id, follow=True)
        await anext(following)
        await batches.cancel(batch_id)
        await batches.delete(batch_id)
        with pytest.raises(NotFoundError, match=batch_id):
            await anext(following)

    async def test_pages_of_large_results_are_small(self, batches: Batches, worker: LineWorker) -> None:
        """Memory is bounded whatever the engines answer (F-096)."""

        def large(lease: Lease) -> Answered:
            return Answered(200, b'"' + b"x" * 300_000 + b'"', "")

        batch_id = await queued(batches, 100)
        for _ in range(10):
            await worker.serve(10, large)
        reader = batches.reader(batch_id)
        sizes = []
        while (page := await reader.next_page()).results:
            sizes.append(len(page.results))
        assert MOST_RESULTS == sizes[0]
        assert all(size * 300_000 <= PAGE_BYTES for size in sizes[1:])
        assert 100 == sum(sizes)

    async def test_a_follower_outlives_a_restart_of_redis(self, own_server: OwnServer) -> None:
        """Killed under the reader and started again: every result once (F-075, F-081)."""
        server = own_server()
        redis, other = connect(server.url), connect(server.url)
        queue = Queue(redis)
        batches, worker = Batches(queue), LineWorker(Queue(other))
        batch_id = await queued(batches, 40)
        await worker.serve(20)
        got = []
        async for _, result in batches.results(batch_id, follow=True):
            got.append(result.key)
            if len(got) == 20:
                server.restart()
                while not await _served(worker):
                    pass
        assert rows(1, 40) == got
        await redis.aclose()
        await other.aclose()


async def _served(worker: LineWorker) -> bool:
    try:
        return await worker.serve(20) > 0
    except ConnectionError:
        return False
    except Exception as error:
        if "onnection" not in str(error):
            raise
        return False


class TestTrimming:
    """What every collector has may go; a reader that would have needed it is told."""

    async def test_nothing_is_trimmed_before_every_collector_has_it(
        self, queue: Queue, batches: Batches, worker: LineWorker
    ) -> None:
        """The slowest one counts (G16)."""
        await hold_little(queue)
        batch_id = await queued(batches, 10)
        await batches.collected(batch_id, "host:/fast", "0-0")
        await batches.collected(batch_id, "host:/slow", "0-0")
        await worker.serve(10)
        places = await cursors(batches, batch_id)
        assert 0 == await batches.collected(batch_id, "host:/fast", places[9])
        assert 4 == await batches.collected(batch_id, "host:/slow", places[3])
        assert rows(5, 10) == await read(batches, batch_id, places[3])
        assert 6 == await batches.collected(batch_id, "host:/slow", "")
        assert {"host:/fast": places[9]} == (await batches.show(batch_id)).collectors

    async def test_many_results_are_trimmed_in_bounded_steps(
        self, queue: Queue, batches: Batches, worker: LineWorker
    ) -> None:
        """One call of the script takes 500 at most."""
        batch_id = await queued(batches, 1234)
        await worker.serve_all()
        await hold_little(queue)
        assert 1234 == await batches.collected(batch_id, "host:/out", (await cursors(batches, batch_id))[-1])

    async def test_a_reader_from_the_beginning_is_told_how_many_are_gone_and_where_they_are(
        self, queue: Queue, batches: Batches, worker: LineWorker
    ) -> None:
        """Not a shorter answer that looks whole; a cursor after them works."""
        await hold_little(queue)
        batch_id = await queued(batches, 10)
        await worker.serve(10)
        places = await cursors(batches, batch_id)
        await batches.collected(batch_id, "host:/data/out.jsonl", places[5])
        expected = rf"6 of 10 results are no longer in Redis.*there: host:/data/out\.jsonl; Redis has .*{places[5]}"
        for after in ("0-0", places[4]):
            with pytest.raises(UsageError, match=expected):
                await read(batches, batch_id, after)
        assert rows(7, 10) == await read(batches, batch_id, places[5])

    async def test_a_reader_that_is_overtaken_is_told(self, queue: Queue, batches: Batches, worker: LineWorker) -> None:
        """It has read some, and what comes next was trimmed: no silent gap."""
        await hold_little(queue)
        batch_id = await queued(batches, 2 * MOST_RESULTS)
        await worker.serve(MOST_RESULTS)
        reader = batches.reader(batch_id)
        assert MOST_RESULTS == len((await reader.next_page()).results)
        last = (await cursors(batches, batch_id))[-1]
        await batches.collected(batch_id, "host:/out", last)
        assert [] == (await reader.next_page()).results  # all that is gone was read
        await worker.serve(MOST_RESULTS)
        last = (await cursors_after(batches, batch_id, last))[-1]
        await batches.collected(batch_id, "host:/out", last)
        with pytest.raises(UsageError, match="no longer in Redis"):
            await reader.next_page()

    async def test_a_batch_larger_than_redis_may_hold_runs_while_it_is_collected(
        self, queue: Queue, batches: Batches, worker: LineWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The lane sleeps when too much is held and wakes when it was written elsewhere (F-095)."""
        monkeypatch.setattr(collecting, "SYNC_S", 0.01)
        await hold_little(queue, 500)
        batch_id = await queued(batches, 300)
        path = tmp_path / "out.jsonl"
        with open_output(path, batch_id) as out:
            collecting_ = asyncio.create_task(collect_to_file(batches, batch_id, out))
            slept = False
            while not collecting_.done():
                if not await worker.serve(10):
                    slept = slept or bool((await batches.show(batch_id)).reason)
                    await asyncio.sleep(0)
            summary = await collecting_
        assert slept
        assert (300, 300) == (summary.ok, summary.written)
        assert rows(1, 300) == written(path)
        assert (await batches.show(batch_id)).trimmed > 200


async def cursors_after(batches: Batches, batch_id: str, after: str) -> list[str]:
    """Return the cursors of the results after another."""
    return [cursor async for cursor, _ in batches.results(batch_id, after=after)]


class TestCollecting:
    """Results into an output."""

    async def test_all_results_are_in_the_file_and_the_summary_tells_the_batch(
        self, batches: Batches, worker: LineWorker, tmp_path: Path
    ) -> None:
        """Counts, tokens and time are the batch's; the file is complete."""
        batch_id = await queued(batches, 50)
        await worker.serve_all(good_but("row-7"))
        path = tmp_path / "out.jsonl"
        with open_output(path, batch_id) as out:
            summary = await collect_to_file(batches, batch_id, out)
            assert out.complete
        record = await batches.show(batch_id)
        assert Collected(batch_id, "completed", 49, 1, 147, 98, record.seconds, 50, True) == summary
        assert rows(1, 50) == written(path)
        assert {collector_of(path): (await cursors(batches, batch_id))[-1]} == record.collectors

    async def test_results_are_in_the_file_while_the_batch_runs(
        self, batches: Batches, worker: LineWorker, tmp_path: Path
    ) -> None:
        """About a second after they came; progress is told with every sync."""
        batch_id = await queued(batches, 10)
        await worker.serve(4)
        path = tmp_path / "out.jsonl"
        synced = asyncio.Event()
        seen: list[BatchRecord] = []

        def on_progress(record: BatchRecord) -> None:
            seen.append(record)
            synced.set()

        with open_output(path, batch_id) as out:
            task = asyncio.create_task(collect_to_file(batches, batch_id, out, on_progress=on_progress))
            await synced.wait()
            assert rows(1, 4) == written(path)
            assert (4, 10) == (seen[0].completed, seen[0].lines)
            await worker.serve_all()
            await task
        assert rows(1, 10) == written(path)

    @pytest.mark.parametrize(("which", "expected"), [(Which.OK, ["row-1", "row-3"]), (Which.FAILED, ["row-2"])])
    async def test_a_file_of_some_results_is_no_collector(
        self, batches: Batches, worker: LineWorker, tmp_path: Path, which: Which, expected: list[str]
    ) -> None:
        """What it leaves out must not be trimmed because of it (G16)."""
        batch_id = await queued(batches, 3)
        await worker.serve_all(good_but("row-2"))
        path = tmp_path / "out.jsonl"
        with open_output(path, batch_id) as out:
            summary = await collect_to_file(batches, batch_id, out, which=which)
        assert (2, 1, len(expected)) == (summary.ok, summary.failed, summary.written)
        assert expected == written(path)
        assert {} == (await batches.show(batch_id)).collectors

    async def test_what_is_there_is_written_and_later_the_rest(
        self, batches: Batches, worker: LineWorker, tmp_path: Path
    ) -> None:
        """Without `follow` the file is not complete; the same command goes on."""
        batch_id = await queued(batches, 10)
        await worker.serve(4)
        path = tmp_path / "out.jsonl"
        with open_output(path, batch_id) as out:
            summary = await collect_to_file(batches, batch_id, out, follow=False)
            assert (False, False, 4) == (out.complete, summary.complete, summary.written)
        assert rows(1, 4) == written(path)
        await worker.serve_all()
        with open_output(path, batch_id) as out:
            summary = await collect_to_file(batches, batch_id, out, follow=False)
        assert (10, 6, True) == (summary.ok, summary.written, summary.complete)
        assert rows(1, 10) == written(path)

    async def test_a_complete_file_is_told_of_without_reading_again(
        self, batches: Batches, worker: LineWorker, tmp_path: Path
    ) -> None:
        """Also when the batch is gone from Redis by now."""
        batch_id = await queued(batches, 3)
        await worker.serve_all(good_but("row-2"))
        path = tmp_path / "out.jsonl"
        for expected in (3, 0):
            with open_output(path, batch_id) as out:
                assert expected == (await collect_to_file(batches, batch_id, out)).written
        await batches.delete(batch_id)
        with open_output(path, batch_id) as out:
            summary = await collect_to_file(batches, batch_id, out)
        assert (2, 1, 0, True) == (summary.ok, summary.failed, summary.written, summary.complete)

    async def test_stdout_is_a_collector_only_where_it_is_said_and_while_it_lasts(
        self, batches: Batches, worker: LineWorker
    ) -> None:
        """To look at results does not take them away."""
        batch_id = await queued(batches, 3)
        await worker.serve(1)
        for collector, expected in ((None, {}), (collector_of_stream(), {collector_of_stream()})):
            seen: asyncio.Queue[BatchRecord] = asyncio.Queue()
            stdout = io.BytesIO()
            with open_output(None, batch_id, stdout=stdout) as out:
                task = asyncio.create_task(
                    collect_to_file(batches, batch_id, out, collector=collector, on_progress=seen.put_nowait)
                )
                record = await seen.get()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert set(expected) == set(record.collectors or {})
            assert {} == (await batches.show(batch_id)).collectors
            assert [b"row-1"] == [orjson.loads(line)["custom_id"].encode() for line in stdout.getvalue().splitlines()]
        await worker.serve_all()

    async def test_an_unknown_batch_is_an_error_and_not_an_empty_file(self, batches: Batches, tmp_path: Path) -> None:
        """It is said at once."""
        with open_output(tmp_path / "out.jsonl", "batch_9") as out, pytest.raises(NotFoundError):
            await collect_to_file(batches, "batch_9", out)

    async def test_ctrl_c_leaves_what_was_read_in_the_file(
        self, batches: Batches, worker: LineWorker, tmp_path: Path
    ) -> None:
        """And the next run goes on behind it (F-031)."""
        batch_id = await queued(batches, 10)
        await worker.serve(4)
        path = tmp_path / "out.jsonl"
        with open_output(path, batch_id) as out:
            taken = asyncio.Event()
            task = asyncio.create_task(collect_to_file(batches, batch_id, Telling(out, taken)))
            await taken.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert rows(1, 4) == written(path)
        await worker.serve_all()
        with open_output(path, batch_id) as out:
            assert 6 == (await collect_to_file(batches, batch_id, out)).written
        assert rows(1, 10) == written(path)

    async def test_a_full_disk_ends_the_collection_and_keeps_the_rest_in_redis(
        self, queue: Queue, batches: Batches, worker: LineWorker
    ) -> None:
        """Nothing is trimmed that was not written; the same command goes on (G16)."""
        await hold_little(queue)
        batch_id = await queued(batches, 10)
        await worker.serve(10)
        with pytest.raises(LLMQError, match="disk is full"):
            await collect_to_file(batches, batch_id, FullDisk(), collector="host:/full")
        assert rows(1, 10) == await read(batches, batch_id)


class TestLostWrites:
    """Redis came back without its last second: the output is right all the same."""

    async def test_a_line_that_was_answered_twice_is_written_once(
        self, queue: Queue, batches: Batches, worker: LineWorker, tmp_path: Path
    ) -> None:
        """Its first result was in the file before Redis forgot it and had it done again (F-072)."""
        batch_id = await queued(batches, 6)
        await worker.serve(3)
        path = tmp_path / "out.jsonl"
        with open_output(path, batch_id) as out:
            await collect_to_file(batches, batch_id, out, follow=False)
        again = ResultRecord(2, "row-2", "completed", 200, "req-again", b'"again"')
        await cast(Any, queue.redis).xadd(queue.keys.results(batch_id), again.to_fields())
        await worker.serve_all()
        with open_output(path, batch_id) as out:
            assert 3 == (await collect_to_file(batches, batch_id, out)).written
        assert rows(1, 6) == written(path)

    async def test_results_that_came_back_with_earlier_ids_are_found(
        self, queue: Queue, batches: Batches, worker: LineWorker, tmp_path: Path
    ) -> None:
        """A failover to a host whose clock is behind: the cursor is past results that were never read."""
        batch_id = await queued(batches, 6)
        await worker.serve(3)
        path = tmp_path / "out.jsonl"
        with open_output(path, batch_id) as out:
            await collect_to_file(batches, batch_id, out, follow=False)
        await worker.serve_all()
        await renumber(queue, batch_id)
        with open_output(path, batch_id) as out:
            summary = await collect_to_file(batches, batch_id, out)
        assert (3, True) == (summary.written, summary.complete)
        assert rows(1, 6) == written(path)

    async def test_results_that_are_gone_are_an_error_and_the_file_is_not_complete(
        self, queue: Queue, batches: Batches, worker: LineWorker, tmp_path: Path
    ) -> None:
        """A file that lacks lines never looks whole (G16)."""
        batch_id = await queued(batches, 6)
        await worker.serve_all()
        await cast(Any, queue.redis).xdel(queue.keys.results(batch_id), (await cursors(batches, batch_id))[2])
        with open_output(tmp_path / "out.jsonl", batch_id) as out:
            with pytest.raises(LLMQError, match="1 of its results are not in Redis any more"):
                await collect_to_file(batches, batch_id, out)
            assert not out.complete


async def renumber(queue: Queue, batch_id: str) -> None:
    """Give all results of a batch ids from long ago."""
    redis, key = cast(Any, queue.redis), queue.keys.results(batch_id)
    entries = await redis.xrange(key)
    await redis.delete(key)
    for number, (_, fields) in enumerate(entries, 1):
        await redis.xadd(key, fields, id=f"1-{number}")
    await redis.expire(key, 60)


class Killed(BaseException):
    """Stands for SIGKILL: nothing of llmq catches it, and no more is written."""


#: The steps of a sync, in their order: what is done, and where.
STEPS = ("pwrite", "fsync", "write_sidecar", "collect")


def kill_at(monkeypatch: pytest.MonkeyPatch, step: str, *, after: bool, count: int) -> None:
    """Let the process die before (or after) a step, when it comes for the `count`-th time."""
    owner: Any = {"pwrite": os, "fsync": os, "write_sidecar": result_file, "collect": Batches}[step]
    name = "collected" if step == "collect" else step
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def dying(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count and not after:
            raise Killed
        done = original(*args, **options)
        if calls == count and step != "collect":
            raise Killed
        return done

    async def dying_async(*args: Any, **options: Any) -> Any:
        done = await dying(*args, **options)
        if calls == count:
            raise Killed
        return done

    monkeypatch.setattr(owner, name, dying_async if step == "collect" else dying)


class TestCrashes:
    """The collector dies between any two of its steps; the next one goes on."""

    @pytest.mark.parametrize("count", [2, 3])
    @pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
    @pytest.mark.parametrize("step", STEPS)
    async def test_no_line_is_lost_or_doubled_wherever_the_collector_dies(
        self,
        queue: Queue,
        batches: Batches,
        worker: LineWorker,
        tmp_path: Path,
        step: str,
        after: bool,
        count: int,
    ) -> None:
        """Lines, sync, sidecar, then Redis: under a pressure that trims at once what Redis was told (G16)."""
        await hold_little(queue)
        batch_id = await queued(batches, 100)
        path = tmp_path / "out.jsonl"
        await batches.collected(batch_id, collector_of(path), "0-0")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collecting, "SYNC_S", 0.0)
            patch.setattr(collecting, "SYNC_LINES", 1)
            kill_at(patch, step, after=after, count=count)
            with pytest.raises(Killed):
                await self._run(batches, worker, batch_id, path)
        await self._run(batches, worker, batch_id, path)
        assert sorted(rows(1, 100)) == sorted(written(path))

    async def _run(self, batches: Batches, worker: LineWorker, batch_id: str, path: Path) -> None:
        """Serve and collect until the batch is done, or the collector has died."""
        with open_output(path, batch_id) as out:
            complete = False
            while not complete:
                await worker.serve(10, bad)
                complete = (await collect_to_file(batches, batch_id, out, follow=False)).complete


class Telling:
    """A result file that says when its fourth line was taken."""

    complete = False

    def __init__(self, out: Any, taken: asyncio.Event) -> None:
        assert isinstance(out, ResultFile)
        self._out = out
        self._taken = taken
        self._count = 0

    @property
    def cursor(self) -> str:
        return self._out.cursor

    def append(self, line: bytes) -> None:
        self._out.append(line)
        self._count += 1
        if self._count == 4:
            self._taken.set()

    def sync(self, cursor: str) -> int:
        return self._out.sync(cursor)

    def finish(self, cursor: str) -> None:
        self._out.finish(cursor)

    def close(self) -> None:
        self._out.close()

    def __enter__(self) -> Telling:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FullDisk:
    """An output on a disk that is full."""

    cursor = ""
    complete = False

    def append(self, line: bytes) -> None:
        """Take lines until they are to be written."""

    def sync(self, cursor: str) -> int:
        raise LLMQError("the disk is full")

    def finish(self, cursor: str) -> None:
        raise LLMQError("the disk is full")

    def close(self) -> None:
        """Nothing to let go of."""

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
