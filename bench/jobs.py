"""The jobs that are measured: chat requests of 1 KiB as they are stored, and ways to queue many of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, cast

from redis.asyncio import Redis

from bench.row import JOB_BYTES
from llmq.scheduler.batch_record import BatchRecord
from llmq.scheduler.batches import Batches
from llmq.scheduler.job import Job
from llmq.scheduler.lines import InputLine
from llmq.scheduler.queue import Queue

ENDPOINT = "/v1/chat/completions"

#: What a stored job takes beside its text.
_FRAME = len(Job(ENDPOINT, {"model": "bench", "messages": [{"role": "user", "content": "x" * 300}]}).encode()) - 300


def body(size: int = JOB_BYTES) -> dict[str, Any]:
    """Return the body of a job that takes `size` bytes as it is stored."""
    return {"model": "bench", "messages": [{"role": "user", "content": "x" * (size - _FRAME)}]}


def timed_body() -> dict[str, Any]:
    """Return a body that carries this moment, on the clock that all processes of this machine share."""
    return body() | {"metadata": {"sent": time.monotonic()}}


def sent_at(body: dict[str, Any]) -> float | None:
    """Return the moment that a body carries."""
    metadata = body.get("metadata")
    return metadata.get("sent") if isinstance(metadata, dict) else None


def lines(count: int) -> Iterator[InputLine]:
    """Iterate over the lines of a batch, as they come from a file that was checked."""
    for number in range(1, count + 1):
        yield InputLine(number, f"line-{number}", Job(ENDPOINT, body()), 0, proven=True)


async def queue_batch(redis: Redis, count: int) -> BatchRecord:
    """Queue a batch of `count` lines."""
    batches = Batches(Queue(redis))
    record = await batches.open(name="bench", digest="bench")
    await batches.feed(record.id, lines(count))
    return await batches.show(record.id)


async def redis_now(redis: Redis) -> float:
    """Return Redis' time in seconds: what the times of a batch's record compare with."""
    seconds, micros = await cast(Any, redis).time()
    return int(seconds) + int(micros) / 1e6
