"""How many jobs a worker gets through: as fast as it can, and as fast as its engine lets it."""

from __future__ import annotations

import asyncio

from redis.asyncio import Redis

from bench.jobs import queue_batch, redis_now
from bench.processes import bench_worker, cpu_s, llmq_worker
from bench.row import Figures, Setting
from llmq.scheduler.batch_record import BatchRecord
from llmq.scheduler.batches import Batches
from llmq.scheduler.connection import connect
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.queue import Queue

SLOTS = 64
JOB_S = 0.1


async def drain(setting: Setting) -> Figures:
    """Drain a queue of jobs that take no time, with one worker process."""
    redis = connect(setting.server.url)
    queue = Queue(redis)
    await queue.pause(TrafficClass.BATCH)
    record = await queue_batch(redis, setting.count)
    with llmq_worker(setting.server.url, SLOTS) as worker:
        before, cpu = setting.server.work(), cpu_s(worker.process.pid)
        took = await _run_all(redis, record)
        work, cpu = setting.server.work().since(before), cpu_s(worker.process.pid) - cpu
    await redis.aclose()
    return {
        "jobs": setting.count / took,
        "Redis in commands": work.command_s / setting.count * 1e6,
        "Redis in all": work.cpu_s / setting.count * 1e6,
        "worker": cpu / setting.count * 1e6,
    }


async def slots(setting: Setting) -> Figures:
    """Run jobs of 100 ms on 64 slots: the ideal is a slot that is never empty."""
    redis = connect(setting.server.url)
    await Queue(redis).pause(TrafficClass.BATCH)
    record = await queue_batch(redis, setting.count)
    with bench_worker(setting.server.url, SLOTS, sleep=JOB_S):
        took = await _run_all(redis, record)
    await redis.aclose()
    return {"time": took, "ideal": setting.count / SLOTS * JOB_S}


async def _run_all(redis: Redis, record: BatchRecord) -> float:
    """Let a batch go, wait for its end, and return the seconds by Redis' clock."""
    batches, queue = Batches(Queue(redis)), Queue(redis)
    began = await redis_now(redis)
    await queue.resume(TrafficClass.BATCH)
    while not record.ended:
        await asyncio.sleep(0.02)
        record = await batches.show(record.id)
    if record.completed != record.lines or record.ended_at is None:
        raise RuntimeError(f"expected {record.lines} jobs to complete, got {record.completed}")
    return record.ended_at - began
