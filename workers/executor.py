"""The executor: runs one lease against the engine, to an outcome.

Lease in, outcome out. It decodes the job, asks the engine, passes deltas on, and sorts what went wrong into what
happens to the job next. It writes no outcome and claims nothing: the desk does.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from llmq.scheduler.errors import EncodingError
from llmq.scheduler.job import Job, TrafficClass
from llmq.scheduler.lease import (
    Abandoned,
    Answered,
    Ended,
    ErrorCode,
    Fence,
    HandedBack,
    Lease,
    Outcome,
    Reason,
    Retry,
)
from llmq.scheduler.live import LiveSettings
from llmq.workers.deltas import DeltaSender
from llmq.workers.engines.base import (
    AnswerTooLarge,
    Engine,
    EngineAnswer,
    EngineGone,
    EngineOverloaded,
    EngineUnclear,
)
from llmq.workers.gate import Gate

#: In flight at this many deaths of its worker or engine, a job goes to the dead letters.
MAX_CRASHES = 3

FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 60.0


class Stop(StrEnum):
    """Why a running request is aborted."""

    PREEMPTED = "preempted"
    SHUTDOWN = "shutdown"
    CANCELLED = "cancelled"
    LOST = "lost"


@dataclass(slots=True, eq=False)
class Running:
    """One request in flight. `started_at` is on the monotonic clock."""

    lease: Lease
    task: asyncio.Task[object]
    started_at: float = field(default_factory=time.monotonic)
    chunks: int = 0
    streamed: bool = False
    in_engine: bool = False
    stop: Stop | None = None


class Executor:
    """Runs leases, any number at once, and can stop each of them."""

    def __init__(
        self,
        engine: Engine,
        gate: Gate,
        deltas: DeltaSender,
        settings: Callable[[], LiveSettings],
        on_begun: Callable[[Lease], None] = lambda lease: None,
    ) -> None:
        self._engine = engine
        self._gate = gate
        self._deltas = deltas
        self._settings = settings
        self._on_begun = on_begun
        self.running: dict[Fence, Running] = {}

    async def run(self, lease: Lease) -> Outcome:
        """Run one lease to its outcome. Never raises for what an engine does."""
        task = asyncio.current_task()
        assert task is not None
        running = self.running[lease.fence] = Running(lease, task)
        try:
            job = Job.decode(lease.data)
        except EncodingError as error:
            return Ended(ErrorCode.MALFORMED, f"the stored job cannot be read: {error}", dead=True)
        else:
            return await self._ask(running, job)
        finally:
            del self.running[lease.fence]

    def stop(self, fence: Fence, why: Stop) -> bool:
        """Abort a running request; its `run` returns what becomes of the job. False where it is not running."""
        running = self.running.get(fence)
        if running is None or running.stop is not None or not running.in_engine:
            return False
        running.stop = why
        running.task.cancel()
        return True

    async def _ask(self, running: Running, job: Job) -> Outcome:
        lease = running.lease

        def on_delta(text: str, chunk: bytes) -> None:
            # The first chunk names the role only; whatever follows is made by the model, with or without text.
            if not running.streamed and (text or running.chunks):
                running.streamed = True
                self._on_begun(lease)
            running.chunks += 1
            self._deltas.send(lease, text, chunk)

        running.in_engine = True
        try:
            answer = await self._engine.run(job, on_delta)
            running.in_engine = False
            return await self._answered(lease, answer)
        except asyncio.CancelledError:
            running.in_engine = False
            if running.stop is None:
                raise
            running.task.uncancel()
            return self._stopped(running, running.stop)
        except EngineOverloaded as error:
            return self._overloaded(running, error)
        except EngineGone as error:
            return self._gone(running, error)
        except EngineUnclear as error:
            return self._unclear(running, error)
        except AnswerTooLarge as error:
            return Ended(ErrorCode.RESULT_TOO_LARGE, str(error))
        except Exception as error:
            # A fault of the engine module: it may not take the worker, and every other request, down with it.
            return self._unclear(running, EngineUnclear(f"{type(error).__name__}: {error}"))
        finally:
            running.in_engine = False
            self._deltas.forget(lease.fence)

    async def _answered(self, lease: Lease, answer: EngineAnswer) -> Outcome:
        if lease.reply_to:  # the end may not overtake the deltas
            await self._deltas.flushed(lease.fence)
        return Answered(answer.status_code, answer.body, answer.request_id, answer.usage)

    def _stopped(self, running: Running, why: Stop) -> Outcome:
        match why:
            case Stop.LOST:
                return Abandoned()
            case Stop.CANCELLED:
                return Ended(ErrorCode.CANCELLED, "the job was cancelled while it ran")
            case _ if _begun(running):
                return Ended(ErrorCode.INTERRUPTED, f"the worker stopped ({why}) after the answer had begun")
            case Stop.PREEMPTED:
                return HandedBack(Reason.PREEMPTED)
            case Stop.SHUTDOWN:
                return HandedBack(Reason.SHUTDOWN)

    def _overloaded(self, running: Running, error: EngineOverloaded) -> Outcome:
        batch = sum(1 for other in self.running.values() if other.lease.cls is TrafficClass.BATCH)
        pause = self._gate.overloaded(time.monotonic(), batch, error.retry_after)
        if _begun(running):
            return Ended(ErrorCode.INTERRUPTED, f"the engine refused to go on: {error}")
        return HandedBack(Reason.OVERLOAD, pause)

    def _gone(self, running: Running, error: EngineGone) -> Outcome:
        self._gate.lost()
        if _begun(running):
            return Ended(ErrorCode.INTERRUPTED, f"the engine died after the answer had begun: {error}")
        if not error.in_flight:
            return HandedBack(Reason.ENGINE_GONE)
        if running.lease.crashes + 1 >= MAX_CRASHES:
            message = f"in flight at {MAX_CRASHES} deaths of its worker or engine; the last: {error}"
            return Ended(ErrorCode.WORKER_LOST, message, dead=True)
        return Retry(0.0, str(error), crashed=True)

    def _unclear(self, running: Running, error: EngineUnclear) -> Outcome:
        if _begun(running):
            return Ended(ErrorCode.INTERRUPTED, f"the answer broke off: {error}")
        lease, settings = running.lease, self._settings()
        interactive = lease.cls is TrafficClass.INTERACTIVE
        allowed = settings.attempts_interactive if interactive else settings.attempts_batch
        if lease.attempts + 1 < allowed:
            return Retry(retry_delay(lease.attempts), str(error))
        if error.status_code is not None:
            return Answered(error.status_code, error.body or b"null", "", dead=True)
        return Ended(ErrorCode.ENGINE_ERROR, f"{allowed} attempts failed; the last: {error}", dead=True)


def _begun(running: Running) -> bool:
    """Whether an interactive answer has begun: it is never begun a second time (G18)."""
    return running.streamed and running.lease.cls is TrafficClass.INTERACTIVE


def retry_delay(attempts: int, rng: Callable[[], float] = random.random) -> float:
    """Return the seconds until the next attempt: 0.5 doubling to 60, and up to half of it more, never less."""
    delay: float = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0**attempts)
    return delay * (1 + rng() / 2)
