"""Measuring: what a worker sees of its jobs, as figures for its heartbeat and its metrics.

Waits are differences of Redis' clock: an entry's id, or its field, says when it was queued, and each heartbeat says how
far this host's clock is from Redis'. The event loop counts and other threads read (leases, metrics), so all hold a
lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import assert_never

from llmq.scheduler import totals as table
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.lease import Abandoned, Answered, Ended, ErrorCode, HandedBack, Lease, Outcome, Reason, Retry
from llmq.scheduler.measures import Figures, Measures
from llmq.scheduler.totals import Totals

#: What an end without an answer counts as; all else has failed.
_OUTCOMES = {
    ErrorCode.EXPIRED: "expired",
    ErrorCode.TIMEOUT: "expired",
    ErrorCode.CANCELLED: "cancelled",
    ErrorCode.INTERRUPTED: "interrupted",
}

#: What of them is the engine's doing.
_FAULTS = {
    ErrorCode.ENGINE_ERROR: "unclear",
    ErrorCode.WORKER_LOST: "gone",
    ErrorCode.RESULT_TOO_LARGE: "too_large",
}


class Measuring:
    """Counts one worker's jobs; all methods but `snapshot`, `figures` and `totals` are called in the event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._measures = Measures()
        self._totals = Totals()
        self._offset_s = 0.0

    def clock(self, now_ms: int) -> None:
        """Take Redis' time, as a heartbeat has just brought it."""
        self._offset_s = now_ms / 1000 - time.time()

    def started(self, lease: Lease) -> float:
        """A slot has taken a lease; return how long it had waited."""
        wait = self._age(lease)
        with self._lock:
            if lease.cls is TrafficClass.INTERACTIVE:
                self._measures.interactive_started(wait)
                self._totals.observe(table.CHAT_WAIT, wait)
            else:
                self._measures.batch_started(wait)
                self._totals.observe(table.BATCH_WAIT, wait)
        return wait

    def begun(self, lease: Lease) -> None:
        """The first token of an answer came."""
        if lease.cls is TrafficClass.INTERACTIVE:
            age = self._age(lease)
            with self._lock:
                self._measures.first_token(age)
                self._totals.observe(table.CHAT_FIRST, age)

    def ended(self, lease: Lease, outcome: Outcome) -> None:
        """An attempt is over; only outcomes that end the job count as its end."""
        age = self._age(lease)
        with self._lock:
            if fault := _fault_of(outcome):
                self._totals.count(table.ENGINE_FAULTS, fault)
            match outcome:
                case HandedBack(reason=Reason.PREEMPTED):
                    self._measures.preempted()
                case HandedBack() | Retry() | Abandoned():
                    pass
                case _ if lease.cls is TrafficClass.INTERACTIVE:
                    self._measures.interactive_ended(age)
                    self._totals.observe(table.CHAT_TOTAL, age)
                case _:
                    ok = isinstance(outcome, Answered) and outcome.status_code < 400
                    self._measures.batch_ended(ok=ok)

    def cut_off(self, kept: int, wasted: int) -> None:
        """A preempted batch request had made so many tokens: kept for its next attempt, or wasted."""
        with self._lock:
            self._measures.cut_off(kept=kept, wasted=wasted)
            self._totals.count(table.CUT_OFF, "kept", by=kept)
            self._totals.count(table.CUT_OFF, "wasted", by=wasted)

    def settled(self, lease: Lease, outcome: Outcome) -> None:
        """An outcome is to be written: of an attempt, or of a job that was claimed only to be ended."""
        with self._lock:
            self._count(lease.cls.value, outcome)

    def refused(self, outcomes: int) -> None:
        """The fence has refused to write this many outcomes."""
        with self._lock:
            self._totals.count(table.STALE, by=outcomes)

    def reclaimed(self, jobs: int) -> None:
        """A sweep has taken this many jobs from workers that were gone."""
        with self._lock:
            self._totals.count(table.RECLAIMED, by=jobs)

    def snapshot(self) -> Mapping[str, str]:
        """Return the heartbeat's fields of the last five minutes."""
        with self._lock:
            return self._measures.snapshot()

    def figures(self) -> Figures:
        """Return what was measured in the last five minutes."""
        with self._lock:
            return self._measures.figures()

    def totals(self) -> dict[str, int]:
        """Return what was counted since the worker began."""
        with self._lock:
            return self._totals.read()

    def _count(self, cls: str, outcome: Outcome) -> None:
        totals = self._totals
        match outcome:
            case Answered(status_code=status, usage=usage, dead=dead):
                totals.count(table.JOBS_ENDED, cls, "completed" if status < 400 else "failed")
                totals.count(table.TOKENS, cls, "prompt", by=usage.prompt_tokens)
                totals.count(table.TOKENS, cls, "completion", by=usage.completion_tokens)
                if dead:
                    totals.count(table.DEAD, cls)
            case Ended(code=code, dead=dead):
                totals.count(table.JOBS_ENDED, cls, _OUTCOMES.get(code, "failed"))
                if dead:
                    totals.count(table.DEAD, cls)
            case Retry():
                totals.count(table.RETRIES, cls)
            case HandedBack(reason=reason):
                totals.count(table.HANDED_BACK, cls, reason.value)
            case Abandoned():
                totals.count(table.LEASES_LOST)
            case _:
                assert_never(outcome)

    def _age(self, lease: Lease) -> float:
        return max(0.0, time.time() + self._offset_s - lease.queued_at)


def _fault_of(outcome: Outcome) -> str | None:
    """Return what the engine did wrong in an attempt; None where it did nothing wrong."""
    match outcome:
        case Answered(status_code=status) if status >= 400:
            return "refused" if status < 500 else "unclear"
        case HandedBack(reason=Reason.OVERLOAD):
            return "overloaded"
        case HandedBack(reason=Reason.ENGINE_GONE) | Retry(crashed=True):
            return "gone"
        case Retry():
            return "unclear"
        case Ended(code=code):
            return _FAULTS.get(code)
        case _:
            return None
