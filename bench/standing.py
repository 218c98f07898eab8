"""What llmq costs while nothing happens, and how soon it is itself again after something has."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from redis.asyncio import Redis

from bench.jobs import ENDPOINT, body, queue_batch
from bench.processes import bench_worker, llmq_worker
from bench.row import Figures, Setting
from llmq import AsyncClient
from llmq.scheduler.batch_record import BatchRecord
from llmq.scheduler.batches import Batches
from llmq.scheduler.connection import connect
from llmq.scheduler.job import Job
from llmq.scheduler.queue import Queue


async def memory(setting: Setting) -> Figures:
    """Weigh jobs that wait: what each takes in Redis beside its own bytes."""
    payload = len(Job(ENDPOINT, body()).encode())
    redis = connect(setting.server.url)
    await queue_batch(redis, 1)  # scripts and connections are no job's
    before = setting.server.memory()
    await queue_batch(redis, setting.count)
    between = setting.server.memory()
    async with AsyncClient(setting.server.url) as client:
        for _ in range(setting.count):
            await client.submit(body(), cls="batch")
    after = setting.server.memory()
    await redis.aclose()
    return {
        "a line of a batch": (between - before) / setting.count - payload,
        "a single job": (after - between) / setting.count - payload,
    }


async def killed_worker(setting: Setting) -> Figures:
    """Kill a worker, and wait until all its jobs have run elsewhere; settings are the defaults."""
    redis = connect(setting.server.url)
    if setting.quick:
        await Queue(redis).set("lease", "1s")
    with bench_worker(setting.server.url, setting.count, sleep=600) as first:
        record = await queue_batch(redis, setting.count)
        await _until(redis, record.id, lambda now: now.running == setting.count)
        with llmq_worker(setting.server.url, setting.count):
            first.process.kill()
            killed = time.monotonic()
            await _until(redis, record.id, lambda now: now.ended)
            took = time.monotonic() - killed
    await redis.aclose()
    return {"time": took}


async def idle_worker(setting: Setting) -> Figures:
    """Count what a worker asks of Redis while there is nothing to do; `count` is in seconds."""
    with llmq_worker(setting.server.url, 32):
        await asyncio.sleep(0 if setting.quick else 2)  # past its start
        sent, total = await asyncio.to_thread(setting.server.commands, setting.count)
    return {"commands": sent / setting.count, "with those in scripts": total / setting.count}


async def _until(redis: Redis, batch_id: str, reached: Callable[[BatchRecord], bool]) -> None:
    batches = Batches(Queue(redis))
    record = await batches.show(batch_id)
    while not reached(record):
        await asyncio.sleep(0.02)
        record = await batches.show(batch_id)
