"""An engine with a meter: it passes everything through, and counts the tokens of batch requests as they come.

The same meter stands in every phase of a trial, so that tokens are counted alike whoever sends the requests. Which
requests are batch it sees by their field `user`: the engine's side of a request knows no traffic class.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from llmq.scheduler.job import Job
from llmq.workers.engines.base import Engine, EngineAnswer, EngineInfo, EngineLoad, OnDelta

#: What the field `user` of a batch request says.
BATCH_USER = "llmq-trial-batch"


@dataclass(slots=True)
class Meter:
    """What was counted: tokens of batch requests, and how many of these run; `quiet` is set while none does."""

    tokens: int = 0
    running: int = 0
    quiet: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        """None runs yet."""
        self.quiet.set()

    def begun(self) -> None:
        """Count a request that runs from now on."""
        self.running += 1
        self.quiet.clear()

    def ended(self) -> None:
        """Count a request that runs no longer."""
        self.running -= 1
        if not self.running:
            self.quiet.set()


class MeteredEngine:
    """Another engine, metered."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.meter = Meter()

    async def probe(self) -> EngineInfo:
        """Probe the engine."""
        return await self._engine.probe()

    async def run(self, job: Job, on_delta: OnDelta | None = None) -> EngineAnswer:
        """Run one request, and count its tokens where it is batch."""
        if job.body.get("user") != BATCH_USER:
            return await self._engine.run(job, on_delta)
        meter, pieces = self.meter, 0

        def count(text: str, chunk: bytes) -> None:
            nonlocal pieces
            pieces += 1
            if text or pieces > 1:  # the first piece of a chat answer names its role only
                meter.tokens += 1
            if on_delta is not None:
                on_delta(text, chunk)

        meter.begun()
        try:
            return await self._engine.run(job, count)
        finally:
            meter.ended()

    async def load(self) -> EngineLoad:
        """Ask the engine what it runs."""
        return await self._engine.load()

    async def close(self) -> None:
        """Leave the engine open: who made it closes it."""
