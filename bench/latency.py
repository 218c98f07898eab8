"""How long chat waits for its start: from the call of submit to the engine, through Redis and two processes.

In turn with it a job goes through a bare bell loop (`bell.py`): the same trips, and nothing else. Whatever else this
machine is doing at the moment, it does to both.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bench import bell
from bench.jobs import queue_batch, timed_body
from bench.processes import Worker, bench_worker, environment
from bench.row import Figures, Setting
from llmq import AsyncClient
from llmq.scheduler.connection import connect

#: The simulated GPU of the row with batch: 32 requests of about 3 s at a time, and slots kept free for chat.
SLOTS = 32
RESERVE = 4
BATCH_JOBS = 20_000


async def idle(setting: Setting) -> Figures:
    """Submit chat to a worker that has nothing else to do."""
    with bench_worker(setting.server.url, SLOTS) as worker:
        return await _ask(setting, worker)


async def beside_batch(setting: Setting) -> Figures:
    """Submit chat to a worker whose other slots run batch."""
    redis = connect(setting.server.url)
    await queue_batch(redis, min(BATCH_JOBS, 100 * setting.count))
    await redis.aclose()
    with bench_worker(setting.server.url, SLOTS, reserve=RESERVE) as worker:
        return await _ask(setting, worker)


async def _ask(setting: Setting, worker: Worker) -> Figures:
    redis: Any = connect(setting.server.url)
    starts: list[float] = []
    bells: list[float] = []
    loops: list[float] = []
    with _listener(setting.server.url) as listener:
        async with AsyncClient(setting.server.url) as client:
            for turn in range(-10, setting.count):  # the first ones connect, and load code
                await asyncio.sleep(random.uniform(0.002, 0.012))
                await bell.submit(redis)
                heard, claimed = (await asyncio.to_thread(listener.said.readline)).split()
                await asyncio.sleep(random.uniform(0.002, 0.012))
                job = await client.submit(timed_body())
                start = await asyncio.to_thread(worker.said.readline)
                await job.result(timeout=30)
                if turn >= 0:
                    bells.append(float(heard) * 1000)
                    loops.append(float(claimed) * 1000)
                    starts.append(float(start) * 1000)
    await redis.aclose()
    return {
        "p50": _percentile(starts, 0.5),
        "p99": _percentile(starts, 0.99),
        "bell p50": _percentile(bells, 0.5),
        "bare loop p50": _percentile(loops, 0.5),
        "bare loop p99": _percentile(loops, 0.99),
        "times the bare loop": _percentile(starts, 0.5) / _percentile(loops, 0.5),
    }


@contextmanager
def _listener(url: str) -> Iterator[Worker]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.bell", url],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=environment(),
    )
    assert process.stdout is not None
    try:
        yield Worker(process, process.stdout)
    finally:
        process.kill()
        process.communicate()


def _percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]
