"""Every error that llmq raises, as one tree.

    LLMQError
    ├── UsageError            what the caller gave cannot be used            exit 2
    │   ├── EncodingError     a value of a job cannot be stored faithfully
    │   │   └── TamperedError   what was stored encrypted was changed since
    │   ├── InputFileError    a file of prompts has bad lines
    │   ├── KeyMissing        what is stored is encrypted with a key that is not here
    │   └── SettingsError     a flag, variable or llmq.toml entry is wrong
    ├── NotFoundError         no such job, batch, worker                     exit 2
    ├── RedisUnavailable      Redis cannot be reached or cannot be used      exit 4
    │   └── RedisFull         it uses all its maxmemory and takes no more
    ├── EngineUnavailable     no usable inference engine                     exit 4
    ├── WorkerUnhealthy       a worker does not do its work                  exit 4
    ├── QueueFull             the cap of a traffic class is reached          exit 5 (HTTP 429)
    └── JobEnded              a job ended without an answer
        ├── JobFailed         the engine refused it, or its attempts are used up
        ├── JobCancelled
        ├── JobExpired        it waited longer than it may
        ├── JobInterrupted    its worker died after the answer had begun
        └── JobLost           Redis no longer knows the job

A message says what was expected, what came, and what to do next; it fits on one line unless it lists faults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class LLMQError(Exception):
    """Base of all errors of llmq; `exit_code` is what the command line ends with."""

    exit_code = 1


class UsageError(LLMQError):
    """What the caller gave cannot be used; nothing was changed."""

    exit_code = 2


class EncodingError(UsageError):
    """A value of a job cannot be stored faithfully; `path` names the field (`messages[0].content`)."""

    def __init__(self, path: str, fault: str) -> None:
        super().__init__(f"{path}: {fault}")
        self.path = path
        self.fault = fault


class TamperedError(EncodingError):
    """What was stored encrypted was changed, or belongs to another job; `what` names it, not its text."""

    def __init__(self, what: str) -> None:
        super().__init__(what, "was changed after it was encrypted, or moved here from elsewhere: it cannot be read")


class KeyMissing(UsageError):
    """What is stored is encrypted with a key that this process does not have; `key_id` is a hash of it."""

    def __init__(self, message: str, key_id: str) -> None:
        super().__init__(message)
        self.key_id = key_id


@dataclass(frozen=True, slots=True)
class LineFault:
    """One bad line of an input file: its number (from 1), the field, and what is wrong with it."""

    line: int
    field: str
    fault: str

    def __str__(self) -> str:
        where = f"line {self.line}: "
        return where + (f"{self.field}: {self.fault}" if self.field else self.fault)


class InputFileError(UsageError):
    """A file of prompts cannot be taken; `faults` holds at most the first 20 bad lines of `total`."""

    def __init__(self, message: str, faults: Sequence[LineFault] = (), total: int = 0) -> None:
        lines = [message, *(f"  {fault}" for fault in faults)]
        if total > len(faults):
            lines.append(f"  ... and {total - len(faults):,} more")
        super().__init__("\n".join(lines))
        self.faults = tuple(faults)
        self.total = total


class SettingsError(UsageError):
    """A flag, an environment variable, an entry of llmq.toml or a live setting is wrong."""


class NotFoundError(UsageError):
    """There is no such job, batch or worker in this queue."""


class RedisUnavailable(LLMQError):
    """Redis cannot be reached, or is not in a state in which llmq can use it."""

    exit_code = 4


class RedisFull(RedisUnavailable):
    """Redis uses all its `maxmemory`: new jobs are refused until something is deleted or it is given more."""


class EngineUnavailable(LLMQError):
    """No inference engine that could answer was found."""

    exit_code = 4


class WorkerUnhealthy(LLMQError):
    """A worker lives no more, or lives and does not claim."""

    exit_code = 4


class QueueFull(LLMQError):
    """The cap of a traffic class is reached; try again after `retry_after` seconds.

    `need` is how many jobs were to be queued at once; more than the cap never fit, however long one waits.
    """

    exit_code = 5

    def __init__(self, cls: str, cap: int, retry_after: float = 1.0, *, need: int = 1) -> None:
        raise_cap = f"raise the cap: llmq set cap_{cls} N"
        super().__init__(
            f"the queue holds its {cap:,} {cls} jobs; try again in {retry_after:g} s, or {raise_cap}"
            if need <= cap
            else f"{need:,} jobs never fit at once into a queue of at most {cap:,} {cls} jobs; let them be queued as "
            f"room comes (without --no-wait; in Python wait=True), or {raise_cap}"
        )
        self.cls = cls
        self.cap = cap
        self.retry_after = retry_after


class JobEnded(LLMQError):
    """A job ended without an answer of its engine."""

    def __init__(self, job_id: str, message: str) -> None:
        super().__init__(message)
        self.job_id = job_id


class JobFailed(JobEnded):
    """The engine refused the job, or its attempts are used up; `body` is the engine's, where it gave one."""

    def __init__(self, job_id: str, message: str, status_code: int | None, body: object) -> None:
        super().__init__(job_id, message)
        self.status_code = status_code
        self.body = body


class JobCancelled(JobEnded):
    """Somebody cancelled the job."""


class JobExpired(JobEnded):
    """The job waited in the queue longer than it may."""


class JobInterrupted(JobEnded):
    """The job's worker or engine died after the answer had begun; an answer is never begun twice."""


class JobLost(JobEnded):
    """Redis no longer knows the job: its data was deleted, or the result outlived its retention."""
