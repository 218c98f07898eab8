"""A worker in a process of its own, for tests that kill, freeze and drain it.

    with worker_process(url, log, "sim://?instant=1") as worker:
        worker.process.kill()

The simulated engine writes each prompt that it is asked into `log`, so that a test can count runs over many processes;
a prompt that holds `poison` kills the process that runs it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from llmq.scheduler.job import Job
from llmq.workers import contact
from llmq.workers.engines.base import EngineAnswer, OnDelta
from llmq.workers.engines.sim import SimEngine
from llmq.workers.shutdown import Shutdown
from llmq.workers.worker import WorkerOptions, serve

ROOT = Path(__file__).parents[2]
START_TIMEOUT = 30.0
POISON = "poison"


@dataclass
class WorkerProcess:
    """A running worker; `worker_id` is its name in the queue."""

    process: subprocess.Popen[bytes]
    worker_id: str

    def kill(self) -> None:
        """SIGKILL, as the out-of-memory killer would."""
        self.process.kill()
        self.process.wait()

    def terminate(self) -> None:
        """SIGTERM: drain."""
        self.process.send_signal(signal.SIGTERM)

    def freeze(self) -> None:
        """SIGSTOP: the process stands still, its connections stay open."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT: it goes on."""
        self.process.send_signal(signal.SIGCONT)


@contextmanager
def worker_process(
    url: str, log: Path, engine: str, *, concurrency: int = 4, grace: float = 10.0, least_contact: float | None = None
) -> Iterator[WorkerProcess]:
    """Start a worker, and return when it is ready; it is killed at the end of the block."""
    options = [f"--concurrency={concurrency}", f"--grace={grace}"]
    options += [] if least_contact is None else [f"--least-contact={least_contact}"]
    command = [sys.executable, "-m", "tests.system.worker_process", url, str(log), engine, *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT)
    try:
        yield WorkerProcess(process, _ready(process))
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.communicate()


def runs(log: Path) -> list[str]:
    """Return the prompts that engines were asked so far."""
    return log.read_text().splitlines() if log.exists() else []


def _ready(process: subprocess.Popen[bytes]) -> str:
    assert process.stderr is not None
    deadline = time.monotonic() + START_TIMEOUT
    while select.select([process.stderr], [], [], max(0.0, deadline - time.monotonic()))[0]:
        line = process.stderr.readline().decode()
        if line.startswith("ready "):
            return line.split()[1]
        if not line:
            raise RuntimeError(f"the worker ended with status {process.wait()} before it was ready")
    raise RuntimeError(f"the worker was not ready within {START_TIMEOUT:g} s")


class _LoggingEngine(SimEngine):
    """A simulated engine that writes down what it is asked, and dies of poison."""

    log = Path(os.devnull)

    async def run(self, job: Job, on_delta: OnDelta | None = None) -> EngineAnswer:
        prompt = str(job.body["messages"][0]["content"])
        with self.log.open("a") as log:
            log.write(prompt + "\n")
        if POISON in prompt:
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().run(job, on_delta)


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("log", type=Path)
    parser.add_argument("engine")
    parser.add_argument("--concurrency", type=int)
    parser.add_argument("--grace", type=float)
    parser.add_argument("--least-contact", type=float, default=contact.LEAST_CONTACT_S)
    given = parser.parse_args()
    contact.LEAST_CONTACT_S = given.least_contact
    engine = _LoggingEngine.from_url(given.engine)
    engine.log = given.log  # type: ignore[attr-defined]
    shutdown = Shutdown()
    shutdown.on_signals()
    await serve(given.url, engine, WorkerOptions(concurrency=given.concurrency, grace=given.grace, reserve=0), shutdown)
    await engine.close()


if __name__ == "__main__":
    asyncio.run(_main())
