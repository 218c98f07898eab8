"""The states of a job, how they are derived, and every transition between them.

No state of a job that lives is stored anywhere: what is in Redis (a record, a pending entry, a place in `back`) says
it, and `derive_state` is the one function that reads it so. Only the end of a job is written down. This module decides;
it reads nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class JobState(StrEnum):
    """Where a job stands."""

    WAITING = "waiting"
    RUNNING = "running"
    DELAYED = "delayed"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    INTERRUPTED = "interrupted"
    LOST = "lost"

    @property
    def ended(self) -> bool:
        """Whether the job will never change again."""
        return self not in LIVING


#: The states of a job that has not ended.
LIVING = frozenset({JobState.WAITING, JobState.RUNNING, JobState.DELAYED})


@dataclass(frozen=True, slots=True)
class Transition:
    """From one state to another (`before` None: the job did not exist), and what does it: a script, or the clock."""

    before: JobState | None
    after: JobState
    by: str


#: All there are. `finish` ends every job that a worker held, also those claimed only to be ended.
TRANSITIONS = (
    Transition(None, JobState.WAITING, "submit_job"),
    Transition(None, JobState.WAITING, "submit_lines"),
    Transition(JobState.WAITING, JobState.RUNNING, "claim"),
    Transition(JobState.WAITING, JobState.CANCELLED, "cancel_job"),
    Transition(JobState.WAITING, JobState.EXPIRED, "cancel_job"),
    Transition(JobState.WAITING, JobState.LOST, "cancel_job"),
    Transition(JobState.WAITING, JobState.CANCELLED, "reap"),
    Transition(JobState.WAITING, JobState.EXPIRED, "reap"),
    Transition(JobState.RUNNING, JobState.COMPLETED, "finish"),
    Transition(JobState.RUNNING, JobState.FAILED, "finish"),
    Transition(JobState.RUNNING, JobState.CANCELLED, "finish"),
    Transition(JobState.RUNNING, JobState.EXPIRED, "finish"),
    Transition(JobState.RUNNING, JobState.INTERRUPTED, "finish"),
    Transition(JobState.RUNNING, JobState.DELAYED, "retry"),
    Transition(JobState.RUNNING, JobState.WAITING, "retry"),
    Transition(JobState.RUNNING, JobState.WAITING, "hand_back"),
    Transition(JobState.RUNNING, JobState.DELAYED, "hand_back"),
    Transition(JobState.RUNNING, JobState.WAITING, "sweep"),
    Transition(JobState.DELAYED, JobState.WAITING, "clock"),
    Transition(JobState.DELAYED, JobState.CANCELLED, "cancel_job"),
    Transition(JobState.DELAYED, JobState.EXPIRED, "cancel_job"),
    Transition(JobState.DELAYED, JobState.LOST, "cancel_job"),
    Transition(JobState.DELAYED, JobState.CANCELLED, "reap"),
    Transition(JobState.DELAYED, JobState.EXPIRED, "reap"),
)


def derive_state(*, ended_as: str, stored: bool, pending: bool, due_ms: float | None, now_ms: int) -> JobState:
    """Say where a job stands.

    `ended_as` is the state in its record ("" while it lives), `stored` whether its stream entry is there, `pending`
    whether that entry is in the hands of a worker, `due_ms` its score in `back` (None: it is not in there; a line
    number is always in the past).
    """
    if ended_as:
        try:
            return JobState(ended_as)
        except ValueError:
            # A newer llmq may know more ways to end; whatever it is, it is no answer.
            return JobState.FAILED
    if not stored:
        return JobState.LOST
    if pending:
        return JobState.RUNNING
    if due_ms is not None and due_ms > now_ms:
        return JobState.DELAYED
    return JobState.WAITING
