"""A worker in the process of the test, on a real server; and what it needs on the other side: jobs and their ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from llmq.scheduler import scripts
from llmq.scheduler.job import Job, TrafficClass
from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.lease import lane_of_batch
from llmq.workers.engines.base import Engine
from llmq.workers.shutdown import Shutdown
from llmq.workers.slots import WorkerReport
from llmq.workers.worker import Worker, WorkerOptions

KEYS = QueueKeys("default")
BATCH = "b1"
LANE = lane_of_batch(BATCH)
CHAT_LANE = "i:team"


@dataclass
class Serving:
    """A worker that serves, and the way to end it."""

    worker: Worker
    shutdown: Shutdown
    task: asyncio.Task[WorkerReport]

    async def stopped(self) -> WorkerReport:
        """Wait for the end, and take the worker's report or its error."""
        async with asyncio.timeout(20):
            return await asyncio.shield(self.task)


@contextlib.asynccontextmanager
async def serving(url: str, engine: Engine, **options: Any) -> AsyncIterator[Serving]:
    """Serve until the block ends; then hand back at once, and raise what the worker died of."""
    shutdown = Shutdown()
    chosen = WorkerOptions(announce=lambda line: None, **options)
    worker = await Worker.start(url, engine, await engine.probe(), chosen, shutdown)
    task = asyncio.create_task(_whole_life(worker))
    try:
        yield Serving(worker, shutdown, task)
    finally:
        shutdown.request_at_once()
        await asyncio.wait([task])
    if not task.cancelled():
        task.result()


async def _whole_life(worker: Worker) -> WorkerReport:
    try:
        return await worker.run()
    finally:
        await worker.close()


def chat(text: str, **fields: Any) -> Job:
    """Return a chat job."""
    return Job("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})


async def configure(redis: Redis, **changes: str) -> None:
    """Change live settings, in their stored form."""
    await scripts.run(redis, scripts.configure(KEYS, changes))


async def submit_batch(
    redis: Redis, lines: int, *, batch: str = BATCH, prompts: list[str] | None = None, **fields: Any
) -> None:
    """Queue a sealed batch whose lines ask `line 1`, `line 2` and so on."""
    lane = lane_of_batch(batch)
    texts = prompts or [f"line {number}" for number in range(1, lines + 1)]
    some = [scripts.SubmitLine(n, f"c{n}", chat(text, **fields).encode(), 10) for n, text in enumerate(texts, 1)]
    opened = scripts.open_batch(KEYS, batch, lane=lane, tenant="team", window_ms=0, need=0, record={"name": batch})
    await scripts.run(redis, opened)
    for first in range(0, len(some), 500):
        part = some[first : first + 500]
        call = scripts.submit_lines(KEYS, batch, lane=lane, first=first + 1, after=first + 1 + len(part), lines=part)
        await scripts.run(redis, call)
    await scripts.run(redis, scripts.seal_batch(KEYS, batch, lane=lane, next_line=len(some) + 1))


async def submit_chat(redis: Redis, job_id: str, *, client: str = "me", ttl_ms: int | None = None) -> None:
    """Queue an interactive job that asks its own id."""
    call = scripts.submit_job(
        KEYS,
        job_id,
        lane=CHAT_LANE,
        cls=TrafficClass.INTERACTIVE,
        tenant="team",
        data=chat(job_id).encode(),
        cost=1,
        ttl_ms=ttl_ms,
        client=client,
    )
    await scripts.run(redis, call)


async def until(condition: Callable[[], Any], *, within: float = 20.0) -> None:
    """Wait until a condition of another process or of Redis holds; there is no event to wait for."""
    async with asyncio.timeout(within):
        while True:
            held = condition()
            if asyncio.iscoroutine(held):
                held = await held
            if held:
                return
            await asyncio.sleep(0.01)


def plain(fields: Any) -> dict[str, str]:
    """Return a hash or an entry as text."""
    return {key.decode(): value.decode(errors="replace") for key, value in fields.items()}


async def entries(redis: Redis, key: str) -> list[dict[str, str]]:
    """Return what a stream holds."""
    rows: Any = await redis.xrange(key)
    return [plain(fields) for _, fields in rows]


async def batch_ended(redis: Redis, batch: str = BATCH, *, within: float = 30.0) -> dict[str, str]:
    """Wait for the end of a batch; return its record."""

    async def ended() -> bool:
        return await redis.hget(KEYS.batch(batch), "ended_at") is not None

    await until(ended, within=within)
    return plain(await redis.hgetall(KEYS.batch(batch)))


async def job_ended(redis: Redis, job_id: str, *, within: float = 20.0) -> dict[str, str]:
    """Wait for the end of a single job; return its record."""

    async def ended() -> bool:
        return await redis.hget(KEYS.job(job_id), "ended_at") is not None

    await until(ended, within=within)
    return plain(await redis.hgetall(KEYS.job(job_id)))


async def results(redis: Redis, batch: str = BATCH) -> list[dict[str, str]]:
    """Return the results of a batch."""
    return await entries(redis, KEYS.results(batch))


async def each_line_ended_once(redis: Redis, lines: int, batch: str = BATCH) -> None:
    """Fail unless each line has exactly one accepted result, and the counts say so (G3, G16)."""
    numbers = [int(row["n"]) for row in await results(redis, batch)]
    assert list(range(1, lines + 1)) == sorted(numbers)
    record = plain(await redis.hgetall(KEYS.batch(batch)))
    assert lines == int(record.get("completed", 0)) + int(record.get("failed", 0))


async def pending(redis: Redis, lane: str = LANE) -> int:
    """Return how many jobs of a lane run."""
    return int((await redis.xpending(KEYS.lane(lane), "workers"))["pending"])


async def tries(redis: Redis) -> dict[str, tuple[int, int, int]]:
    """Return attempts, crashes and preemptions of the entries that came back."""
    rows = {name: text.split() for name, text in plain(await redis.hgetall(KEYS.tries)).items()}
    return {name.rpartition("|")[2]: (int(row[1]), int(row[2]), int(row[3])) for name, row in rows.items()}


async def entry_of(redis: Redis, job_id: str) -> str:
    """Return a single job's entry."""
    return plain(await redis.hgetall(KEYS.job(job_id)))["entry"]
