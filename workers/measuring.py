"""Measuring: what a worker sees of its jobs' times, as figures for its heartbeat.

Waits are differences of Redis' clock: an entry's id, or its field, says when it was queued, and each heartbeat says how
far this host's clock is from Redis'. The event loop counts and the lease thread reads, so both hold a lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from llmq.scheduler.job import TrafficClass
from llmq.scheduler.lease import Abandoned, Answered, HandedBack, Lease, Outcome, Reason, Retry
from llmq.scheduler.measures import Measures


class Measuring:
    """Counts one worker's jobs; all methods but `snapshot` are called in the event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._measures = Measures()
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
            else:
                self._measures.batch_started(wait)
        return wait

    def begun(self, lease: Lease) -> None:
        """The first token of an answer came."""
        if lease.cls is TrafficClass.INTERACTIVE:
            age = self._age(lease)
            with self._lock:
                self._measures.first_token(age)

    def ended(self, lease: Lease, outcome: Outcome) -> None:
        """An attempt is over; only outcomes that end the job count as its end."""
        age = self._age(lease)
        with self._lock:
            match outcome:
                case HandedBack(reason=Reason.PREEMPTED):
                    self._measures.preempted()
                case HandedBack() | Retry() | Abandoned():
                    pass
                case _ if lease.cls is TrafficClass.INTERACTIVE:
                    self._measures.interactive_ended(age)
                case _:
                    ok = isinstance(outcome, Answered) and outcome.status_code < 400
                    self._measures.batch_ended(ok=ok)

    def snapshot(self) -> Mapping[str, str]:
        """Return the heartbeat's fields."""
        with self._lock:
            return self._measures.snapshot()

    def _age(self, lease: Lease) -> float:
        return max(0.0, time.time() + self._offset_s - lease.queued_at)
