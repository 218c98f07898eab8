"""A worker whose engine tells when jobs start: `python -m bench.worker URL`, one process.

A job that carries the moment at which it was sent is answered at once, and how long it took from there to here is
printed, one line a job. Any other job takes `--sleep` seconds, or what the `--engine` makes of it.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from bench.jobs import sent_at
from llmq.cli.running import run_async
from llmq.scheduler.job import Job
from llmq.workers.engines.base import EngineAnswer, OnDelta
from llmq.workers.engines.sim import SimEngine
from llmq.workers.shutdown import Shutdown
from llmq.workers.worker import WorkerOptions, serve

INSTANT = SimEngine.from_url("sim://?instant=1")


class TimingEngine:
    """A simulated engine that tells how long jobs were on their way to it."""

    def __init__(self, inner: SimEngine, sleep: float) -> None:
        self._inner = inner
        self._sleep = sleep
        self.probe = inner.probe
        self.load = inner.load
        self.close = inner.close

    async def run(self, job: Job, on_delta: OnDelta | None = None) -> EngineAnswer:
        """Run one request."""
        if (sent := sent_at(job.body)) is not None:
            print(time.monotonic() - sent, flush=True)
            return await INSTANT.run(job, on_delta)
        if self._sleep:
            await asyncio.sleep(self._sleep)
            return await INSTANT.run(job, on_delta)
        return await self._inner.run(job, on_delta)


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--reserve", type=int, default=0)
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--engine", default="sim")
    given = parser.parse_args()
    engine = TimingEngine(SimEngine.from_url(given.engine), given.sleep)
    options = WorkerOptions(concurrency=given.slots, reserve=given.reserve)
    shutdown = Shutdown()
    run_async(lambda: serve(given.url, engine, options, shutdown), shutdown)


if __name__ == "__main__":
    main()
