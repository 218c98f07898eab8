"""The blocking client on a real server: as the asynchronous one, and what threads, Ctrl-C and fork do to it."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from llmq import (
    AsyncBatchHandle,
    AsyncClient,
    AsyncJobHandle,
    BatchHandle,
    CancelResult,
    Client,
    JobCancelled,
    JobHandle,
    JobState,
    QueueFull,
    RedisUnavailable,
    UsageError,
)
from llmq.scheduler.connection import connect
from llmq.scheduler.tasks import end_tasks
from tests.chat_worker import HELLO, ChatWorker
from tests.reply_eater import ReplyEater
from tests.servers import client_of

BODY = {"messages": [{"role": "user", "content": "hello"}]}

pytestmark = pytest.mark.leaves("llmq:{default}:*")


class WorkerThread:
    """A worker that answers every job, in a thread, so that blocking calls can be answered."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._ended = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    def __enter__(self) -> WorkerThread:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    async def _serve(self) -> None:
        redis = connect(self._url)
        task = asyncio.create_task(self._answer(ChatWorker(redis)))
        await asyncio.to_thread(self._ended.wait)
        await end_tasks(task)
        await redis.aclose()

    async def _answer(self, worker: ChatWorker) -> None:
        while True:
            await worker.answer()


@pytest.fixture
def client(redis_url: str) -> Iterator[Client]:
    """A client of an empty server."""
    with Client(redis_url) as client:
        yield client


def threads() -> int:
    """Return how many client threads run in this process."""
    return sum(thread.name == "llmq-client" for thread in threading.enumerate())


@pytest.mark.parametrize(
    ("one", "other"), [(Client, AsyncClient), (JobHandle, AsyncJobHandle), (BatchHandle, AsyncBatchHandle)]
)
def test_both_have_the_same_methods_with_the_same_arguments(one: type, other: type) -> None:
    """Who knows one knows the other; only closing has asyncio's name, and a queue is asynchronous."""

    def methods(cls: type) -> dict[str, list[str]]:
        return {
            name.replace("aclose", "close"): list(inspect.signature(method).parameters)
            for name, method in inspect.getmembers(cls, inspect.isfunction)
            if not name.startswith("_")
        }

    assert methods(one) == {name: found for name, found in methods(other).items() if name != "queue"}


def test_an_answer_comes_back(client: Client, redis_url: str) -> None:
    """As a result, again, and as a stream."""
    with WorkerThread(redis_url):
        job = client.submit(BODY)
        assert "Hello world" == job.result(timeout=10).text == job.result().text
        assert list(HELLO) == [delta.text for delta in client.submit(BODY).stream()]
        assert JobState.COMPLETED is job.status().state
        assert "Hello world" == client.job(job.id).result(timeout=10).text


def test_errors_come_as_they_are(client: Client) -> None:
    """No wrapper around them."""
    job = client.submit(BODY)
    with pytest.raises(TimeoutError, match="it goes on"):
        job.result(timeout=0.05)
    assert CancelResult.CANCELLED is job.cancel()
    with pytest.raises(JobCancelled):
        job.result(timeout=10)
    with pytest.raises(UsageError, match="interactive or batch"):
        client.submit(BODY, cls="urgent")
    assert 0 == client.status().interactive.waiting


def test_a_stream_may_be_left(client: Client, redis_url: str) -> None:
    """The job goes on."""
    with WorkerThread(redis_url):
        job = client.submit(BODY)
        for delta in job.stream():
            assert "Hel" == delta.text
            break
        assert "Hello world" == job.result(timeout=10).text


def test_several_threads_may_use_one_client(client: Client, redis_url: str) -> None:
    """Each gets the answer to its own job."""
    with WorkerThread(redis_url), ThreadPoolExecutor(8) as pool:
        jobs = list(pool.map(lambda _: client.submit(BODY), range(40)))
        texts = list(pool.map(lambda job: job.result(timeout=20).text, jobs))
    assert 40 == len({job.id for job in jobs})
    assert ["Hello world"] * 40 == texts


def test_connections_that_the_server_has_closed_cost_no_job(client: Client, redis_url: str) -> None:
    """Several threads keep one each; after a restart of Redis, or an hour without a job, all are dead (F-081)."""
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: client.submit(BODY, cls="batch"), range(100)))
    with client_of(redis_url) as other:
        assert other.client_kill_filter(_type="normal", skipme=True) >= 3
        for _ in range(5):
            client.submit(BODY, cls="batch")
    assert 105 == client.status().batch.waiting


