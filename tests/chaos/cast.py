"""The cast: the processes of a chaos run, and the ways between them.

One store; a few places, each with a worker, the engine that it serves, and a way to Redis of its own; the clients' way.
Whoever dies is followed by another, so a fault has to do no more than kill. That a worker ends by itself is written
down: it never may.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import redis

from llmq.scheduler import scripts
from tests.chaos.faults import FAULTS, FAULTS_OF_SETS, LEASE_S
from tests.chaos.journal import Journal
from tests.chaos.plan import Planned
from tests.chaos.processes import Process
from tests.chaos.stalls import watch_for_stalls
from tests.chaos.store import TOPOLOGIES, Store
from tests.redis.serving import KEYS, until
from tests.servers import Guardian
from tests.system.tcp_proxy import TcpProxy, tcp_proxy

#: What a worker needs to start on a machine that is busy.
START_TIMEOUT_S = 60.0

#: What a worker may need to end well; the audit judges whether it needed too long.
LEAVE_S = 30.0

#: How often it is looked whether somebody has ended and must be followed.
PAUSE_S = 0.05


class Place:
    """Where one worker lives: its engine, and its way to Redis.

    `seed` is the engine's. With `simulated`, the URL of a simulated engine, there is none, and runs are not recorded.
    """

    def __init__(
        self, number: int, url: str, journal: Journal, seed: int, guardian: Guardian, simulated: str = ""
    ) -> None:
        self.number = number
        self.url = url
        self.worker: Process | None = None
        self.engine: Process | None = None
        self.up = False
        self._seed = seed
        self._guardian = guardian
        self._journal = journal
        self._started = 0
        self._simulated = simulated
        self._port = 0
        self._told_to_end: set[int] = set()
        self._hold_worker = 0
        self._hold_engine = 0

    @property
    def engine_url(self) -> str:
        """Where its engine listens."""
        return self._simulated or f"http://127.0.0.1:{self._port}"

    async def keep(self) -> None:
        """Start engine and worker again whenever they have ended, until cancelled."""
        while True:
            if not self._simulated and not self._hold_engine and _gone(self.engine):
                self._start_engine()
            if self.worker is not None and self.worker.returncode is not None:
                self._note_exit(self.worker)
            engine_up = self._simulated or (self.engine and self.engine.said("ready"))
            if engine_up and not self._hold_worker and self.worker is None:
                options = [self.url, str(self._journal.path), f"w{self.number}", self.engine_url]
                slots = ["--concurrency=64"] if self._simulated else []  # answers at once: what counts is the queue
                self.worker = self._process("tests.chaos.worker", *options, *slots)
            if self.worker is not None and not self.up:
                self._note_up(self.worker)
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
                    async with asyncio.timeout(LEAVE_S):
                        await process.wait()
                except TimeoutError:
                    process.kill()
                    await process.wait()
        if self.worker is not None:
            self._note_exit(self.worker)

    def _start_engine(self) -> None:
        self._port = self._port or _free_port()
        command = [str(self._port), str(self._journal.path), f"e{self.number}", str(self._seed)]
        self.engine = self._process("tests.chaos.engine", *command)

    def _process(self, module: str, *arguments: str) -> Process:
        self._started += 1
        name = f"{module.rpartition('.')[2]}-{self.number}-{self._started}.log"
        return Process(module, list(arguments), self._journal.path.parent / name, self._guardian)

    def _note_up(self, worker: Process) -> None:
        if line := worker.said("ready "):
            self.up = True
            self._journal.say("worker up", place=self.number, pid=worker.pid, worker=line.split()[1])

    def _note_exit(self, worker: Process) -> None:
        expected = worker.pid in self._told_to_end or not self.up
        self._journal.say("worker down", place=self.number, pid=worker.pid, status=worker.returncode, expected=expected)
        self.worker, self.up = None, False


class Cast:
    """All processes of a run, and what faults do to them."""

    #: Live settings of a run, which come back with a flush.
    SETTINGS: Mapping[str, str] = {"lease": str(round(LEASE_S * 1000)), "deadline": "2000"}

    def __init__(
        self, server: Store, places: list[Place], ways: list[TcpProxy], journal: Journal, guardian: Guardian
    ) -> None:
        self.server = server
        self.places = places
        self.journal = journal
        self.feeders: list[Process] = []
        self.collectors: list[Process] = []
        self.guardian = guardian
        self.suffered = 0
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
            together.hset(KEYS.config, items=[word for pair in self.SETTINGS.items() for word in pair])
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
        fault = FAULTS_OF_SETS.get(planned.fault) or FAULTS[planned.fault]
        about = {"fault": fault.name, "place": planned.place, "hits": fault.hits, "detail": planned.detail}
        if fault.hits == "redis" and self._redis_in_use.locked() and self.server.port is None:
            return  # a set that is not whole yet is left alone
        # On a busy machine Redis may need longer to start than was planned.
        async with self._redis_in_use if fault.hits == "redis" else contextlib.nullcontext():
            self.journal.say("fault", planned=planned.at, **about)
            try:
                await fault.act(self, planned)
            finally:
                self.suffered += 1
                self.journal.say("fault over", planned=planned.at, **about)

    async def all_up(self) -> None:
        """Wait until every place has a worker that serves."""
        await until(lambda: all(place.up for place in self.places), within=START_TIMEOUT_S)


@contextlib.asynccontextmanager
async def cast(
    folder: Path, seed: int, *, places: int = 3, topology: str = "single", kind: str = "valkey", simulated: str = ""
) -> AsyncIterator[Cast]:
    """Bring everybody on; they all leave with the block. `simulated` is the engines' URL, where they are simulated."""
    guardian = Guardian()
    journal = Journal(folder / "journal", "driver")
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(guardian.close)
        stack.callback(journal.close)
        stack.callback(watch_for_stalls(journal).set)
        server = TOPOLOGIES[topology](kind, folder / "server", guardian)
        stack.callback(server.close)
        ways = []
        if server.port is not None:
            ways = [await stack.enter_async_context(tcp_proxy(server.port)) for _ in range(places + 1)]
        urls = [way.url for way in ways[:places]] or [server.url] * places
        there = [Place(number, url, journal, seed, guardian, simulated) for number, url in enumerate(urls)]
        company = Cast(server, there, ways, journal, guardian)
        await company.configure(company.SETTINGS)
        for place in there:
            keeping = asyncio.create_task(place.keep())
            stack.push_async_callback(place.close)
            stack.push_async_callback(_end, keeping)
        await company.all_up()
        yield company


def _gone(process: Process | None) -> bool:
    return process is None or process.returncode is not None


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _configure(client: redis.Redis, changes: Mapping[str, str]) -> None:
    scripts.run_sync(client, scripts.configure(KEYS, dict(changes)))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
