"""Producers: those who want answers, and what they are told.

Chat comes one by one: each asks, may stream, leave, wait, cancel, and have a time limit. Batches come as files: fed by
a process that may be killed in the middle and goes on, or by this one; watched, paused, cancelled, deleted, collected
by another process. Everybody draws from a seed of their own, so that what they do does not depend on what goes wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import orjson

from llmq import AsyncClient, AsyncJobHandle, JobEnded, LLMQError, NotFoundError, RedisUnavailable, UsageError
from llmq.scheduler.batches import Batches
from llmq.scheduler.connection import connect, redis_errors
from llmq.scheduler.lines import check, read_lines
from llmq.scheduler.prompts import open_prompts
from llmq.scheduler.queue import Queue
from tests.chaos.cast import Cast
from tests.chaos.journal import Journal
from tests.chaos.processes import Process

#: Chat requests, and batches, a second.
CHATS_PER_S = 5.0
BATCHES_PER_S = 0.3

TENANTS = ("t1", "t2", "t3")

#: One prompt in so many kills the engine that runs it.
POISONED = 300

#: How long a batch whose feed has failed waits until its owner tries again.
AGAIN_S = 0.3


class Producers:
    """Everybody who asks; `seed` is theirs."""

    def __init__(self, cast: Cast, folder: Path, seed: int) -> None:
        self.cast = cast
        self.journal = Journal(cast.journal.path, "clients")
        self.waiting: set[asyncio.Task[None]] = set()
        self._folder = folder
        self._seed = seed
        self._started = 0
        self._client = AsyncClient(cast.url)
        self._redis = connect(cast.url)
        self._batches = Batches(Queue(self._redis))

    async def ask(self) -> None:
        """Ask until cancelled."""
        rng = random.Random(f"asking {self._seed}")
        for number in range(1_000_000):
            await asyncio.sleep(rng.expovariate(CHATS_PER_S))
            self._go(self._chat(f"c{number}"))
            if rng.random() < BATCHES_PER_S / CHATS_PER_S:
                self._go(self._batch(f"b{number}"))

    async def close(self) -> None:
        """End all waits, and the processes."""
        for task in list(self.waiting):
            task.cancel()
        await asyncio.gather(*self.waiting, return_exceptions=True)
        for process in (*self.cast.feeders, *self.cast.collectors):
            if process.returncode is None:
                process.kill()
                await process.wait()
        with contextlib.suppress(LLMQError, TimeoutError):
            async with asyncio.timeout(10):
                await self._client.aclose()
        await self._redis.aclose()
        self.journal.close()

    def _go(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.waiting.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self.waiting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.journal.say("producer died", error=repr(error))

    # --- chat -------------------------------------------------------------------------------------------------------

    async def _chat(self, name: str) -> None:
        rng = random.Random(f"{self._seed} {name}")
        cls = "batch" if rng.random() < 0.15 else "interactive"
        poison = " poison" if rng.randrange(POISONED) == 0 else ""
        body = {
            "messages": [{"role": "user", "content": f"{name} says{poison} hello"}],
            "max_tokens": rng.choice([1, 1, 2, 2, 4, 4, 12, 60]),
        }
        ttl = rng.choice([0.3, 1.0]) if rng.random() < 0.1 else None
        key = name if rng.random() < 0.3 else None
        tenant = rng.choice(TENANTS)
        self.journal.say("asked", name=name, cls=cls)
        try:
            job = await self._client.submit(body, cls=cls, tenant=tenant, timeout=ttl, key=key)
        except LLMQError as error:
            self.journal.say("refused", name=name, why=type(error).__name__)
            if key is None or not isinstance(error, RedisUnavailable):
                return
            try:  # whoever gives a key may ask again: the same job
                job = await self._client.submit(body, cls=cls, tenant=tenant, timeout=ttl, key=key)
            except LLMQError:
                return
        self.journal.say("acked", name=name, job=job.id, cls=cls)
        if rng.random() < 0.12:
            self._go(self._cancel_job(name, job, rng.random()))
        await self._wait_for(name, job, rng.choice(["stream", "stream", "leave", "result"]))

    async def _wait_for(self, name: str, job: AsyncJobHandle, how: str) -> None:
        told, run = "answered", ""
        try:
            if how != "result":
                first = True
                async for _ in job.stream():
                    if first:
                        first = False
                        self.journal.say("delta", name=name)
                    if how == "leave":
                        break
            run = (await job.result()).text.partition(" ")[0]
        except JobEnded as error:
            told = type(error).__name__
        except asyncio.CancelledError:
            self.journal.say("waits in vain", name=name, job=job.id)
            raise
        self.journal.say("told", name=name, how=told, run=run)

    async def _cancel_job(self, name: str, job: AsyncJobHandle, after: float) -> None:
        await asyncio.sleep(after)
        try:
            verdict = (await job.cancel()).value
        except LLMQError as error:
            verdict = type(error).__name__
        self.journal.say("cancel", name=name, verdict=verdict)

    # --- batches ----------------------------------------------------------------------------------------------------

    async def _batch(self, name: str) -> None:
        rng = random.Random(f"{self._seed} {name}")
        lines = rng.choice([3, 10, 30, 60])
        file = self._folder / f"{name}.jsonl"
        file.write_bytes(b"".join(self._line(name, number, rng) for number in range(1, lines + 1)))
        window = 4.0 if rng.random() < 0.1 else None
        digest = await asyncio.to_thread(_digest, file)
        opened = await self._insist(
            lambda: self._batches.open(
                name=name, digest=digest, tenant=rng.choice(TENANTS), window=window, batch_id=name
            )
        )
        if opened is None:
            return
        self.journal.say("batch opened", name=name, lines=lines)
        if rng.random() < 0.4:
            self._go(self._collect(name))
        mood = rng.random()
        if mood < 0.15:
            self._go(self._cancel_batch(name, rng.uniform(0.2, 4)))
        elif mood < 0.35:
            self._go(self._pause_batch(name, rng.uniform(0.1, 2), rng.uniform(0.5, 3)))
        fed = await (self._feed_in_a_process(name, file) if rng.random() < 0.3 else self._feed(name, file))
        self.journal.say("batch fed", name=name, lines=lines, how=fed)
        await self._see_batch_end(name, delete=rng.random() < 0.2)

    def _line(self, name: str, number: int, rng: random.Random) -> bytes:
        poison = " poison" if rng.randrange(POISONED) == 0 else ""
        content = f"{name}.{number} says{poison} hello"
        line = {
            "messages": [{"role": "user", "content": content}],
            "max_tokens": rng.choice([1, 1, 2, 2, 8, 8, 8, 60]),
        }
        return orjson.dumps(line) + b"\n"

    async def _feed(self, name: str, path: Path) -> str:
        with await asyncio.to_thread(open_prompts, path, max_line_bytes=2**20) as file:
            checked = await asyncio.to_thread(check, file)
            while True:
                try:
                    with redis_errors(self.cast.url):
                        await self._batches.feed(name, read_lines(file, checked))
                    return "ok"
                except RedisUnavailable:
                    await asyncio.sleep(AGAIN_S)
                except LLMQError as error:  # somebody ended it, or it was flushed
                    return type(error).__name__

    async def _feed_in_a_process(self, name: str, path: Path) -> str:
        while True:
            process = self._process("feed", name, path)
            self.cast.feeders.append(process)
            status = await process.wait()
            errors = process.log.read_text(errors="replace")
            if status == 0:
                return "ok"
            if status != -9 and "RedisUnavailable" not in errors and "redis." not in errors:
                return errors.strip().rpartition("\n")[2][:100]
            await asyncio.sleep(AGAIN_S)

    async def _collect(self, name: str) -> None:
        out = self._folder / f"{name}.out"
        while True:
            process = self._process("collect", name, out)
            self.cast.collectors.append(process)
            if await process.wait() == 0:
                lines = out.read_bytes().splitlines()
                self.journal.say("collected", name=name, ids=[orjson.loads(line)["custom_id"] for line in lines])
                return
            if process.said("llmq.scheduler.errors.NotFoundError"):
                return  # deleted or flushed
            await asyncio.sleep(AGAIN_S)

    def _process(self, action: str, name: str, path: Path) -> Process:
        self._started += 1
        arguments = [action, self.cast.url, name, str(path)]
        log = self._folder / f"{action}-{name}-{self._started}.log"
        return Process("tests.system.feeding_and_collecting", arguments, log, self.cast.guardian)

    async def _see_batch_end(self, name: str, *, delete: bool) -> None:
        try:
            record = await self._insist(lambda: self._batches.wait(name))
        except asyncio.CancelledError:
            self.journal.say("waits in vain", name=name)
            raise
        counts = {} if record is None else {"completed": record.completed, "failed": record.failed}
        self.journal.say("batch over", name=name, status="" if record is None else record.status.value, **counts)
        if delete and record is not None:
            await asyncio.sleep(1)
            await self._insist(lambda: self._batches.delete(name))

    async def _cancel_batch(self, name: str, after: float) -> None:
        await asyncio.sleep(after)
        if await self._insist(lambda: self._batches.cancel(name)) is not None:
            self.journal.say("batch cancelled", name=name)

    async def _pause_batch(self, name: str, after: float, lasts: float) -> None:
        await asyncio.sleep(after)
        await self._insist(lambda: self._batches.pause(name))
        await asyncio.sleep(lasts)
        await self._insist(lambda: self._batches.resume(name))

    async def _insist(self, action: Callable[[], Awaitable[Any]]) -> Any:
        """Do it as soon as Redis can be reached; None where it cannot be done (ended, deleted, flushed)."""
        while True:
            try:
                with redis_errors(self.cast.url):
                    return await action()
            except RedisUnavailable:
                await asyncio.sleep(AGAIN_S)
            except (UsageError, NotFoundError):
                return None


def _digest(path: Path) -> str:
    with open_prompts(path, max_line_bytes=2**20) as file:
        check(file)
        return file.digest