async def test_a_lost_reply_makes_no_second_job(redis_url: str) -> None:
    """Sent from the caller's own thread, a job whose reply is lost is sent again with the same id (F-084)."""
    async with ReplyEater(redis_url) as eater:
        client = await asyncio.to_thread(Client, eater.url)
        first = await asyncio.to_thread(client.submit, BODY)
        eater.swallow_reply_to("EVALSHA", cut=True)
        second = await asyncio.to_thread(client.submit, BODY)
        status = await asyncio.to_thread(client.status)
        await asyncio.to_thread(client.close)
    assert (1, 2) == (eater.swallowed, status.interactive.waiting)
    assert first.id != second.id


def test_a_bad_request_is_refused_before_anything_is_connected() -> None:
    """Though there is no server at all."""
    with Client("redis://127.0.0.1:1/0") as client:
        with pytest.raises(UsageError, match="endpoints"):
            client.submit(BODY, url="/v1/audio")
        with pytest.raises(RedisUnavailable):
            client.submit(BODY)


def test_ctrl_c_ends_a_wait_at_once_and_only_the_wait(client: Client) -> None:
    """KeyboardInterrupt in the middle of `result()`; the job still waits, and the client still works."""
    job = client.submit(BODY)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))

    def wait() -> None:
        timer.start()  # only in here: where it goes off before the wait begins, it would end the whole run
        job.result()

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        wait()
    assert 2 > time.monotonic() - began
    timer.join()
    assert JobState.WAITING is job.status().state


def test_a_batch_goes_in_and_its_handle_works(client: Client) -> None:
    """Submitted, paused, cancelled, and its results read."""
    batch = client.submit_batch(["a", "b"], tenant="eval")
    assert batch.pause().paused
    assert not batch.resume().paused
    assert batch.cancel().ended
    assert ["batch_cancelled"] * 2 == [line.error_code for line in batch.results()]
    assert batch.wait(timeout=10).ended
    assert batch.id == client.batch(batch.id).id
    assert 2 == batch.status().total


def test_a_full_queue_refuses_a_batch_that_may_not_wait(client: Client, redis_url: str) -> None:
    """Nothing is queued then."""

    async def make_small() -> None:
        async with AsyncClient(redis_url) as other:
            await (await other.queue()).set("cap_batch", "1")

    asyncio.run(make_small())
    with pytest.raises(QueueFull):
        client.submit_batch(["a", "b"], wait=False)
    assert 0 == client.status().batch.waiting


def test_closing_ends_the_thread(redis_url: str) -> None:
    """And what is called afterwards says so; closing again does nothing."""
    before = threads()
    client = Client(redis_url)
    job = client.submit(BODY)
    assert before + 1 == threads()
    client.close()
    client.close()
    assert before == threads()
    with pytest.raises(UsageError, match="closed"):
        client.submit(BODY)
    with pytest.raises(UsageError, match=r"client\.job\(ID\)"):
        job.result()


def test_a_client_that_nobody_holds_is_closed(redis_url: str) -> None:
    """But not while one of its handles is held."""
    before = threads()
    job = Client(redis_url).submit(BODY)
    gc.collect()
    assert JobState.WAITING is job.status().state
    del job
    gc.collect()
    assert before == threads()


def test_a_process_ends_though_its_client_was_not_closed(redis_url: str) -> None:
    """Quietly: no thread keeps it alive, and nothing is printed."""
    program = f"from llmq import Client; job = Client({redis_url!r}).submit({BODY!r}); print(len(job.id))"
    ended = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=30)
    assert (0, "24\n", "") == (ended.returncode, ended.stdout, ended.stderr)


def test_a_forked_child_has_connections_of_its_own(redis_url: str) -> None:
    """Parent and child both go on; the child ends without touching what is the parent's."""
    program = f"""
import os, sys
from llmq import Client, UsageError
client = Client({redis_url!r})
before = client.submit({BODY!r})
pid = os.fork()
if pid == 0:
    try:
        before.status()
    except UsageError:
        print(client.job(before.id).status().state, client.submit({BODY!r}).status().state, flush=True)
    sys.exit(0)
_, status = os.waitpid(pid, 0)
print(status, before.status().state, client.submit({BODY!r}).status().state)
client.close()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert (0, "waiting waiting\n0 waiting waiting\n") == (ended.returncode, ended.stdout), ended.stderr
