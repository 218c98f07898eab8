"""Chaos: everything that can be killed, frozen or cut off is, at random, while chat and batch go on.

Afterwards all is left in peace until the queue is empty, and then the books must balance: each job that was
acknowledged has ended exactly once, everybody who waited has been told, and nothing is left in Redis. What happens is
drawn from a seed; other seeds by hand:

    CHAOS_SEEDS="2 3 4" pytest tests/system/test_chaos.py
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest

from llmq import AsyncBatchHandle, AsyncClient, AsyncJobHandle, JobEnded, LLMQError, RedisUnavailable, UsageError
from llmq.scheduler.queue import CancelResult
from tests.conftest import PERMANENT_KEYS, OwnServer
from tests.redis.serving import KEYS, until
from tests.servers import Server
from tests.system import feeding_and_collecting
from tests.system.tcp_proxy import TcpProxy, tcp_proxy
from tests.system.worker_process import WorkerProcess, runs, worker_process

SEEDS = [int(seed) for seed in os.environ.get("CHAOS_SEEDS", "1").split()]

#: How long things go wrong, and how soon after that all must be well.
CHAOS_S = 10.0
PEACE_S = 60.0

#: A lease is long enough for a busy machine to renew it in time, and short enough to run out often.
SETTINGS = {"lease": "1500", "deadline": "2000"}

#: What Redis has acknowledged is on disk: killing it loses nothing.
CERTAIN = ("--appendonly", "yes", "--appendfsync", "always", "--aof-use-rdb-preamble", "no")

ENGINES = (
    "sim://?slots=4&decode_tps=200&answer=20&fail=0.05&overload=0.02",
    "sim://?slots=4&decode_tps=200&answer=20&die_after=40&down=0.5",
    "sim://?slots=4&decode_tps=60&answer=20",
)


@dataclass
class Asked:
    """A chat job, as the one who asked for it sees it; `runs_begun` is of the moment of its first delta."""

    prompt: str
    handle: AsyncJobHandle
    runs_begun: int | None = None
    answered: bool = False
    error: str = ""
    cancelled: CancelResult | None = None


@dataclass
class Queued:
    """A batch that was queued whole; its lines ask `line 1 of NUMBER` and so on."""

    number: int
    lines: int
    handle: AsyncBatchHandle


@dataclass
class Place:
    """Where a worker lives: its own way to Redis, and its engine."""

    proxy: TcpProxy
    engine: str
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    worker: WorkerProcess | None = None

    @property
    def alive(self) -> bool:
        """Whether a worker runs, frozen or not."""
        return self.worker is not None and self.worker.process.poll() is None


@pytest.fixture
def server(own_server: OwnServer) -> Server:
    """A server that may be killed and loses nothing of what it acknowledged."""
    return own_server(*CERTAIN)


@pytest.mark.parametrize("seed", SEEDS)
async def test_chaos_loses_nothing_doubles_nothing_and_leaves_nobody_waiting(
    server: Server, tmp_path: Path, seed: int
) -> None:
    """G1, G2, G3, G7, G11, G12, G13, G16, G18: whatever dies, freezes or is cut off, in whichever order."""
    async with chaos(server, tmp_path, seed) as world:
        await world.go_wrong()
        await world.recover()
    world.check()


class World:
    """Workers, clients, a collector and the network between them and one Redis."""

    def __init__(self, server: Server, folder: Path, seed: int, places: list[Place], client_way: TcpProxy) -> None:
        self.story: list[str] = []
        self._server = server
        self._log = folder / "runs"
        self._out = folder / "out"
        self._rng = random.Random(seed)
        self._places = places
        self._client_way = client_way
        self._client = AsyncClient(client_way.url)
        self._asked: list[Asked] = []
        self._batches: list[Queued] = []
        self._waiters: list[asyncio.Task[None]] = []
        self._collector: asyncio.subprocess.Process | None = None

    # --- those who ask ----------------------------------------------------------------------------------------------

    async def ask(self) -> None:
        """Submit chat, and a batch now and then, until cancelled."""
        for number in range(1_000_000):
            await asyncio.sleep(self._rng.expovariate(8))
            self._waiters.append(asyncio.create_task(self._chat(f"chat {number}")))
            if number % 25 == 0:
                self._waiters.append(asyncio.create_task(self._batch(number, self._rng.randrange(10, 80))))

    async def _chat(self, prompt: str) -> None:
        rng = random.Random(prompt)
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": rng.choice([2, 8, 30])}
        timeout = 0.5 if rng.random() < 0.1 else None
        try:
            handle = await self._client.submit(body, timeout=timeout)
        except LLMQError:
            return  # not acknowledged
        asked = Asked(prompt, handle)
        self._asked.append(asked)
        if rng.random() < 0.1:
            with contextlib.suppress(LLMQError):
                asked.cancelled = await handle.cancel()
        try:
            async for _ in handle.stream():
                if asked.runs_begun is None:
                    asked.runs_begun = self._runs_of(prompt)
            await handle.result()
        except JobEnded as error:
            asked.error = type(error).__name__
        else:
            asked.answered = True

    async def _batch(self, number: int, lines: int) -> None:
        prompts = [f"line {n} of {number}" for n in range(1, lines + 1)]
        try:
            batch = await self._client.submit_batch(prompts)
        except LLMQError:
            return
        self._batches.append(Queued(number, lines, batch))
        rng = random.Random(number)
        if rng.random() < 0.3:
            await self._insist(batch.pause)
            await asyncio.sleep(rng.random())
            await self._insist(batch.resume)
        if rng.random() < 0.2:
            await self._insist(batch.cancel)
        await batch.wait()

    async def _insist(self, action: Callable[[], Awaitable[Any]]) -> None:
        """Do it as soon as Redis can be reached; a batch that has ended refuses it."""
        while True:
            try:
                await action()
                return
            except RedisUnavailable:
                await asyncio.sleep(0.2)
            except UsageError:
                return

    def _runs_of(self, prompt: str) -> int:
        return runs(self._log).count(prompt)

    # --- what goes wrong ----------------------------------------------------------------------------------------------

    async def go_wrong(self) -> None:
        """Let people ask, and everything go wrong, for a while."""
        await asyncio.gather(*(self._start(place) for place in self._places))
        asking = asyncio.create_task(self.ask())
        await until(lambda: self._batches)
        collecting = asyncio.create_task(self._collect(self._batches[0].handle.id))
        self._waiters.append(collecting)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CHAOS_S):
                while True:
                    await asyncio.sleep(self._rng.uniform(0.1, 0.8))
                    action = self._rng.choice(self._actions())
                    self.story.append(action.__name__)
                    acting = asyncio.ensure_future(action())
                    await asyncio.shield(acting)
        await asyncio.wait([acting])
        asking.cancel()

    def _actions(self) -> list[Callable[[], Awaitable[None]]]:
        return [
            *[self._kill_worker, self._drain_worker, self._freeze_worker] * 2,
            *[self._delay, self._swallow, self._cut] * 2,
            self._kill_redis,
            self._freeze_redis,
            self._forget_scripts,
            self._kill_clients,
            self._kill_collector,
        ]

    async def _start(self, place: Place) -> None:
        entering = worker_process(place.proxy.url, self._log, place.engine, grace=1.0, least_contact=1.0)
        try:
            place.worker = await asyncio.to_thread(place.stack.enter_context, entering)
        except RuntimeError:
            place.worker = None  # Redis was away when it started

    async def _kill_worker(self) -> None:
        place = self._rng.choice(self._places)
        if place.worker is not None:
            place.worker.kill()
        await self._start(place)

    async def _drain_worker(self) -> None:
        place = self._rng.choice(self._places)
        if place.worker is not None and place.alive:
            place.worker.terminate()
            await asyncio.to_thread(place.worker.process.wait, 20)
        await self._start(place)

    async def _freeze_worker(self) -> None:
        worker = self._rng.choice(self._places).worker
        if worker is not None:
            worker.freeze()
            await asyncio.sleep(self._rng.uniform(0.5, 4))
            worker.thaw()

    async def _kill_redis(self) -> None:
        self._server.kill()
        await asyncio.sleep(self._rng.choice([0, 0.5, 2]))
        await asyncio.to_thread(self._server.start)

    async def _freeze_redis(self) -> None:
        self._server.freeze()
        await asyncio.sleep(self._rng.choice([0.5, 2, 6]))
        self._server.thaw()

    async def _forget_scripts(self) -> None:
        with self._server.client() as redis:
            redis.script_flush()

    async def _kill_clients(self) -> None:
        with self._server.client() as redis:
            redis.client_kill_filter(_type="normal", skipme=True)

    async def _delay(self) -> None:
        way = self._way()
        way.delay = self._rng.choice([0.05, 0.3, 1])
        await asyncio.sleep(self._rng.uniform(0.5, 2))
        way.heal()

    async def _swallow(self) -> None:
        way = self._way()
        way.swallow()
        await asyncio.sleep(self._rng.choice([0.5, 2, 6]))
        if self._rng.random() < 0.5:
            way.cut()
        way.heal()

    async def _cut(self) -> None:
        self._way().cut()

    def _way(self) -> TcpProxy:
        return self._rng.choice([self._client_way, *(place.proxy for place in self._places)])

    async def _collect(self, batch_id: str) -> None:
        """Collect a batch into a file, again and again until it is done."""
        command = [sys.executable, feeding_and_collecting.__file__, "collect", self._server.url, batch_id]
        while True:
            self._collector = await asyncio.create_subprocess_exec(
                *command, str(self._out), stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
            )
            if await self._collector.wait() == 0:
                return

    async def _kill_collector(self) -> None:
        if self._collector is not None and self._collector.returncode is None:
            self._collector.kill()

    # --- afterwards ---------------------------------------------------------------------------------------------------

    async def recover(self) -> None:
        """Leave all in peace until the queue is empty and everybody has been told."""
        await asyncio.gather(*(self._start(place) for place in self._places if not place.alive))
        await self._cancel_open_batches()
        with self._server.client() as redis:
            with contextlib.suppress(TimeoutError):
                await until(lambda: not redis.exists(KEYS.lanes), within=PEACE_S)
            left = {lane: redis.xinfo_stream(KEYS.lane(lane.decode()), full=True) for lane in redis.hkeys(KEYS.lanes)}
            assert not left, f"not drained: {left}; {self.story}"
        _, waiting = await asyncio.wait(self._waiters, timeout=10)
        assert not waiting, f"{len(waiting)} wait in vain; {self.story}"
        for waiter in self._waiters:
            waiter.result()

    async def _cancel_open_batches(self) -> None:
        """A batch whose submit gave up is open still: its owner might go on with it."""
        with self._server.client() as redis:
            for batch_id in redis.zrange(KEYS.batches, 0, -1):
                if redis.hget(KEYS.batch(batch_id.decode()), "sealed") == b"0":
                    batch = await self._client.batch(batch_id.decode())
                    await batch.cancel()

    async def close(self) -> None:
        """End everything."""
        for waiter in self._waiters:
            waiter.cancel()
        await asyncio.gather(*self._waiters, return_exceptions=True)
        if self._collector is not None and self._collector.returncode is None:
            self._collector.kill()
            await self._collector.wait()
        await self._client.aclose()
        for place in self._places:
            await asyncio.to_thread(place.stack.close)

    def check(self) -> None:
        """Balance the books."""
        assert self._asked
        assert self._batches
        faults = [*self._wrong_chats(), *self._wrong_batches(), *self._left()]
        assert not faults, f"{faults}\n{self.story}"

    def _wrong_chats(self) -> Iterator[str]:
        with self._server.client() as redis:
            for asked in self._asked:
                state = redis.hget(KEYS.job(asked.handle.id), "state")
                if asked.answered != (state == b"completed") or asked.error == "JobLost":
                    yield f"{asked.prompt}: is {state!r}, its client got {asked.error or 'an answer'}"
                if asked.runs_begun is not None and self._runs_of(asked.prompt) > asked.runs_begun:
                    yield f"{asked.prompt}: was run again after its first delta (G18)"
                if asked.cancelled is CancelResult.CANCELLED and asked.answered:
                    yield f"{asked.prompt}: was answered after it was cancelled (G14)"

    def _wrong_batches(self) -> Iterator[str]:
        with self._server.client() as redis:
            for batch in self._batches:
                record = redis.hgetall(KEYS.batch(batch.handle.id))
                ended = [fields for _, fields in redis.xrange(KEYS.results(batch.handle.id))]
                if sorted(int(fields[b"n"]) for fields in ended) != list(range(1, batch.lines + 1)):
                    yield f"batch {batch.number}: not one result for each of its {batch.lines} lines (G3, G16)"
                states = Counter(fields[b"s"] == b"completed" for fields in ended)
                if (int(record[b"completed"]), int(record[b"failed"])) != (states[True], states[False]):
                    yield f"batch {batch.number}: it counts {record!r}, its results are {states}"
                for fields in ended:
                    prompt = f"line {int(fields[b'n'])} of {batch.number}"
                    if fields[b"e"] == b"lost" or (fields[b"e"] == b"worker_lost" and self._runs_of(prompt) < 3):
                        yield f"{prompt}: ended as {fields!r} (G1, G7)"
        collected = Counter(orjson.loads(line)["custom_id"] for line in self._out.read_bytes().splitlines())
        if set(collected.values()) != {1} or len(collected) != self._batches[0].lines:
            yield f"the collector has {collected}"

    def _left(self) -> Iterator[str]:
        with self._server.client() as redis:
            for key in redis.scan_iter(count=1000):
                if redis.ttl(key) == -1 and not PERMANENT_KEYS.fullmatch(key.decode()):
                    yield f"left in Redis: {key!r} (G11)"


@contextlib.asynccontextmanager
async def chaos(server: Server, folder: Path, seed: int) -> AsyncIterator[World]:
    """Make a world around a server; all of its processes end with the block."""
    with server.client() as redis:
        redis.hset(KEYS.config, mapping=SETTINGS)
    async with contextlib.AsyncExitStack() as stack:
        ways = [await stack.enter_async_context(tcp_proxy(server.port)) for _ in range(1 + len(ENGINES))]
        places = [Place(way, engine) for way, engine in zip(ways[1:], ENGINES, strict=True)]
        world = World(server, folder, seed, places, ways[0])
        stack.push_async_callback(world.close)
        yield world
