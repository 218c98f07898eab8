"""The cast: the processes of a chaos run, and the ways between them.

One store; a few places, each with a worker, the engine that it serves, and a way to Redis of its own; the clients' way.
Whoever dies is followed by another, so a fault has to do no more than kill. That a worker ends by itself is written
down: it never may.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import redis

from tests.chaos.faults import LEASE_S
from tests.chaos.journal import Journal, read
from tests.chaos.plan import Planned
from tests.chaos.store import TOPOLOGIES, Store
from tests.redis.serving import KEYS
from tests.servers import Guardian
from tests.system.tcp_proxy import TcpProxy, tcp_proxy

ROOT = Path(__file__).parents[2]

#: What a worker needs to start on a machine that is busy.
START_TIMEOUT_S = 60.0

#: Between the end of a worker or engine and the start of the next.
PAUSE_S = 0.1

Process = asyncio.subprocess.Process


class Place:
    """Where one worker lives: its engine, and its way to Redis. `seed` is the engine's."""

    def __init__(self, number: int, url: str, journal: Path, seed: int, guardian: Guardian) -> None:
        self.number = number
        self.url = url
        self.worker: Process | None = None
        self.engine: Process | None = None
        self.up = False
        self._seed = seed
        self._guardian = guardian
        self._path = journal
        self._journal = Journal(journal, "driver")
        self._errors = (journal.parent / f"worker-{number}.err").open("ab")
        self._port = 0
        self._told_to_end: set[int] = set()
        self._hold_worker = 0
        self._hold_engine = 0

    @property
    def engine_url(self) -> str:
        """Where its engine listens."""
        return f"http://127.0.0.1:{self._port}"

    async def keep(self) -> None:
        """Start engine and worker again whenever they have ended, until cancelled."""
        while True:
            if not self._hold_engine and (self.engine is None or self.engine.returncode is not None):
                if self.engine is not None:
                    self._guardian.forget(self.engine.pid)
                await self._start_engine()
            if self.worker is not None and self.worker.returncode is not None:
                self._note_exit(self.worker)
            if not self._hold_worker and self.worker is None:
                await self._start_worker()
            await asyncio.sleep(PAUSE_S)

    async def without_worker(self, number: signal.Signals, seconds: float) -> None:
        """End the worker by a signal, and start none for a while after it has ended."""
        self._hold_worker += 1
        try:
            if (worker := self.worker) is not None and worker.returncode is None:
                self._told_to_end.add(worker.pid)
                self._journal.say("signal", place=self.number, pid=worker.pid, number=number.name)
                worker.send_signal(number)
                await worker.wait()
            await asyncio.sleep(seconds)
        finally:
            self._hold_worker -= 1

    async def without_engine(self, seconds: float) -> None:
        """Kill the engine, and start none for a while."""
        self._hold_engine += 1
        try:
            if self.engine is not None and self.engine.returncode is None:
                self.engine.kill()
                await self.engine.wait()
            await asyncio.sleep(seconds)
        finally:
            self._hold_engine -= 1

    async def change_mood(self, mood: str, share: float) -> None:
        """Let the engine be in a mood; one that is away has none."""
        timeout = aiohttp.ClientTimeout(total=5)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with aiohttp.ClientSession(timeout=timeout) as session:
                await session.post(f"{self.engine_url}/mood", json={"mood": mood, "share": share})

    async def close(self) -> None:
        """Let the worker drain, and end the engine."""
        for process, number in ((self.worker, signal.SIGTERM), (self.engine, signal.SIGKILL)):
            if process is not None and process.returncode is None:
                self._told_to_end.add(process.pid)
                process.send_signal(signal.SIGCONT)
                process.send_signal(number)
                try:
                    async with asyncio.timeout(30):
                        await process.wait()
                except TimeoutError:
                    process.kill()
                    await process.wait()
        if self.worker is not None:
            self._note_exit(self.worker)
        self._errors.close()

    async def _start_engine(self) -> None:
        self._port = self._port or _free_port()
        command = [str(self._port), str(self._path), f"e{self.number}", str(self._seed)]
        self.engine = await _python("tests.chaos.engine", *command, stdout=asyncio.subprocess.PIPE)
        self._guardian.watch(self.engine.pid)
        assert self.engine.stdout is not None
        await self.engine.stdout.readline()

    async def _start_worker(self) -> None:
        options = [self.url, str(self._path), f"w{self.number}", self.engine_url]
        self.worker = worker = await _python("tests.chaos.worker", *options, stderr=asyncio.subprocess.PIPE)
        self._guardian.watch(worker.pid)
        assert worker.stderr is not None
        while line := await worker.stderr.readline():
            if line.startswith(b"ready "):
                self.up = True
                self._journal.say("worker up", place=self.number, pid=worker.pid, worker=line.split()[1].decode())
                self._drain = asyncio.create_task(_copy(worker.stderr, self._errors))
                return
            self._errors.write(line)
        await worker.wait()  # Redis or its engine was away when it started

    def _note_exit(self, worker: Process) -> None:
        expected = worker.pid in self._told_to_end or not self.up
        self._journal.say(
            "worker down", place=self.number, pid=worker.pid, status=worker.returncode, expected=expected
        )
        self._guardian.forget(worker.pid)
        self.worker, self.up = None, False


