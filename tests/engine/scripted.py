"""An engine that does what a test tells it to: each request waits for its answer, its failure, or its end.

request = await engine.next()
request.say("Hel")
request.answer()
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from llmq.scheduler.errors import EngineUnavailable
from llmq.scheduler.job import Job
from llmq.scheduler.lease import Usage
from llmq.workers.engines.base import EngineAnswer, EngineInfo, EngineLoad, OnDelta


class Request:
    """One request in the engine; `aborted` is set when its call was cancelled."""

    def __init__(self, job: Job, on_delta: OnDelta | None) -> None:
        self.job = job
        messages = job.body.get("messages")
        self.prompt = str(messages[0]["content"] if messages else job.body.get("prompt", job.body.get("input")))
        self.aborted = asyncio.Event()
        self._on_delta = on_delta
        self._end: asyncio.Future[EngineAnswer] = asyncio.get_running_loop().create_future()

    def say(self, text: str, chunk: bytes = b"{}") -> None:
        """Let a piece of the answer come."""
        assert self._on_delta is not None, "nobody listens to this request"
        self._on_delta(text, chunk)

    def answer(self, status: int = 200, body: bytes = b'{"ok":true}') -> None:
        """Let the answer be whole."""
        if not self._end.done():
            self._end.set_result(EngineAnswer(status, body, "request-1", Usage(3, 4)))

    def fail(self, error: Exception) -> None:
        """Let the request fail."""
        if not self._end.done():
            self._end.set_exception(error)

    async def end(self) -> EngineAnswer:
        """Wait for what the test decides."""
        try:
            return await self._end
        except asyncio.CancelledError:
            self.aborted.set()
            raise


class ScriptedEngine:
    """An engine in the hands of a test; `on_request` answers by itself where the test does not want to."""

    def __init__(self, slots: int = 4, on_request: Callable[[Request], None] | None = None) -> None:
        self.slots = slots
        self.healthy = True
        self.probes = 0
        self.started: list[Request] = []
        self.running: list[Request] = []
        self.most_running = 0
        self.on_request = on_request
        self._new: asyncio.Queue[Request] = asyncio.Queue()

    @property
    def prompts(self) -> list[str]:
        """The prompts of all requests so far, in the order of their start."""
        return [request.prompt for request in self.started]

    async def next(self) -> Request:
        """Wait for the next request to start."""
        async with asyncio.timeout(20):
            return await self._new.get()

    async def probe(self) -> EngineInfo:
        """Return what this is; raises EngineUnavailable while it is not `healthy`."""
        self.probes += 1
        if not self.healthy:
            raise EngineUnavailable("the scripted engine is down")
        return EngineInfo("scripted", "scripted://", ("model",), self.slots)

    async def run(self, job: Job, on_delta: OnDelta | None = None) -> EngineAnswer:
        """Run a request as the test wants it."""
        request = Request(job, on_delta)
        self.started.append(request)
        self.running.append(request)
        self.most_running = max(self.most_running, len(self.running))
        try:
            if self.on_request is not None:
                self.on_request(request)
            else:
                self._new.put_nowait(request)
            return await request.end()
        finally:
            self.running.remove(request)

    async def load(self) -> EngineLoad:
        """Return what runs."""
        return EngineLoad(running=len(self.running))

    async def close(self) -> None:
        """Nothing to close."""
