"""The managed engine: an HTTP engine whose server llmq starts, watches, starts again when it dies, and stops.

To a worker it is an engine like any other. While its process is away or still loading, `probe` says so and `run` is
refused before anything is sent; so the worker's gate closes, and opens again once the new process is healthy and has
answered one request. It never ends a process for being slow: health is asked only of one that starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from llmq.scheduler.errors import EngineUnavailable, UsageError
from llmq.scheduler.job import Job
from llmq.workers.engines.base import EngineAnswer, EngineError, EngineGone, EngineInfo, EngineLoad, OnDelta
from llmq.workers.engines.engine_process import GRACE_S, EngineProcess, describe_exit
from llmq.workers.engines.http import HttpEngine
from llmq.workers.engines.launch import Launch
from llmq.workers.engines.probing import NobodyListens

#: Between two looks at an engine that loads its model.
LOOK_S = 0.25

#: When it is first said that an engine still loads; then after twice as long each time, at most this long.
FIRST_NOTE_S = 10.0
LONGEST_NOTE_S = 120.0

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0

#: An engine that was healthy for so long did not die of how it was started.
STABLE_S = 600.0

#: Deaths in a row after which only the longest pause is taken, and the user told that something is wrong.
MANY_DEATHS = 5

_WARM_UP = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


class Deaths:
    """Deaths in a row, and how long to wait after each; a life of `STABLE_S` in health starts the count again."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def pause(self, healthy_s: float) -> float:
        """Note a death after `healthy_s` seconds of health; return how long to wait before the next start."""
        self.in_a_row = 1 if healthy_s >= STABLE_S else self.in_a_row + 1
        if self.in_a_row >= MANY_DEATHS:
            return LONGEST_PAUSE_S
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (self.in_a_row - 1))