class Cast:
    """All processes of a run, and what faults do to them."""

    #: Live settings of a run, which come back with a flush.
    SETTINGS: Mapping[str, str] = {"lease": str(round(LEASE_S * 1000)), "deadline": "2000"}

    def __init__(self, server: Store, places: list[Place], ways: list[TcpProxy], journal: Journal) -> None:
        self.server = server
        self.places = places
        self.journal = journal
        self.feeders: list[Process] = []
        self.collectors: list[Process] = []
        self._ways = ways
        self._redis_in_use = asyncio.Lock()

    @property
    def url(self) -> str:
        """Where clients connect to: their way, where there is one."""
        return self._ways[-1].url if self._ways else self.server.url

    def way(self, place: int) -> TcpProxy:
        """Return the way of a place, or of the clients (-1); one that leads nowhere where there are none."""
        return self._ways[place] if self._ways else TcpProxy(0)

    def operate(self, action: Callable[[redis.Redis], Any]) -> Any:
        """Do as an operator does, past all proxies; nothing happens while Redis is away."""
        with contextlib.suppress(redis.RedisError, OSError), self.server.client() as client:
            return action(client)

    def flush(self) -> None:
        """FLUSHALL; the settings of the run come back in the same step."""

        def flush(client: redis.Redis) -> None:
            together = client.pipeline(transaction=True)
            together.flushall()
            together.hset(KEYS.config, mapping=dict(self.SETTINGS))
            together.execute()

        self.operate(flush)

    async def configure(self, changes: Mapping[str, str]) -> None:
        """Change live settings, in their stored form."""
        await asyncio.to_thread(self.operate, lambda client: _configure(client, changes))

    def kill_one(self, processes: list[Process]) -> None:
        """SIGKILL the newest of some processes that runs."""
        for process in reversed(processes):
            if process.returncode is None:
                process.kill()
                return

    async def suffer(self, planned: Planned) -> None:
        """Let one fault of the plan happen."""
        from tests.chaos.faults import FAULTS

        fault = FAULTS[planned.fault]
        about = {"fault": fault.name, "place": planned.place, "hits": fault.hits, "detail": planned.detail}
        self.journal.say("fault", planned=planned.at, **about)
        try:
            # On a busy machine Redis may need longer to start than was planned.
            async with self._redis_in_use if fault.hits == "redis" else contextlib.nullcontext():
                await fault.act(self, planned)
        finally:
            self.journal.say("fault over", planned=planned.at, **about)

    async def all_up(self) -> None:
        """Wait until every place has a worker that serves."""
        async with asyncio.timeout(START_TIMEOUT_S):
            while not all(place.up for place in self.places):
                await asyncio.sleep(PAUSE_S)

    def events(self) -> list[Any]:
        """Return what is in the journal."""
        return read(self.journal.path)


@contextlib.asynccontextmanager
async def cast(
    folder: Path, seed: int, *, places: int = 3, topology: str = "single", kind: str = "valkey"
) -> AsyncIterator[Cast]:
    """Bring everybody on; they all leave with the block."""
    guardian = Guardian()
    journal = Journal(folder / "journal", "driver")
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(guardian.close)
        server = TOPOLOGIES[topology](kind, folder / "server", guardian)
        stack.callback(server.close)
        ways = []
        if server.port is not None:
            ways = [await stack.enter_async_context(tcp_proxy(server.port)) for _ in range(places + 1)]
        urls = [way.url for way in ways[:places]] or [server.url] * places
        there = [Place(number, url, journal.path, seed, guardian) for number, url in enumerate(urls)]
        company = Cast(server, there, ways, journal)
        await company.configure(company.SETTINGS)
        for place in there:
            keeping = asyncio.create_task(place.keep())
            stack.push_async_callback(place.close)
            stack.push_async_callback(_end, keeping)
        await company.all_up()
        yield company


async def _python(module: str, *arguments: str, **streams: Any) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, *arguments, cwd=ROOT, env=os.environ, **streams
    )


async def _copy(reader: asyncio.StreamReader, file: Any) -> None:
    while data := await reader.read(65536):
        file.write(data)
        file.flush()


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _configure(client: redis.Redis, changes: Mapping[str, str]) -> None:
    from llmq.scheduler import scripts

    scripts.run_sync(client, scripts.configure(KEYS, dict(changes)))


def _free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
