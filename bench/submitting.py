"""How fast jobs are queued: one by one, in bulk, and from a file by the command line."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import time
from pathlib import Path

from bench.jobs import ENDPOINT, body, queue_batch
from bench.processes import LLMQ, environment
from bench.row import Figures, Setting
from llmq import AsyncClient, Client
from llmq.scheduler.connection import connect


async def one_by_one(setting: Setting) -> Figures:
    """Submit jobs with the blocking client, each when the last was accepted."""

    def submit() -> Figures:
        with Client(setting.server.url) as client:
            client.submit(body(), cls="batch")  # connects
            clock = Clock()
            for _ in range(setting.count):
                client.submit(body(), cls="batch")
            return clock.figures("jobs", setting.count)

    return await asyncio.to_thread(submit)


async def one_by_one_async(setting: Setting) -> Figures:
    """Submit jobs with the asynchronous client, each when the last was accepted."""
    async with AsyncClient(setting.server.url) as client:
        await client.submit(body(), cls="batch")  # connects
        clock = Clock()
        for _ in range(setting.count):
            await client.submit(body(), cls="batch")
        return clock.figures("jobs", setting.count)


async def bulk(setting: Setting) -> Figures:
    """Feed a batch from lines in memory."""
    redis = connect(setting.server.url)
    clock = Clock()
    record = await queue_batch(redis, setting.count)
    figures = clock.figures("lines", record.lines)
    await redis.aclose()
    return figures


class Clock:
    """How long something takes, and how much of a core: the second does not depend on what else the machine does."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._used = time.process_time()

    def figures(self, what: str, count: int) -> Figures:
        """Return how many a second, and the microseconds of this process for each."""
        took, used = time.perf_counter() - self._began, time.process_time() - self._used
        return {what: count / took, "producer": used / count * 1e6}


async def file(setting: Setting) -> Figures:
    """Queue a file with `llmq submit-batch`, from its start to its end."""
    path = setting.folder / "prompts.jsonl"
    _write(path, setting.count)
    command = [*LLMQ, "submit-batch", str(path), "--redis", setting.server.url]
    took, used = await asyncio.to_thread(_run, command, setting.folder)
    producer = (used.ru_utime + used.ru_stime) / setting.count * 1e6
    return {"lines": setting.count / took, "producer": producer, "memory": used.ru_maxrss / 1024}


def _run(command: list[str], folder: Path) -> tuple[float, resource.struct_rusage]:
    """Run a command to its end; return how long it took, and what it used."""
    with (folder / "said").open("wb") as said:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment(folder))
        _, status, used = os.wait4(process.pid, 0)
        took = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{command!r} ended with {process.returncode}; it said:\n{(folder / 'said').read_text()}")
    return took, used


def _write(path: Path, count: int) -> None:
    """Write lines of the OpenAI form, each with an id of its own."""
    request = json.dumps({"method": "POST", "url": ENDPOINT, "body": body()})[1:]
    with path.open("w") as out:
        out.writelines(f'{{"custom_id": "request-{number}", {request}\n' for number in range(count))
