"""The client on a real server, against a worker that the test moves step by step."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from llmq import AsyncClient, AsyncJobHandle, CancelResult, JobState
from llmq.scheduler import client as scheduler_client
from llmq.scheduler import lookout, scripts
from llmq.scheduler.batch_record import BatchStatus
from llmq.scheduler.batches import Batches
from llmq.scheduler.connection import connect
from llmq.scheduler.embedded import stop_server
from llmq.scheduler.errors import (
    EncodingError,
    JobCancelled,
    JobEnded,
    JobExpired,
    JobFailed,
    JobInterrupted,
    JobLost,
    LLMQError,
    NotFoundError,
    RedisUnavailable,
    SettingsError,
    UsageError,
)
from llmq.scheduler.feeding import FeedProgress, FeedState
from llmq.scheduler.lease import Answered, Ended, ErrorCode, HandedBack, Reason, Retry
from tests.chat_worker import HELLO, ChatWorker, chat
from tests.conftest import OwnServer
from tests.line_worker import LineWorker, good_but
from tests.redis.serving import until
from tests.reply_eater import ReplyEater

BODY = {"messages": [{"role": "user", "content": "hello"}]}

pytestmark = pytest.mark.leaves("llmq:{default}:*")


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[AsyncClient]:
    """A client of an empty server."""
    async with AsyncClient(redis_url) as client:
        yield client


@pytest.fixture
def worker(redis: Redis) -> ChatWorker:
    """A worker of the same server."""
    return ChatWorker(redis)


async def texts(job: AsyncJobHandle) -> list[str]:
    """Return the pieces of a whole stream."""
    return [delta.text async for delta in job.stream()]


class TestResult:
    """Waiting for an answer."""

    async def test_an_answer_comes_back_whole(self, client: AsyncClient, worker: ChatWorker) -> None:
        """Body, text, usage and status; and again, as often as it is asked for."""
        async with worker.serving():
            job = await client.submit(BODY, tenant="ann")
            result = await job.result(timeout=5)
        assert ("Hello world", 200, "req-1") == (result.text, result.status_code, result.request_id)
        assert (3, 2, 5) == (result.usage.prompt_tokens, result.usage.completion_tokens, result.usage.total)
        assert json.loads(chat("Hello world")) == result.body
        assert result == await job.result(timeout=0)
        assert JobState.COMPLETED is (await job.status()).state

    @pytest.mark.parametrize(
        ("outcome", "error", "said"),
        [
            (Ended(ErrorCode.CANCELLED, "m"), JobCancelled, "was cancelled"),
            (Ended(ErrorCode.TIMEOUT, "m"), JobExpired, "submit(timeout=...)"),
            (Ended(ErrorCode.INTERRUPTED, "the worker stopped"), JobInterrupted, "the worker stopped"),
            (Ended(ErrorCode.LOST, "m"), JobFailed, "lost"),
            (Ended(ErrorCode.ENGINE_ERROR, "5 attempts failed"), JobFailed, "5 attempts failed"),
            (Answered(400, b'{"error": {"message": "bad\\nfield"}}', "r"), JobFailed, "HTTP 400: bad field"),
            (Answered(500, b"<html>", "r"), JobFailed, "HTTP 500: <html>"),
        ],
    )
    async def test_every_end_without_an_answer_is_an_error_of_its_own(
        self,
        client: AsyncClient,
        worker: ChatWorker,
        outcome: Answered | Ended,
        error: type[JobEnded],
        said: str,
    ) -> None:
        """Failed, cancelled, expired, interrupted: told apart (G13, F-130)."""
        job = await client.submit(BODY)
        await worker.end(await worker.claim_one(), outcome=outcome)
        for ask in (job.result(timeout=5), texts(job)):
            with pytest.raises(error, match=r".") as ended:
                await ask
            assert said in str(ended.value)
            assert job.id == ended.value.job_id

    async def test_a_refusal_carries_status_and_body(self, client: AsyncClient, worker: ChatWorker) -> None:
        """As the engine gave them."""
        job = await client.submit(BODY)
        await worker.end(await worker.claim_one(), outcome=Answered(422, b'{"detail": "no such field"}', "r"))
        with pytest.raises(JobFailed) as failed:
            await job.result(timeout=5)
        assert (422, {"detail": "no such field"}) == (failed.value.status_code, failed.value.body)

    async def test_a_timeout_leaves_the_job_alone(self, client: AsyncClient, worker: ChatWorker) -> None:
        """It goes on, and its result comes later."""
        job = await client.submit(BODY)
        lease = await worker.claim_one()
        with pytest.raises(TimeoutError, match="it goes on"):
            await job.result(timeout=0.05)
        assert JobState.RUNNING is (await job.status()).state
        await worker.end(lease)
        assert "Hello world" == (await job.result(timeout=5)).text

    async def test_a_ring_that_was_lost_costs_seconds_and_no_answer(
        self, client: AsyncClient, worker: ChatWorker
    ) -> None:
        """The record is the truth: it is read while nothing rings (F-120)."""
        job = await client.submit(BODY)
        lease = await worker.claim_one()
        waiting = asyncio.create_task(job.result(timeout=20))
        await asyncio.sleep(0)
        await worker.end(replace(lease, reply_to="somebody else"), outcome=Answered(200, chat("late"), "r"))
        assert "late" == (await waiting).text

    async def test_a_job_that_nobody_takes_expires(self, client: AsyncClient) -> None:
        """No worker lives; the client ends it itself (G13)."""
        job = await client.submit(BODY, timeout=0.2)
        with pytest.raises(JobExpired, match="no worker was free"):
            await job.result(timeout=10)
        assert JobState.EXPIRED is (await job.status()).state

    async def test_the_time_in_the_queue_may_be_the_queues_own(self, client: AsyncClient) -> None:
        """The client does not know it before it looks (G13)."""
        await (await client.queue()).set("queue_ttl", "300ms")
        job = await client.submit(BODY)
        with pytest.raises(JobExpired):
            await job.result(timeout=10)

    async def test_a_job_that_redis_forgot_is_lost(self, client: AsyncClient, worker: ChatWorker, redis: Redis) -> None:
        """FLUSHALL while somebody waits: an error, not a wait for ever (G12, G13)."""
        job = await client.submit(BODY)
        waiting = asyncio.create_task(job.result())
        await worker.claim_one()
        await redis.flushall()
        with pytest.raises(JobLost, match="submit it again"):
            await waiting
        with pytest.raises(NotFoundError):
            await job.status()

    async def test_a_job_without_an_entry_is_lost_even_if_it_may_wait_for_ever(
        self, client: AsyncClient, redis: Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Somebody deleted its lane: nobody can run it, and who waits learns it (G13, F-068); the record ends (G11)."""
        monkeypatch.setattr(lookout, "LOOK_AGAIN_S", 0.1)
        monkeypatch.setattr(lookout, "LOOKS_UNTIL_SOUGHT", 2)
        job, other = await client.submit(BODY, cls="batch"), await client.submit(BODY, cls="batch", tenant="other")
        keys = (await client.queue()).keys
        waits = asyncio.create_task(other.result(timeout=3))
        await redis.delete(keys.lane("b:default"))
        with pytest.raises(JobLost):
            await job.result(timeout=10)
        assert (JobState.LOST, JobState.WAITING) == ((await job.status()).state, (await other.status()).state)
        assert 0 < await redis.pttl(keys.job(job.id))
        with pytest.raises(TimeoutError):
            await waits

    async def test_a_client_closes_at_once_whenever(self, redis_url: str) -> None:
        """A cancel that redis-py forgets is given again, in whatever moment it came."""
        for turns in range(30):
            client = AsyncClient(redis_url)
            await client.submit(BODY)
            for _ in range(turns):
                await asyncio.sleep(0)
            async with asyncio.timeout(1):
                await client.aclose()

    async def test_waits_end_with_the_client(self, redis_url: str) -> None:
        """Closing it leaves nobody waiting."""
        client = AsyncClient(redis_url)
        job = await client.submit(BODY)
        waiting = asyncio.create_task(job.result())
        await asyncio.sleep(0.05)
        await client.aclose()
        with pytest.raises(LLMQError, match="was closed"):
            await waiting
        with pytest.raises(UsageError, match="closed"):
            await client.submit(BODY)


