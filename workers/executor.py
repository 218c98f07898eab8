"""The executor: runs one lease against the engine, to an outcome.

Lease in, outcome out. It decodes the job, asks the engine, passes deltas on, and sorts what went wrong into what
happens to the job next. It writes no outcome and claims nothing: the desk does.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol, assert_never

from llmq.scheduler.cipher import PLAIN, Cipher, answer_of, beginning_of, error_of, owner_of, request_of
from llmq.scheduler.errors import EncodingError, KeyMissing, LLMQError
from llmq.scheduler.job import Job, TrafficClass
from llmq.scheduler.kept import Kept
from llmq.scheduler.keyring import key_id_of
from llmq.scheduler.lease import (
    MAX_CRASHES,
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
from llmq.scheduler.logs import Event, note
from llmq.workers.continuing import Draft, continuable, continued, joined, kept_of, model_of
from llmq.workers.deltas import DeltaSender
from llmq.workers.engines.asking import behind_chat
from llmq.workers.engines.base import (
    AnswerTooLarge,
    Engine,
    EngineAnswer,
    EngineGone,
    EngineInfo,
    EngineOverloaded,
    EngineUnclear,
    OnDelta,
)
from llmq.workers.gate import Gate

#: What an outcome says of an error: enough for a person, and no engine's whole page.
LONGEST_MESSAGE = 2000

#: When batch goes on after a second refusal, others come first for so long: were it always the refused line, which
#: stands before all that have not started, one that is refused for itself would let no other run.
OTHERS_FIRST_S = 1.5

#: A job that is encrypted with a key that is not here waits for a worker that has it: rarely looked at here again.
FIRST_KEY_WAIT_S = 15.0
LONGEST_KEY_WAIT_S = 600.0

FIRST_RETRY_S = 0.5
LONGEST_RETRY_S = 60.0


class Stop(StrEnum):
    """Why a running request is aborted."""

    PREEMPTED = "preempted"
    SHUTDOWN = "shutdown"
    CANCELLED = "cancelled"
    LOST = "lost"
    OVERDUE = "overdue"


@dataclass(slots=True, eq=False)
class Running:
    """One request in flight. `started_at` is on the monotonic clock."""

    lease: Lease
    task: asyncio.Task[object]
    started_at: float = field(default_factory=time.monotonic)
    tokens: int = 0
    """Pieces of the answer that came: about its tokens."""
    draft: Draft | None = None
    """The answer to a batch line so far; None where one that is cut off cannot be continued."""
    model: str = ""
    kept: Kept | None = None
    """What an earlier attempt made of the answer, where this one goes on from it."""
    in_engine: bool = False
    protected: bool = False
    """Not to be preempted: the deadline counts its start (what the lease itself says comes on top)."""
    stop: Stop | None = None


class TokenCounter(Protocol):
    """Who is told what the tokens of running requests become."""

    def begun(self, lease: Lease) -> Callable[[], None]:
        """The first piece of an answer came; return what is called with each other one."""

    def cut_off(self, kept: int, wasted: int) -> None:
        """A preempted request had made so many: kept for its next attempt, or thrown away."""


class Executor:
    """Runs leases, any number at once, and can stop each of them."""

    def __init__(
        self,
        engine: Engine,
        gate: Gate,
        deltas: DeltaSender,
        settings: Callable[[], LiveSettings],
        engine_info: Callable[[], EngineInfo],
        counter: TokenCounter,
        on_begun: Callable[[Lease], None] = lambda lease: None,
        cipher: Cipher = PLAIN,
    ) -> None:
        self._engine = engine
        self._gate = gate
        self._deltas = deltas
        self._settings = settings
        self._engine_info = engine_info
        self._counter = counter
        self._on_begun = on_begun
        self._cipher = cipher
        self.running: dict[Fence, Running] = {}

    async def run(self, lease: Lease) -> Outcome:
        """Run one lease to its outcome. Never raises for what an engine does."""
        task = asyncio.current_task()
        assert task is not None
        running = self.running[lease.fence] = Running(lease, task)
        try:
            job = Job.decode(self._decrypted(lease))
        except KeyMissing:
            # Another worker may have the key; to end it here would lose what somebody can still run.
            return HandedBack(Reason.KEY_MISSING, min(LONGEST_KEY_WAIT_S, FIRST_KEY_WAIT_S * lease.fence.delivery))
        except EncodingError as error:
            return Ended(ErrorCode.MALFORMED, _sayable(f"the stored job cannot be read: {error}"), dead=True)
        else:
            batch = lease.cls is TrafficClass.BATCH
            outcome = await self._ask(running, behind_chat(job, self._engine_info()) if batch else job)
            return self._encrypted(lease, outcome)
        finally:
            del self.running[lease.fence]

    def _decrypted(self, lease: Lease) -> bytes:
        return (
            lease.data
            if key_id_of(lease.data) is None
            else self._cipher.decrypt(lease.data, request_of(owner_of(lease)))
        )

    def _encrypted(self, lease: Lease, outcome: Outcome) -> Outcome:
        """Return an outcome as it is stored: with the key of its request, which who asked can read, or as it is."""
        key_id = key_id_of(lease.data)
        if key_id is None:
            return outcome
        owner = owner_of(lease)
        match outcome:
            case Answered(body=body):
                return replace(outcome, body=self._cipher.encrypt(body, answer_of(owner), key_id))
            case Ended(message=message):
                return replace(outcome, message=self._cipher.encrypt_text(message, error_of(owner), key_id))
            case HandedBack(kept=kept) if kept:
                return replace(outcome, kept=self._cipher.encrypt(kept, beginning_of(owner), key_id))
            case _:
                return outcome

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
        # Nobody waits for the pieces of a batch line; they are counted, and kept in case it is cut off.
        sends = bool(lease.reply_to) or lease.cls is TrafficClass.INTERACTIVE
        if not sends and self._settings().resume and continuable(job):
            running.draft, running.model = Draft(), model_of(job, self._engine_info())
        on_delta = self._listener(running, sends=sends)
        running.in_engine = True
        try:
            answer = await self._run_on(running, job, on_delta) if running.draft and lease.kept else None
            if answer is None:
                answer = await self._engine.run(job, on_delta)
            running.in_engine = False
            return await self._answered(lease, answer)
        except asyncio.CancelledError:
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
            return Ended(ErrorCode.RESULT_TOO_LARGE, _sayable(str(error)))
        except Exception as error:
            # A fault of the engine module: it may not take the worker, and every other request, down with it.
            return self._unclear(running, EngineUnclear(f"{type(error).__name__}: {error}"))
        finally:
            running.in_engine = False
            self._deltas.forget(lease.fence)

    def _listener(self, running: Running, *, sends: bool) -> OnDelta:
        """Return who hears the pieces of an answer."""
        lease = running.lease
        send = self._deltas.outlet(lease) if sends else None
        token: Callable[[], None] | None = None
        came = False

        def on_delta(text: str, chunk: bytes) -> None:
            nonlocal token, came
            if token is not None:
                running.tokens += 1
                token()
            elif text or came:  # as the sender of deltas sees it
                running.tokens = 1
                token = self._counter.begun(lease)
                self._on_begun(lease)
            came = True
            if send is not None:
                send(text, chunk)
            elif running.draft is not None:
                running.draft.add(text, chunk)

        return on_delta

    async def _run_on(self, running: Running, job: Job, on_delta: OnDelta) -> EngineAnswer | None:
        """Go on with an answer that was cut off; None where it has to begin anew."""
        kept = self._kept(running.lease)
        rest = continued(job, kept, self._engine_info()) if kept is not None else None
        if kept is None or rest is None:
            return None
        running.kept = kept
        answer = await self._engine.run(rest, on_delta)
        if answer.status_code < 400:
            return joined(answer, kept)
        # What the engine refuses may be what was put behind the request, not the request.
        running.kept, running.draft = None, Draft()
        return None

    def _kept(self, lease: Lease) -> Kept | None:
        try:
            return Kept.decode(self._cipher.decrypt(lease.kept, beginning_of(owner_of(lease))))
        except LLMQError:
            return None  # a key that is gone, or bytes that somebody changed: it begins anew

    async def _answered(self, lease: Lease, answer: EngineAnswer) -> Outcome:
        self._gate.answered(_job_of(lease))
        if lease.reply_to:  # the end may not overtake the deltas
            await self._deltas.flushed(lease.fence)
        return Answered(answer.status_code, answer.body, _sayable(answer.request_id), answer.usage)

    def _stopped(self, running: Running, why: Stop) -> Outcome:
        match why:
            case Stop.LOST:
                return Abandoned()
            case Stop.CANCELLED:
                return Ended(ErrorCode.CANCELLED, "the job was cancelled while it ran")
            case _ if _begun(running):
                return Ended(ErrorCode.INTERRUPTED, f"the worker stopped ({why}) after the answer had begun")
            case Stop.PREEMPTED:
                kept = self._keep(running)
                self._counter.cut_off(*((running.tokens, 0) if kept else (0, running.tokens)))
                return HandedBack(Reason.PREEMPTED, kept=kept)
            case Stop.SHUTDOWN | Stop.OVERDUE:
                return HandedBack(Reason.SHUTDOWN, kept=self._keep(running))
            case _:
                assert_never(why)

    def _keep(self, running: Running) -> bytes:
        """Return what the next attempt may go on from."""
        text = running.draft.text() if running.draft is not None else None
        if text is None:
            return b""
        kept = kept_of(running.kept, text, running.tokens, running.model)
        return kept.encode() if kept is not None else b""

    def _overloaded(self, running: Running, error: EngineOverloaded) -> Outcome:
        batch = sum(1 for other in self.running.values() if other.lease.cls is TrafficClass.BATCH)
        lease, now = running.lease, time.monotonic()
        if not self._gate.paused(now):  # refusals that come together are one overload
            note(Event.OVERLOADED, running_batch=batch, retry_after_s=error.retry_after)
        pause = self._gate.overloaded(now, batch, error.retry_after, _job_of(lease))
        if _begun(running):
            return Ended(ErrorCode.INTERRUPTED, _sayable(f"the engine refused to go on: {error}"))
        if lease.cls is TrafficClass.BATCH and lease.fence.delivery > 1:
            pause += OTHERS_FIRST_S
        return HandedBack(Reason.OVERLOAD, pause)

    def _gone(self, running: Running, error: EngineGone) -> Outcome:
        self._gate.lost()
        if _begun(running):
            return Ended(ErrorCode.INTERRUPTED, _sayable(f"the engine died after the answer had begun: {error}"))
        if not error.in_flight:
            return HandedBack(Reason.ENGINE_GONE)
        if running.lease.in_last_attempt:
            message = f"in flight at {MAX_CRASHES} deaths of its worker or engine; the last: {error}"
            return Ended(ErrorCode.WORKER_LOST, _sayable(message), dead=True)
        return Retry(0.0, _sayable(str(error)), crashed=True)

    def _unclear(self, running: Running, error: EngineUnclear) -> Outcome:
        if _begun(running):
            return Ended(ErrorCode.INTERRUPTED, _sayable(f"the answer broke off: {error}"))
        lease, settings = running.lease, self._settings()
        interactive = lease.cls is TrafficClass.INTERACTIVE
        allowed = settings.attempts_interactive if interactive else settings.attempts_batch
        if lease.attempts + 1 < allowed:
            return Retry(retry_delay(lease.attempts), _sayable(str(error)))
        # What came with a status of success and is no answer (a garbled stream, a redirect) may not count as one; and
        # no client takes a status of 700.
        if error.status_code is not None and 400 <= error.status_code < 600:
            return Answered(error.status_code, error.body or b"null", "", dead=True)
        message = _sayable(f"{allowed} attempts failed; the last: {error}")
        return Ended(ErrorCode.ENGINE_ERROR, message, dead=True)


def _job_of(lease: Lease) -> tuple[str, str]:
    """Return what names a job over all its deliveries."""
    return lease.fence.lane, lease.fence.entry


def _begun(running: Running) -> bool:
    """Whether an interactive answer has begun: it is never begun a second time (G18)."""
    return running.tokens > 0 and running.lease.cls is TrafficClass.INTERACTIVE


def _sayable(text: str) -> str:
    """Return a text that Redis can store: what an engine says may be long, or hold half of a surrogate pair."""
    return text[:LONGEST_MESSAGE].encode(errors="replace").decode()


def retry_delay(attempts: int, rng: Callable[[], float] = random.random) -> float:
    """Return the seconds until the next attempt: 0.5 doubling to 60, and up to half of it more, never less."""
    delay: float = min(LONGEST_RETRY_S, FIRST_RETRY_S * 2.0 ** min(attempts, 10))
    return delay * (1 + rng() / 2)
