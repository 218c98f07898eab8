"""The lease: a claimed job, and the outcome of its one attempt.

A `Lease` is what the claim script hands to a worker; its fence (lane, entry, delivery) stands in every later write of
that attempt. An `Outcome` says how the attempt went; the worker's executor makes it, the scheduler's `settle` writes
it. Both are values: nothing here touches Redis.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from llmq.scheduler.job import TrafficClass

#: In flight at this many deaths of its worker or its engine, a job goes to the dead letters.
MAX_CRASHES = 3


class Why(StrEnum):
    """Why the claim script started a job."""

    CHAT = "chat"
    BUCKET = "bucket"
    DEADLINE = "deadline"


class Fence(NamedTuple):
    """Names one attempt: this entry of this lane, in this delivery. Every write of the attempt is checked by it.

    A tuple, because what runs is looked up by it with every token: it is hashed five times as fast as a dataclass.
    """

    lane: str
    entry: str
    delivery: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A claimed job.

    `key` is the job's id (single jobs) or the line's custom_id (batches); `data` is the encoded job, undecoded, so
    that a malformed one can still be dead-lettered; `attempts`, `crashes` and `preemptions` count what came before
    this delivery; `cost` is the estimate in LLM tokens that was charged; `reply_to` is the client whose inbox is
    rung (single jobs); `queued_at` is when the job was submitted, in seconds on Redis' clock; `kept` is what an
    earlier attempt has made of the answer (`kept.py`), b"" for nothing.
    """

    fence: Fence
    cls: TrafficClass
    why: Why
    tenant: str
    key: str
    data: bytes
    cost: int
    attempts: int = 0
    crashes: int = 0
    preemptions: int = 0
    reply_to: str = ""
    queued_at: float = 0.0
    kept: bytes = b""

    @property
    def suspect(self) -> bool:
        """Whether the job was in flight when its worker or its engine died."""
        return self.crashes > 0

    @property
    def in_last_attempt(self) -> bool:
        """Whether one more death makes a dead letter of the job."""
        return self.crashes >= MAX_CRASHES - 1

    @property
    def batch_id(self) -> str | None:
        """The batch that the job is a line of; None for a single job."""
        return batch_of(self.fence.lane)

    @property
    def line(self) -> int:
        """The line's number in its file, from 1 (batches only: there the entry id is `<line>-0`)."""
        return int(self.fence.entry.partition("-")[0])

    def protected(self, preemptions_allowed: int = 3) -> bool:
        """Whether the running request may not be preempted: started by the deadline, or preempted often enough."""
        return self.why is Why.DEADLINE or self.preemptions >= preemptions_allowed


@dataclass(frozen=True, slots=True)
class Usage:
    """LLM tokens that an engine counted for one answer."""

    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def total(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


NO_USAGE = Usage()


@dataclass(frozen=True, slots=True)
class Answered:
    """The engine answered. `body` is its JSON, whole; a status of 400 or above is an answer too, but a failed one.

    `dead` is set when it is the last of several attempts that went wrong: the job goes to the dead letters as well.
    """

    status_code: int
    body: bytes
    request_id: str
    usage: Usage = NO_USAGE
    dead: bool = False


class ErrorCode(StrEnum):
    """Why a job ended without an engine's answer; the code of a batch's error line."""

    EXPIRED = "batch_expired"
    CANCELLED = "batch_cancelled"
    TIMEOUT = "request_timeout"
    INTERRUPTED = "interrupted"
    WORKER_LOST = "worker_lost"
    ENGINE_ERROR = "engine_error"
    RESULT_TOO_LARGE = "result_too_large"
    MALFORMED = "malformed_job"
    LOST = "lost"
    INVALID_LINE = "invalid_line"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Ended:
    """The attempt ends the job without an answer (expired, cancelled, interrupted, crashed too often, ...)."""

    code: ErrorCode
    message: str
    dead: bool = False


@dataclass(frozen=True, slots=True)
class Retry:
    """The attempt failed and another is allowed: it is spent, and the job is due again in `delay` seconds."""

    delay: float
    error: str
    crashed: bool = False
    """The engine died with the request in flight: counts as a crash (a suspect), not as an attempt."""


class Reason(StrEnum):
    """Why an unfinished job is handed back without spending an attempt."""

    SHUTDOWN = "shutdown"
    PREEMPTED = "preempted"
    OVERLOAD = "overload"
    ENGINE_GONE = "engine_gone"
    KEY_MISSING = "key_missing"


@dataclass(frozen=True, slots=True)
class HandedBack:
    """The job was not finished and no attempt is spent; it is due again at once, or in `delay` seconds.

    `kept` is what the next attempt may go on from (`kept.py`).
    """

    reason: Reason
    delay: float = 0.0
    kept: bytes = b""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The lease belongs to another attempt by now, or Redis is away for too long: there is nothing to write."""


Outcome = Answered | Ended | Retry | HandedBack | Abandoned

#: Names of lanes begin with the kind of what is in them: the lines of a batch, or single jobs of a class.
BATCH_LANE = "batch:"


def lane_of_batch(batch_id: str) -> str:
    """Return the lane of a batch's lines."""
    return f"{BATCH_LANE}{batch_id}"


def lane_of_tenant(cls: TrafficClass, tenant: str) -> str:
    """Return the lane of a tenant's single jobs of a class."""
    return f"{cls.letter}:{tenant}"


def tenant_of_lane(lane: str) -> tuple[TrafficClass, str]:
    """Return the class and the tenant of a lane of single jobs."""
    letter, _, tenant = lane.partition(":")
    return TrafficClass.INTERACTIVE if letter == TrafficClass.INTERACTIVE.letter else TrafficClass.BATCH, tenant


def batch_of(lane: str) -> str | None:
    """Return the batch whose lane this is; None for a lane of single jobs."""
    return lane.removeprefix(BATCH_LANE) if lane.startswith(BATCH_LANE) else None