class TestStream:
    """Deltas."""

    async def test_pieces_come_as_they_are_made(self, client: AsyncClient, worker: ChatWorker) -> None:
        """Each as soon as it was sent, with the engine's chunk."""
        job = await client.submit(BODY)
        stream = job.stream()
        lease = await worker.claim_one()
        await worker.begin(lease, "Hel")
        first = await anext(stream)
        assert ("Hel", "Hel") == (first.text, first.chunk["choices"][0]["delta"]["content"])
        await worker.go_on(lease, 1, "lo", " world")
        assert ["lo", " world"] == [(await anext(stream)).text, (await anext(stream)).text]
        await worker.end(lease)
        assert [] == [delta async for delta in stream]
        assert "Hello world" == (await job.result(timeout=5)).text

    async def test_what_came_before_the_stream_was_asked_for_is_kept(
        self, client: AsyncClient, worker: ChatWorker
    ) -> None:
        """Also where the job has ended by then."""
        job = await client.submit(BODY)
        await worker.answer()
        await asyncio.sleep(0.05)
        assert list(HELLO) == await texts(job)
        assert [] == await texts(job)

    @pytest.mark.parametrize("key", [None, "order-9"])
    async def test_an_end_that_is_seen_before_the_last_pieces_waits_for_them(
        self, client: AsyncClient, worker: ChatWorker, key: str | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A look at the record may overtake the inbox: after a break, and after a long silence."""
        monkeypatch.setattr(lookout, "CATCH_UP_S", 60.0)  # the pieces are sent after the look, however late
        job = await client.submit(BODY, key=key)
        lease = await worker.claim_one()
        await worker.begin(lease, "Hel")
        stream = job.stream()
        assert "Hel" == (await anext(stream)).text
        await worker.end(replace(lease, reply_to="somebody else"))
        job._listener._lookout.look_at_all()
        following = asyncio.create_task(anext(stream))
        await until(lambda: job._watch.seen_ended or following.done())
        await worker.go_on(lease, 1, "lo", " world")
        assert ["lo", " world"] == [(await following).text, (await anext(stream)).text]
        job._listener._lookout.look_at_all()
        assert [] == [delta.text async for delta in stream]

    async def test_leaving_early_changes_nothing(self, client: AsyncClient, worker: ChatWorker) -> None:
        """The job goes on, the result comes, and a second stream goes on where the first was left."""
        job = await client.submit(BODY)
        lease = await worker.claim_one()
        await worker.begin(lease, "Hel")
        stream = job.stream()
        assert "Hel" == (await anext(stream)).text
        await stream.aclose()
        assert JobState.RUNNING is (await job.status()).state
        await worker.go_on(lease, 1, "lo", " world")
        await worker.end(lease)
        assert ["lo", " world"] == await texts(job)
        assert "Hello world" == (await job.result(timeout=5)).text

    async def test_a_gap_is_closed_at_the_end(self, client: AsyncClient, worker: ChatWorker) -> None:
        """A piece was trimmed from the inbox: what follows it waits for the end, and comes in one."""
        job = await client.submit(BODY)
        lease = await worker.claim_one()
        await worker.begin(lease, "Hel")
        await worker.go_on(lease, 2, " wor", "ld")
        await worker.end(lease)
        assert ["Hel", "lo world"] == await texts(job)

    async def test_the_end_of_a_stream_may_be_missing(self, client: AsyncClient, worker: ChatWorker) -> None:
        """The last pieces never came; their text does."""
        job = await client.submit(BODY)
        lease = await worker.claim_one()
        await worker.begin(lease, "Hel")
        await worker.end(lease)
        assert ["Hel", "lo world"] == await texts(job)

    async def test_an_answer_without_deltas_comes_in_one_piece(self, client: AsyncClient, worker: ChatWorker) -> None:
        """Of an engine that does not stream, or after `result()`: a chunk that an engine could have sent."""
        async with worker.serving():
            job = await client.submit(BODY)
            (delta,) = [delta async for delta in job.stream()]
        assert "Hello world" == delta.text
        assert ("chat.completion.chunk", "stop") == (
            delta.chunk["object"],
            delta.chunk["choices"][0]["finish_reason"],
        )
        assert {"role": "assistant", "content": "Hello world"} == delta.chunk["choices"][0]["delta"]

    async def test_only_the_newest_delivery_counts(self, client: AsyncClient, worker: ChatWorker) -> None:
        """A worker lost its lease before its deltas were read; the next one's answer is the one that is shown."""
        job = await client.submit(BODY, cls="batch")
        old = await worker.claim_one()
        await worker.go_on(old, 0, "No", "pe")
        await scripts.run(
            worker.redis,
            scripts.hand_back(worker.keys, worker.name, [(old.fence, HandedBack(Reason.SHUTDOWN))]),
        )
        new = await worker.claim_one()
        await worker.go_on(new, 0, "Hello")
        await worker.go_on(old, 2, "!")
        await worker.go_on(new, 1, " world")
        await worker.end(new)
        assert ["Hello", " world"] == await texts(job)

    async def test_an_answer_that_was_begun_again_is_not_mixed(self, client: AsyncClient, worker: ChatWorker) -> None:
        """What was shown cannot be taken back: the stream says so, and the result is whole."""
        job = await client.submit(BODY, cls="batch")
        old = await worker.claim_one()
        await worker.go_on(old, 0, "Nope")
        stream = job.stream()
        assert "Nope" == (await anext(stream)).text
        await scripts.run(worker.redis, scripts.retry(worker.keys, worker.name, old.fence, Retry(0.0, "x")))
        new = await worker.claim_one()
        await worker.go_on(new, 0, "Hello")
        await worker.end(new)
        with pytest.raises(JobInterrupted, match=r"its whole answer is in result\(\)"):
            await anext(stream)
        assert "Hello world" == (await job.result(timeout=5)).text


class TestSubmit:
    """Handing a job in."""

    async def test_a_lost_reply_makes_no_second_job(self, redis_url: str, redis: Redis, worker: ChatWorker) -> None:
        """The answer to it comes all the same (F-084)."""
        async with ReplyEater(redis_url) as eater, AsyncClient(eater.url) as client, worker.serving():
            await (await client.submit(BODY)).result(timeout=5)
            eater.swallow_reply_to("EVALSHA", cut=True)
            job = await client.submit(BODY)
            assert "Hello world" == (await job.result(timeout=10)).text
            assert 1 == eater.swallowed
        assert 2 == len(await redis.keys("llmq:{default}:job:*"))

    async def test_the_same_key_is_the_same_job(self, client: AsyncClient, redis_url: str, worker: ChatWorker) -> None:
        """Also for another client, whose inbox does not ring for it."""
        one = await client.submit(BODY, key="order-7")
        async with AsyncClient(redis_url) as other:
            two = await other.submit(BODY, key="order-7")
            assert one.id == two.id
            await worker.end(await worker.claim_one())
            assert "Hello world" == (await two.result(timeout=5)).text
            assert ["Hello world"] == await texts(two)
        assert "Hello world" == (await one.result(timeout=5)).text

    async def test_a_job_of_another_client_can_be_waited_for_for_days(
        self, client: AsyncClient, redis_url: str, worker: ChatWorker
    ) -> None:
        """G13: after the 1,751st look, an hour on, no other wait of the client ends for it."""
        submitted = await client.submit(BODY)
        async with AsyncClient(redis_url) as other:
            job = await other.job(submitted.id)
            job._watch.looks = 10**6
            waiting = asyncio.create_task(job.result(timeout=10))
            await worker.end(await worker.claim_one())
            assert "Hello world" == (await waiting).text

    async def test_a_job_can_be_taken_up_again_by_its_id(
        self, client: AsyncClient, redis_url: str, worker: ChatWorker
    ) -> None:
        """By another process, after a restart, after its end."""
        submitted = await client.submit(BODY)
        async with AsyncClient(redis_url) as other:
            job = await other.job(submitted.id)
            waiting = asyncio.create_task(job.result(timeout=5))
            await worker.end(await worker.claim_one())
            assert "Hello world" == (await waiting).text
            assert "Hello world" == (await (await other.job(submitted.id)).result(timeout=5)).text
            with pytest.raises(NotFoundError):
                await other.job("nobody")

    async def test_cancelling_says_what_it_found(self, client: AsyncClient, worker: ChatWorker) -> None:
        """A job that waits ends at once; the worker of one that runs is told; one that has ended stays (F-124)."""
        waiting = await client.submit(BODY)
        assert CancelResult.CANCELLED is await waiting.cancel()
        with pytest.raises(JobCancelled):
            await waiting.result(timeout=5)
        running = await client.submit(BODY)
        lease = await worker.claim_one()
        assert CancelResult.SIGNALLED is await running.cancel()
        await worker.end(lease, outcome=Ended(ErrorCode.CANCELLED, "the job was cancelled while it ran"))
        with pytest.raises(JobCancelled):
            await running.result(timeout=5)
        assert CancelResult.ENDED is await running.cancel()

    @pytest.mark.parametrize(
        ("arguments", "error", "said"),
        [
            ({"cls": "urgent"}, UsageError, "interactive or batch"),
            ({"url": "/v1/images"}, UsageError, "/v1/chat/completions"),
            ({"tenant": "a|b"}, UsageError, "tenant"),
            ({"queue": "a b"}, UsageError, "queue"),
            ({"body": {"messages": [float("nan")]}}, EncodingError, "messages[0]"),
            ({"body": ["x"]}, UsageError, "an object"),
            ({"body": {"messages": ["x" * 16 * 2**20]}}, UsageError, "at most 16MiB"),
            ({"key": ""}, UsageError, "a key"),
            ({"timeout": -1}, UsageError, "a time in the queue"),
        ],
    )
    async def test_what_cannot_be_used_is_refused(
        self, client: AsyncClient, redis: Redis, arguments: dict[str, Any], error: type[Exception], said: str
    ) -> None:
        """Before anything is queued; the message says what was expected (F-096)."""
        with pytest.raises(error, match=r".") as refused:
            await client.submit(**({"body": BODY} | arguments))
        assert said in str(refused.value)
        assert not await redis.keys("*job*")


class TestConnections:
    """What a client costs, and what it does while Redis is away."""

    async def test_10_000_waits_cost_no_more_connections_than_one(
        self, system_redis_url: str, client: AsyncClient, redis: Redis, worker: ChatWorker
    ) -> None:
        """One ear and a small pool, however many jobs are waited for (F-086)."""

        async def connections() -> int:
            return sum(found["name"].startswith("llmq-") for found in await redis.client_list())

        jobs = await asyncio.gather(*(client.submit(BODY, timeout=0) for _ in range(10_000)))
        most = await connections()
        waits = asyncio.gather(*(job.result(timeout=60) for job in jobs))
        await asyncio.sleep(0.1)
        assert await connections() == most <= 33
        async with worker.serving():
            results = await waits
        assert 10_000 == len(results)
        assert await connections() == most

    async def test_a_wait_goes_on_while_redis_is_away(self, own_server: OwnServer) -> None:
        """Submit says at once that it is away; a wait outlives it, and so does the stream (G13)."""
        server = own_server("--appendonly", "yes", "--appendfsync", "always")
        async with AsyncClient(server.url) as client:
            job = await client.submit(BODY)
            waiting = asyncio.create_task(job.result(timeout=30))
            server.kill()
            with pytest.raises(RedisUnavailable, match="cannot be reached"):
                await client.submit(BODY)
            with pytest.raises(RedisUnavailable):
                await job.status()
            with pytest.raises(TimeoutError):
                await job.result(timeout=0.2)
            server.start()
            redis = connect(server.url)
            await ChatWorker(redis).answer()
            await redis.aclose()
            assert "Hello world" == (await waiting).text
            assert "Hello world" == "".join(await texts(job))

    async def test_a_redis_that_came_back_empty_is_listened_to(
        self, client: AsyncClient, redis: Redis, worker: ChatWorker
    ) -> None:
        """The inbox begins anew; deltas of new jobs come (G12)."""
        async with worker.serving():
            await (await client.submit(BODY)).result(timeout=5)
        await redis.flushall()
        await redis.script_flush()
        job = await client.submit(BODY)
        answering = asyncio.create_task(worker.answer())
        assert list(HELLO) == await texts(job)
        await answering

    async def test_a_redis_that_counts_from_an_earlier_time_is_listened_to(self, own_server: OwnServer) -> None:
        """After a failover the clock may be behind: the pieces of an answer are heard all the same."""
        server = own_server("--appendonly", "no")
        async with AsyncClient(server.url) as client:
            job = await client.submit(BODY)
            redis = connect(server.url)
            await ChatWorker(redis).answer()
            await job.result(timeout=5)
            (inbox,) = await redis.keys("*:inbox:*")
            await redis.xadd(inbox, {"t": "e", "j": "of the future"}, id="9999999999999-0")
            server.restart()
            stream = asyncio.create_task(texts(await client.submit(BODY)))
            await ChatWorker(redis).answer()
            await redis.aclose()
            assert list(HELLO) == await stream

    async def test_a_primary_that_was_a_replica_for_a_moment_is_listened_to(self, own_server: OwnServer) -> None:
        """It refuses the read that blocks (UNBLOCKED) and closes; the one connection of the reader is used again."""
        server = own_server()
        redis: Any = connect(server.url)
        async with AsyncClient(server.url) as client:
            job = await client.submit(BODY)
            await ChatWorker(redis).answer()
            await job.result(timeout=5)
            await asyncio.sleep(0.1)  # it reads again
            await redis.execute_command("REPLICAOF", "127.0.0.1", "1")
            await redis.execute_command("REPLICAOF", "NO", "ONE")
            stream = asyncio.create_task(texts(await client.submit(BODY)))
            await ChatWorker(redis).answer()
            assert list(HELLO) == await stream
        await redis.aclose()

    @pytest.mark.leaves("llmq:{queue-*}:*")
    async def test_many_queues_leave_connections_for_other_commands(
        self, redis_url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each queue that is waited in keeps none of its own: they would be all that the client may have."""
        monkeypatch.setattr(scheduler_client, "MAX_CONNECTIONS", 8)
        async with AsyncClient(redis_url) as client:
            names = [f"queue-{number}" for number in range(12)]
            jobs = [await client.submit(BODY, queue=name) for name in names]
            waits = [asyncio.create_task(job.result()) for job in jobs]
            async with asyncio.timeout(10):
                await asyncio.sleep(2 * lookout.LOOK_AGAIN_S)
                assert names == [(await client.status(queue=name)).queue for name in names]
        with pytest.raises(LLMQError, match="was closed"):
            await asyncio.gather(*waits)

    async def test_without_a_url_it_is_the_embedded_server(self) -> None:
        """Started by the first call, shared by all clients of this user."""
        home = Path(os.environ["LLMQ_HOME"])
        try:
            async with AsyncClient() as one, AsyncClient() as two:
                job = await one.submit(BODY)
                assert JobState.WAITING is (await (await two.job(job.id)).status()).state
                assert "embedded" in repr(one)
        finally:
            await asyncio.to_thread(stop_server, home)

    async def test_a_url_with_a_password_does_not_show_it(self) -> None:
        """Neither in a repr nor in an error."""
        async with AsyncClient("redis://ann:secret@127.0.0.1:1/0") as client:
            assert "secret" not in repr(client)
            with pytest.raises(RedisUnavailable, match=r"127\.0\.0\.1:1") as away:
                await client.submit(BODY)
            assert "secret" not in str(away.value)

    async def test_wrong_settings_are_said_when_the_client_is_made(self) -> None:
        """Not at the first call, which may be hours later."""
        with pytest.raises(SettingsError, match="queue"):
            AsyncClient("redis://127.0.0.1:1", queue="a b")


class TestBatch:
    """Batches by the client; what they can do is tested in test_batches.py."""

    async def test_a_file_goes_in_and_its_results_come_out(
        self, client: AsyncClient, redis: Redis, tmp_path: Path
    ) -> None:
        """Good lines and bad ones, each once, as they end."""
        file = tmp_path / "prompts.jsonl"
        file.write_text("".join(f'{{"custom_id": "k{n}", "params": {json.dumps(BODY)}}}\n' for n in range(3)))
        batch = await client.submit_batch(file, tenant="eval")
        assert (3, "eval") == ((await batch.status()).total, (await batch.status()).tenant)
        worker = LineWorker(await client.queue())
        await worker.serve_all(good_but("k1"))
        results = {line.custom_id: line async for line in batch.results()}
        assert {"k0": True, "k1": False, "k2": True} == {key: line.ok for key, line in results.items()}
        assert ({"echo": "k0"}, 400) == (results["k0"].body, results["k1"].status_code)
        assert (await batch.wait(timeout=5)).ended
        assert batch.id == (await client.batch(batch.id)).id

    async def test_a_submit_that_is_cancelled_leaves_no_open_batch(self, client: AsyncClient, redis: Redis) -> None:
        """Nobody has its id: it would wait for its other lines for ever (G11)."""
        queue = await client.queue()
        await queue.set("cap_batch", "2")
        batch = await client.submit_batch(["a"])
        waits = asyncio.Event()

        def note(progress: FeedProgress) -> None:
            if progress.state is FeedState.WAITING_FOR_ROOM:
                waits.set()

        submitting = asyncio.create_task(client.submit_batch(["b", "c", "d"], on_progress=note))
        await waits.wait()
        submitting.cancel()
        await asyncio.wait([submitting])
        assert submitting.cancelled()
        states = {record.id: record.status for record in await Batches(queue).ls()}
        assert BatchStatus.IN_PROGRESS is states.pop(batch.id)
        assert [BatchStatus.CANCELLED] == list(states.values())
        assert 1 == await redis.hlen(queue.keys.lanes)

    async def test_prompts_of_a_program_are_a_file_as_any(self, client: AsyncClient) -> None:
        """Objects and texts; what cannot be stored is named by its line before anything is queued."""
        batch = await client.submit_batch([{"prompt": "a"}, "b", {"messages": BODY["messages"]}], model="m")
        assert 3 == (await batch.status()).total
        with pytest.raises(UsageError, match="line 2"):
            await client.submit_batch(["a", {"prompt": "b", "top_p": float("nan")}])
        with pytest.raises(UsageError, match="line 1: expected an object or a text, got a int"):
            await client.submit_batch([3])  # type: ignore[list-item]
        with pytest.raises(UsageError, match="line 2: prompt"):
            await client.submit_batch(["a", {"prompt": 5}])
        assert 1 == len(await redis_batches(client))

    async def test_a_second_result_of_a_line_is_not_yielded(self, client: AsyncClient, redis: Redis) -> None:
        """A failover lost what a worker had ended, so that the line ran again (G16, F-072)."""
        batch = await client.submit_batch(["a", "b"])
        queue = await client.queue()
        worker, results = LineWorker(queue), queue.keys.results(batch.id)
        await worker.serve(1)
        ((_, fields),) = cast(list[Any], await redis.xrange(results))
        await redis.xadd(results, fields)
        await worker.serve(1)
        assert ["line-1", "line-2"] == [line.custom_id async for line in batch.results()]

    async def test_a_batch_is_paused_resumed_and_cancelled(self, client: AsyncClient) -> None:
        """By its handle."""
        batch = await client.submit_batch(["a", "b"])
        assert (await batch.pause()).paused
        assert not (await batch.resume()).paused
        with pytest.raises(TimeoutError, match="it goes on"):
            await batch.wait(timeout=0.05)
        assert (await batch.cancel()).ended
        assert ["batch_cancelled"] * 2 == [line.error_code async for line in batch.results()]


async def redis_batches(client: AsyncClient) -> list[bytes]:
    """Return the ids of all batches of a client's queue."""
    queue = await client.queue()
    return cast(list[bytes], await queue.redis.zrange(queue.keys.batches, 0, -1))
