"""Real processes that feed and collect, killed with SIGKILL at any moment and started again: every line once."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
from redis.asyncio import Redis

from llmq.scheduler.batches import Batches
from llmq.scheduler.lines import check, open_input, read_lines
from llmq.scheduler.queue import Queue
from tests.line_worker import LineWorker, bad
from tests.system import feeding_and_collecting

PROGRAM = feeding_and_collecting.__file__


@pytest.fixture
def queue(redis: Redis) -> Queue:
    """An empty queue."""
    return Queue(redis)


@pytest.fixture
def batches(queue: Queue) -> Batches:
    """Its batches."""
    return Batches(queue)


def prompts(path: Path, count: int) -> Path:
    """Write a file of `count` prompts, with a blank line after every hundredth."""
    with path.open("wb") as file:
        for number in range(count):
            body = {"messages": [{"role": "user", "content": f"question {number} " + "x" * 300}]}
            line = {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(orjson.dumps(line) + (b"\n\n" if number % 100 == 99 else b"\n"))
    return path


async def opened(batches: Batches, path: Path) -> str:
    """Open a batch for a file; return its id."""
    with open_input(path) as file:
        return (await batches.open(name=path.name, digest=file.digest)).id


class Process:
    """The program in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, *arguments: str) -> Process:
        """Start it."""
        command = [sys.executable, PROGRAM, *arguments]
        return cls(await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE))

    async def words(self) -> AsyncIterator[str]:
        """Iterate over what it says, until it ends."""
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            yield line.decode().strip()

    async def kill_after(self, count: int) -> bool:
        """Kill it when it has said `count` words; return whether it was done before."""
        done = False
        async for word in self.words():
            done = done or word == "done"
            count -= 1
            if count == 0 and not done:
                self._process.kill()
        await self._process.wait()
        return done


class TestFeeding:
    """SIGKILL in mid-feed."""

    @pytest.mark.parametrize("seed", [1, 2])
    async def test_a_feed_that_is_killed_again_and_again_queues_every_line_once(
        self, redis_url: str, queue: Queue, batches: Batches, tmp_path: Path, seed: int
    ) -> None:
        """Each start goes on at the line that the batch expects (G1, F-084)."""
        chance = random.Random(seed)
        path = prompts(tmp_path / "prompts.jsonl", 6000)
        batch_id = await opened(batches, path)
        deaths = 0
        while True:
            words = str(chance.randint(1, 5))
            feeding = await Process.start("feed", redis_url, batch_id, str(path), "--words", words)
            if await feeding.kill_after(-1):
                break
            deaths += 1
        assert deaths >= 2
        stream = await cast(Any, queue.redis).xrange(queue.keys.of_batch(batch_id)[0])
        assert [f"row-{number}" for number in range(6000)] == [fields[b"k"].decode() for _, fields in stream]
        record = await batches.show(batch_id)
        assert (True, 6000) == (record.sealed, record.total)
        await batches.cancel(batch_id)

    async def test_two_processes_that_feed_one_file_end_well(
        self, redis_url: str, queue: Queue, batches: Batches, tmp_path: Path
    ) -> None:
        """The second skips forward over what the first has sent."""
        path = prompts(tmp_path / "prompts.jsonl", 3000)
        batch_id = await opened(batches, path)
        both = [await Process.start("feed", redis_url, batch_id, str(path)) for _ in range(2)]
        assert [True, True] == await asyncio.gather(*(process.kill_after(-1) for process in both))
        assert 3000 == (await batches.show(batch_id)).total
        await batches.cancel(batch_id)


class TestCollecting:
    """SIGKILL in mid-collect, while results that were collected are trimmed at once."""

    @pytest.mark.parametrize("seed", [1, 2])
    async def test_a_collector_that_is_killed_at_random_moments_writes_every_line_once(
        self, redis_url: str, queue: Queue, batches: Batches, tmp_path: Path, seed: int
    ) -> None:
        """The file is cut to what is certain, and goes on from there (G16)."""
        chance = random.Random(seed)
        batch_id = await self._queued(queue, batches, tmp_path, 600)
        out = tmp_path / "out.jsonl"
        serving = asyncio.create_task(_serve_all(queue, batches, batch_id))
        deaths = 0
        while True:
            process = await Process.start("collect", redis_url, batch_id, str(out))
            if await process.kill_after(chance.randint(1, 6)):
                break
            deaths += 1
        await serving
        assert deaths >= 2
        _check_whole(out, 600)
        assert (await batches.show(batch_id)).trimmed > 0

    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.parametrize("step", ["write", "fsync", "rename", "tell"])
    async def test_a_collector_that_is_killed_between_two_steps_writes_every_line_once(
        self, redis_url: str, queue: Queue, batches: Batches, tmp_path: Path, step: str, when: str
    ) -> None:
        """Write, sync, sidecar, Redis: dead before or after each of them (G16)."""
        batch_id = await self._queued(queue, batches, tmp_path, 200)
        out = tmp_path / "out.jsonl"
        serving = asyncio.create_task(_serve_all(queue, batches, batch_id))
        dying = await Process.start("collect", redis_url, batch_id, str(out), "--die", f"{step}:{when}:3")
        assert not await dying.kill_after(-1)
        assert await (await Process.start("collect", redis_url, batch_id, str(out))).kill_after(-1)
        await serving
        _check_whole(out, 200)

    async def _queued(self, queue: Queue, batches: Batches, folder: Path, count: int) -> str:
        """Queue a batch in a queue that holds the results of a few lines only."""
        await cast(Any, queue.redis).hset(queue.keys.config, "results_max_bytes", "2000")
        path = prompts(folder / "prompts.jsonl", count)
        batch_id = await opened(batches, path)
        with open_input(path) as file:
            await batches.feed(batch_id, read_lines(file, check(file)))
        return batch_id


async def _serve_all(queue: Queue, batches: Batches, batch_id: str) -> None:
    """Work off a batch, as far as its results are collected meanwhile."""
    worker = LineWorker(queue)
    while not (await batches.show(batch_id)).ended:
        if not await worker.serve(5, bad):
            # Asleep until a collector has taken results away: it rings the bell.
            await cast(Any, queue.redis).blpop([queue.keys.bell("b")], timeout=1)


def _check_whole(out: Path, count: int) -> None:
    keys = Counter(orjson.loads(line)["custom_id"] for line in out.read_bytes().splitlines())
    assert {f"row-{number}": 1 for number in range(count)} == keys
