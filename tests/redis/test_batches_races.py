"""Everything that may be done with one batch, done at the same time: whatever the order, each line ends once.

A seed decides what is done; how the calls interleave is up to the event loop and the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from redis.asyncio import Redis

from llmq.scheduler import scripts
from llmq.scheduler.batch_record import BatchRecord, BatchStatus
from llmq.scheduler.batches import Batches
from llmq.scheduler.connection import connect
from llmq.scheduler.errors import LLMQError, UsageError
from llmq.scheduler.job import Job
from llmq.scheduler.lease import HandedBack, Lease, Outcome, Reason, Retry
from llmq.scheduler.lines import InputLine
from llmq.scheduler.queue import Queue
from tests.line_worker import LineWorker, bad, good, lost
from tests.redis.serving import until

LINES = 1200


def lines() -> list[InputLine]:
    """Return the file."""
    body = {"messages": [{"role": "user", "content": "hi"}]}
    return [InputLine(n, f"row-{n}", Job("/v1/chat/completions", body), 0) for n in range(1, LINES + 1)]


@contextlib.asynccontextmanager
async def another(url: str) -> AsyncIterator[Queue]:
    """Return the queue as another process sees it."""
    redis = connect(url)
    try:
        yield Queue(redis)
    finally:
        await redis.aclose()


async def work(url: str, name: str, chance: random.Random, over: asyncio.Event) -> None:
    """Claim lines and settle them in any way; some outcomes are sent twice, as after a late reply."""
    async with another(url) as queue:
        worker = LineWorker(queue, name)
        while not over.is_set():
            leases = await worker.claim(chance.randint(1, 40))
            settled = [(lease, outcome(lease, chance)) for lease in leases]
            for _ in range(chance.choice((1, 1, 2))):
                await scripts.run_all(queue.redis, scripts.settle(queue.keys, name, "host", settled) or [])
            await asyncio.sleep(0)


def outcome(lease: Lease, chance: random.Random) -> Outcome:
    """Let an attempt go well, or not."""
    match chance.randrange(10):
        case 0:
            return bad(lease)
        case 1:
            return lost(lease)
        case 2:
            return HandedBack(chance.choice((Reason.SHUTDOWN, Reason.PREEMPTED)))
        case 3 if lease.attempts < 3:
            return Retry(0.0, "went wrong", crashed=False)
        case _:
            return good(lease)


async def feed(url: str, batch_id: str) -> None:
    """Feed the file; a batch that was ended meanwhile takes no more, and that is well."""
    async with another(url) as queue:
        with contextlib.suppress(LLMQError):
            await Batches(queue).feed(batch_id, lines())


async def meddle(url: str, batch_id: str, chance: random.Random, over: asyncio.Event) -> None:
    """Do to the batch what people do, in any order, until it has ended; at the end it is not paused."""
    async with another(url) as queue:
        batches = Batches(queue)
        while not over.is_set():
            verb = chance.choice((batches.pause, batches.resume, batches.resume, batches.retry, batches.reap))
            with contextlib.suppress(UsageError):
                await verb(batch_id)
            await asyncio.sleep(0)
        with contextlib.suppress(UsageError):
            await batches.resume(batch_id)


async def read(url: str, batch_id: str) -> Counter[int]:
    """Follow the results to the end; return how often each line was seen."""
    async with another(url) as queue:
        return Counter([record.line async for _, record in Batches(queue).results(batch_id, follow=True)])


async def end(batches: Batches, queue: Queue, batch_id: str, how: str, done: int) -> BatchRecord:
    """Let the batch run for a while, and end it."""

    async def far_enough() -> bool:
        return (await batches.show(batch_id)).done >= done

    await until(far_enough)
    if how == "cancelled":
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(batches.cancel(batch_id))
    elif how == "expired":
        expires_at = (await batches.show(batch_id)).expires_at or 0.0
        await cast(Any, queue.redis).hset(queue.keys.config, "virtual", round(expires_at * 1000) + 1)
    return await batches.wait(batch_id)


@pytest.mark.parametrize("how", ["completed", "cancelled", "expired"])
@pytest.mark.parametrize("seed", range(2))
async def test_each_line_ends_once_whatever_is_done_at_the_same_time(
    redis: Redis, redis_url: str, seed: int, how: str
) -> None:
    """Two producers, three workers, a reader, people who pause, resume, retry and cancel (G2, G3, G11, G16)."""
    chance = random.Random(seed)
    queue, over, verbs_over = Queue(redis), asyncio.Event(), asyncio.Event()
    batches = Batches(queue)
    batch_id = (await batches.open(name="f", digest="d", window=3600 if how == "expired" else None)).id
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(work(redis_url, f"w{number}", random.Random(chance.random()), over))
        for _ in range(2):
            group.create_task(feed(redis_url, batch_id))
        reading = group.create_task(read(redis_url, batch_id))
        meddling = group.create_task(meddle(redis_url, batch_id, random.Random(chance.random()), verbs_over))
        ending = group.create_task(end(batches, queue, batch_id, how, chance.randrange(1, LINES // 2)))
        await asyncio.wait([ending], timeout=0.5)
        verbs_over.set()
        await meddling
        record, seen = await ending, await reading
        for other in await batches.ls():  # a retry of it may have begun
            await batches.wait(other.id)
        over.set()
    assert (BatchStatus(how), record.total) == (record.status, record.done)
    assert Counter(dict.fromkeys(seen, 1)) == seen
    assert record.done == len(seen)
    assert how != "completed" or LINES == len(seen)
