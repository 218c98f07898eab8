"""A worker of the cast: llmq's own, in a process of its own, which writes into the journal what it runs.

    python -m tests.chaos.worker URL JOURNAL NAME ENGINE_URL [--concurrency N] [--grace S]

Each lease is written down when a slot begins with it and when it has its outcome, unless the engine is simulated.
SIGUSR1 and SIGUSR2 make the wall clock of this process, and of nothing else, jump an hour on and an hour back.
`CHAOS_GUARD_OFF` names a guard of llmq that is turned off in here (`guards.py`). Nothing of this is in the product.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

from llmq.scheduler.lease import Answered, Ended, Lease, Outcome
from llmq.workers import contact
from llmq.workers.engines.base import Engine
from llmq.workers.engines.http import HttpEngine
from llmq.workers.engines.sim import SimEngine
from llmq.workers.executor import Executor
from llmq.workers.shutdown import Shutdown
from llmq.workers.worker import Worker, WorkerOptions
from tests.chaos import guards
from tests.chaos.engine import run_of
from tests.chaos.journal import Journal
from tests.chaos.stalls import watch_for_stalls

#: The contact that must come before the first reclaim. The product's 5 s is for leases that are made shorter.
LEAST_CONTACT_S = 1.0

JUMP_S = 3600.0


def record_runs(journal: Journal) -> None:
    """Write into the journal what every executor of this process runs."""
    run = Executor.run

    async def recorded(self: Executor, lease: Lease) -> Outcome:
        fence = {
            "pid": os.getpid(),
            "lane": lease.fence.lane,
            "entry": lease.fence.entry,
            "delivery": lease.fence.delivery,
        }
        journal.say("began", key=lease.key, why=lease.why.value, crashes=lease.crashes, **fence)
        outcome = await run(self, lease)
        journal.say("outcome", key=lease.key, what=type(outcome).__name__, **details(outcome), **fence)
        return outcome

    Executor.run = recorded  # type: ignore[method-assign]


def details(outcome: Outcome) -> dict[str, Any]:
    """Return what is worth writing down of an outcome: above all, the run that an answer is from."""
    match outcome:
        case Answered(status_code=status, body=body):
            return {"status": status, "run": run_of(body)}
        case Ended(code=code):
            return {"code": code.value}
        case _:
            return {"reason": str(getattr(outcome, "reason", "")), "crashed": bool(getattr(outcome, "crashed", False))}


def let_the_clock_jump(journal: Journal) -> None:
    """Let SIGUSR1 and SIGUSR2 move what this process takes for the time of day."""
    true, offset = time.time, 0.0

    def jump(number: int, _frame: object) -> None:
        nonlocal offset
        offset += JUMP_S if number == signal.SIGUSR1 else -JUMP_S
        journal.say("clock", offset=offset)

    time.time = lambda: true() + offset
    signal.signal(signal.SIGUSR1, jump)
    signal.signal(signal.SIGUSR2, jump)


async def serve(url: str, engine: Engine, options: WorkerOptions, journal: Journal) -> None:
    """Serve until asked to stop."""
    shutdown = Shutdown()
    shutdown.on_signals()
    try:
        worker = await Worker.start(url, engine, await engine.probe(), options, shutdown)
        journal.say("up", worker=worker.id)
        try:
            await worker.run()
        finally:
            await worker.close()
        journal.say("down", worker=worker.id)
    finally:
        await engine.close()


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("journal", type=Path)
    parser.add_argument("name")
    parser.add_argument("engine")
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--reserve", type=int)
    parser.add_argument("--grace", type=float, default=1.0)
    given = parser.parse_args()
    contact.LEAST_CONTACT_S = LEAST_CONTACT_S
    journal = Journal(given.journal, given.name)
    watch_for_stalls(journal, given.url if given.url.startswith("redis://") else "")
    let_the_clock_jump(journal)
    simulated = given.engine.startswith("sim:")
    if not simulated:
        record_runs(journal)
    guards.turn_off(os.environ.get("CHAOS_GUARD_OFF", ""))
    options = WorkerOptions(concurrency=given.concurrency, reserve=given.reserve, grace=given.grace)
    engine = SimEngine.from_url(given.engine) if simulated else HttpEngine(given.engine)
    asyncio.run(serve(given.url, engine, options, journal))


if __name__ == "__main__":
    main()