class ManagedEngine:
    """An engine that llmq runs itself. `start` it once; `close` ends it. `say` tells the user what happens to it.

    `log` is the file for what it prints (None: stderr); `held` are open files that it keeps open while it runs.
    """

    def __init__(
        self,
        launch: Launch,
        engine: HttpEngine,
        say: Callable[[str], None],
        *,
        log: Path | None = None,
        held: Sequence[int] = (),
        grace_s: float = GRACE_S,
    ) -> None:
        self._launch = launch
        self._engine = engine
        self._say = say
        self._log = log
        self._held = held
        self._grace_s = grace_s
        self._deaths = Deaths()
        self._process: EngineProcess | None = None
        self._ready = False
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> EngineInfo:
        """Start the engine and wait, however long it takes, until it is healthy and warm; return what it is.

        Raises UsageError where something listens at its URL already, EngineUnavailable, with its last words, where it
        ends before it is healthy. Close it also then.
        """
        await self._refuse_other()
        where = f"; its output: {self._log}" if self._log else ""
        self._say(f"starting {self._launch.name} at {self._launch.url}{where}")
        process = await self._launched()
        info = await self._healthy(process)
        if info is None:
            raise EngineUnavailable(
                f"{self._launch.name} ended before it was healthy ({describe_exit(await process.ended())})"
                f"{_quoted(process.last_words())}"
            )
        self._watch = asyncio.create_task(self._keep_alive(process))
        return info

    async def probe(self) -> EngineInfo:
        """Return what the engine is; raises EngineUnavailable while it is being started again."""
        if self._watch is not None and self._watch.done():
            self._watch.result()  # a fault of ours: nobody would start the engine again, so the worker has to end
        if not self._ready:
            raise EngineUnavailable(f"{self._launch.name} at {self._launch.url} is being started again")
        return await self._engine.probe()

    async def run(self, job: Job, on_delta: OnDelta | None = None) -> EngineAnswer:
        """Run one request to its end; refused as gone while the engine is being started again."""
        if not self._ready:
            raise EngineGone(f"{self._launch.name} at {self._launch.url} is being started again", in_flight=False)
        return await self._engine.run(job, on_delta)

    async def load(self) -> EngineLoad:
        """Return what runs and waits in the engine."""
        return await self._engine.load()

    async def close(self) -> None:
        """Stop the engine, and return when its process and all that it started have ended."""
        self._ready = False
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait([self._watch])
        if self._process is not None:
            if self._process.runs:
                self._say(f"stopping {self._launch.name}")
            if not await self._process.stop(self._grace_s):
                self._say(f"warning: {self._launch.name} does not end, not even by SIGKILL: look at the GPU's driver")
        await self._engine.close()

    async def _keep_alive(self, process: EngineProcess) -> None:
        """Start the engine again whenever it has died."""
        healthy_since = time.monotonic()
        while True:
            code = await process.ended()
            self._ready = False
            pause = self._deaths.pause(time.monotonic() - healthy_since)
            self._say(self._obituary(process, code, pause))
            await asyncio.sleep(pause)
            process = await self._launched_at_last()
            info = await self._healthy(process)
            healthy_since = time.monotonic()
            if info is not None:
                self._say(f"{self._launch.name} is healthy again")

    async def _launched(self) -> EngineProcess:
        # A task of its own: cancelled half-way, it would leave a process that nobody knows of.
        starting = asyncio.ensure_future(EngineProcess.start(self._launch, self._log, self._held, self._grace_s))
        try:
            self._process = await asyncio.shield(starting)
        except asyncio.CancelledError:
            self._process = await starting
            raise
        return self._process

    async def _launched_at_last(self) -> EngineProcess:
        """Start a process; where this host has none to give, try again."""
        while True:
            try:
                return await self._launched()
            except OSError as error:
                self._say(f"{self._launch.name} cannot be started now ({error}); trying again")
                await asyncio.sleep(LONGEST_PAUSE_S)

    async def _healthy(self, process: EngineProcess) -> EngineInfo | None:
        """Wait until the engine is healthy and has answered one request; None where it ends before."""
        coming, ending = asyncio.create_task(self._came_up()), asyncio.create_task(process.ended())
        try:
            await asyncio.wait([coming, ending], return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                return None
            self._ready = True
            return coming.result()
        finally:
            for task in (coming, ending):
                task.cancel()
            await asyncio.wait([coming, ending])

    async def _came_up(self) -> EngineInfo:
        """Probe until the engine is healthy, then send the request that is slow because it is the first."""
        while True:
            info = await self._probed()
            try:
                await self._engine.run(Job("/v1/chat/completions", _WARM_UP))
            except EngineGone:
                await asyncio.sleep(LOOK_S)  # it may be about to end
                continue
            except EngineError as error:
                self._say(f"note: the warm-up request of {self._launch.name} failed ({error}); going on")
            return info

    async def _probed(self) -> EngineInfo:
        began, note_s = time.monotonic(), FIRST_NOTE_S
        while True:
            fault = ""
            try:
                return await self._engine.probe()
            except NobodyListens:
                pass
            except EngineUnavailable as error:
                fault = f": {error}"
            if (waited := time.monotonic() - began) >= note_s:
                self._say(f"waiting for {self._launch.name} since {waited:.0f} s (Ctrl-C ends it){fault}")
                note_s = waited + min(waited, LONGEST_NOTE_S)
            await asyncio.sleep(LOOK_S)

    async def _refuse_other(self) -> None:
        parts = urlsplit(self._launch.url)
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                _, writer = await asyncio.open_connection(parts.hostname, parts.port)
                writer.close()
            raise UsageError(
                f"something listens at {self._launch.url} already: stop it, give the new engine another --port, or use "
                f"the one that is there: --engine {self._launch.url}, without --serve"
            )

    def _obituary(self, process: EngineProcess, code: int, pause: float) -> str:
        text = f"{self._launch.name} has ended ({describe_exit(code)}); starting it again in {pause:g} s"
        if self._deaths.in_a_row >= MANY_DEATHS:
            text += f"; it ended {self._deaths.in_a_row} times in a row: look at why{_quoted(process.last_words())}"
        return text


def _quoted(last_words: str) -> str:
    return f"; its last words:\n{last_words}" if last_words else ""
