"""A storm: bursts of chat preempt batch lines again and again, while workers are killed and drained beside it."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from redis.asyncio import Redis

from llmq import AsyncClient
from llmq.scheduler.errors import JobInterrupted
from llmq.scheduler.job import Job
from llmq.scheduler.totals import CUT_OFF, HANDED_BACK, read_totals
from llmq.workers.engines.sim import SimEngine
from tests.redis.serving import KEYS, configure
from tests.system.worker_process import WorkerProcess, worker_process

LINES = 60
ENGINE = "sim://?slots=4&decode_tps=300"
ANSWER_TOKENS = 80


def body(text: str, tokens: int) -> dict[str, Any]:
    """Return a request whose answer has exactly so many tokens."""
    return {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "ignore_eos": True}


async def uninterrupted() -> dict[str, Mapping[str, Any]]:
    """Return each line's answer as an engine gives it that nobody interrupts."""
    engine, found = SimEngine.from_url("sim://?instant=1"), {}
    for number in range(LINES):
        answer = await engine.run(Job("/v1/chat/completions", body(f"line {number}", ANSWER_TOKENS)))
        found[f"c{number}"] = said(Job.of_json("/v1/chat/completions", answer.body).body)
    return found


def said(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what of an answer is the same whenever it is given: its text, why it ended, and its usage."""
    choice = tree["choices"][0]
    return {"text": choice["message"]["content"], "end": choice["finish_reason"], "usage": tree["usage"]}


async def one_chat(client: AsyncClient, number: int) -> None:
    """Chat once; an answer that had begun when its worker was killed is told to be interrupted."""
    job = await client.submit(body(f"chat {number}", 15))
    with contextlib.suppress(JobInterrupted):
        await job.result(timeout=60)


async def storm(client: AsyncClient, workers: list[WorkerProcess], start: Any) -> None:
    """Send bursts of chat; end one worker in each, by SIGKILL or SIGTERM, and start another."""
    luck, chats = random.Random(6), []
    for number, ending in enumerate(("terminate", "kill", "terminate", "kill", "terminate")):
        for burst in range(3):
            chats += [asyncio.create_task(one_chat(client, 100 * number + 10 * burst + n)) for n in range(6)]
            await asyncio.sleep(luck.uniform(0.1, 0.25))  # the moment is what is to vary
        getattr(workers.pop(0), ending)()
        workers.append(await asyncio.to_thread(start))
    await asyncio.gather(*chats)


async def test_preempted_lines_and_killed_workers_lose_and_double_nothing(
    redis_url: str, redis: Redis, tmp_path: Path
) -> None:
    """G3, G16: each line ends once, with text and usage of an answer that nobody interrupted."""
    await configure(redis, lease="1000", resume="continue")
    with ExitStack() as processes:

        def start() -> WorkerProcess:
            worker = worker_process(redis_url, tmp_path / "runs", ENGINE, grace=0.2, least_contact=0)
            return processes.enter_context(worker)

        workers = [await asyncio.to_thread(start) for _ in range(2)]
        async with AsyncClient(redis_url) as client:
            lines = [{"custom_id": f"c{n}"} | body(f"line {n}", ANSWER_TOKENS) for n in range(LINES)]
            batch = await client.submit_batch(lines)
            await storm(client, workers, start)
            found = [(line.custom_id, said(cast(Any, line.body))) async for line in batch.results()]
    assert sorted(await uninterrupted()) == sorted(name for name, _ in found)
    assert await uninterrupted() == dict(found)
    totals = read_totals(await cast(Any, redis).hgetall(KEYS.totals))
    assert totals.get(HANDED_BACK.field("batch", "preempted"), 0) >= 5
    assert totals.get(CUT_OFF.field("kept"), 0) > 0
    await redis.flushall()
