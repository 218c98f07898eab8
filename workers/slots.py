"""The slots: the requests that a worker runs at once, and what may be taken into them.

    while (lease := await desk.take()) is not None:
        outcome = await executor.run(lease)
        desk.settle(lease, outcome)

That is a slot, and the whole way of a job through a worker. What the governor decides is asked for here with a snapshot
of all slots, and carried out here: preempted, cancelled and lost requests are stopped where they stand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import assert_never

from llmq.scheduler.job import TrafficClass
from llmq.scheduler.lease import Abandoned, Answered, Ended, ErrorCode, Fence, HandedBack, Lease, Outcome, Reason, Retry
from llmq.scheduler.live import LiveSettings
from llmq.workers.allowance import Allowance, Candidate, Snapshot, allow, default_reserve, victims
from llmq.workers.desk import VERDICTS, Desk
from llmq.workers.executor import Executor, Running, Stop
from llmq.workers.gate import Gate
from llmq.workers.governing import Governing, Load, prompt_tokens
from llmq.workers.measuring import Measuring


@dataclass(slots=True)
class WorkerReport:
    """What a worker did, for its last line: jobs that ended, failed ones among them, and those handed back."""

    worker_id: str
    ended: int = 0
    failed: int = 0
    handed_back: int = 0


class Slots:
    """The slots of one worker. `reserve` of None means the live setting, and without one the usual share.

    `most_batch` is the most batch requests that ever run at once (None: what reserve and governor allow).

    The desk asks the slots what it may claim, so it is given to them after they are made: `desk` is set once.
    """

    desk: Desk

    def __init__(
        self,
        concurrency: int,
        reserve: int | None,
        executor: Executor,
        gate: Gate,
        governing: Governing,
        measuring: Measuring,
        settings: Callable[[], LiveSettings],
        report: WorkerReport,
        most_batch: int | None = None,
    ) -> None:
        self.concurrency = concurrency
        self._reserve = reserve
        self._executor = executor
        self._gate = gate
        self._governing = governing
        self._measuring = measuring
        self._settings = settings
        self.report = report
        self._most_batch = most_batch
        self.batch_cap = most_batch

    async def serve_one(self) -> None:
        """Be one slot, until the desk is closed."""
        while (lease := await self.desk.take()) is not None:
            self._governing.taken(lease, self._measuring.started(lease))
            if lease.cls is TrafficClass.INTERACTIVE:
                self._stop_reading()
            outcome = await self._executor.run(lease)
            answered = isinstance(outcome, Answered) and outcome.status_code < 400
            given_up = isinstance(outcome, Ended) and outcome.code is ErrorCode.CANCELLED
            self._governing.ended(lease, answered, given_up)
            self.desk.settle(lease, outcome)
            self._note(lease, outcome)

    @property
    def reserve(self) -> int:
        """The slots kept free for chat."""
        for given in (self._reserve, self._settings().reserve):
            if given is not None:
                return given
        return default_reserve(self.concurrency)

    @property
    def _unreserved(self) -> int:
        """The slots that are not kept for chat."""
        return max(0, self.concurrency - self.reserve)

    @property
    def batch_limit(self) -> int:
        """The most batch requests that may run at once, as it was last looked at."""
        return self._unreserved if self.batch_cap is None else self.batch_cap

    def allowance(self) -> Allowance:
        """Return what may be claimed now."""
        held = self.desk.held
        caps = [self._most_batch, self._gate.batch_cap(time.monotonic()), self._governing.batch_cap(self.load())]
        if held.in_last_attempt:
            caps.append(0)
        self.batch_cap = min((cap for cap in caps if cap is not None), default=None)
        return allow(
            Snapshot(
                concurrency=self.concurrency,
                running_interactive=held.interactive,
                running_batch=held.batch,
                preemptable=sum(map(_preemptable, self._executor.running.values())) if held.batch else 0,
                suspects=held.suspects,
                reserve=self.reserve,
                preempt=self._settings().preempt,
                batch_cap=self.batch_cap,
                refusing=self._gate.refuses(time.monotonic()) or self._has_lines_that_wait(),
                taking=not (self._gate.gone or self._gate.locked or self.desk.closed),
            )
        )

    def load(self) -> Load:
        """Return what the governor goes by."""
        if not self.desk.held.batch:
            return Load(batch=0, unread=0, most=self._unreserved)
        read = {fence for fence, running in self._executor.running.items() if running.tokens}
        held = [lease for lease in self.desk.held if lease.cls is TrafficClass.BATCH]
        unread = sum(max(1, prompt_tokens(lease)) for lease in held if lease.fence not in read)
        return Load(batch=len(held), unread=unread, most=self._unreserved)

    def may_start(self, lease: Lease) -> bool:
        """Whether a lease may run beside those that are held: a suspect in its last attempt and batch take turns.

        Another line that kills the engine would be its third death, and the dead letter would be the wrong one (G7).
        They run in the order of their claims, so that neither waits for what came after it.
        """
        alone = lease.in_last_attempt
        if not alone and (lease.cls is TrafficClass.INTERACTIVE or not self.desk.held.in_last_attempt):
            return True
        for other in self.desk.held:
            if other is lease:
                break
            if other.in_last_attempt or (alone and other.cls is TrafficClass.BATCH):
                return False
        return True

    def youngest(self) -> Fence | None:
        """Return the batch line that would be preempted first."""
        if not self._settings().preempt:
            return None
        return next(iter(self._victims(1)), None)

    def protect(self, fence: Fence) -> None:
        """Never preempt this line: its start counts for the deadline."""
        if running := self._executor.running.get(fence):
            running.protected = True

    def make_way(self) -> None:
        """Preempt batch requests for what has been claimed above the free slots, and above a cap that was cut."""
        self._leave_alone()
        stopping = sum(1 for running in self._executor.running.values() if running.stop is not None)
        crowded = len(self.desk.held) - stopping - self.concurrency
        excess = self._governing.excess(self.load()) - stopping if self._settings().preempt else 0
        for fence in self._victims(max(crowded, excess)):
            self._executor.stop(fence, Stop.PREEMPTED)

    def _stop_reading(self) -> None:
        """Preempt the batch requests whose prompts are in the way of the chat request that has come."""
        if self.desk.held.batch and self._settings().preempt:
            for fence, running in list(self._executor.running.items()):
                if not _preemptable(running) or not self._governing.interrupts(running.lease, running.tokens):
                    continue
                if self._executor.stop(fence, Stop.PREEMPTED):
                    self._governing.interrupted()

    def settling(self, lease: Lease, outcome: Outcome) -> None:
        """Count an outcome that was left at the desk."""
        self._measuring.settled(lease, outcome)

    def refused(self, outcomes: int) -> None:
        """Count outcomes that their fences have refused."""
        self._measuring.refused(outcomes)

    def lose(self, fence: Fence) -> None:
        """Abort a request whose lease belongs to another delivery."""
        self._stop(fence, Stop.LOST, Abandoned())

    def is_lost(self, fence: Fence) -> bool:
        """Whether a request is being aborted because its lease was lost."""
        running = self._executor.running.get(fence)
        return running is not None and running.stop is Stop.LOST

    def give_up(self, fence: Fence) -> None:
        """Abort a request whose lease could not be renewed for too long."""
        self._stop(fence, Stop.OVERDUE, HandedBack(Reason.SHUTDOWN))

    def cancel(self, fence: Fence) -> None:
        """Abort a request whose job was cancelled."""
        self._stop(fence, Stop.CANCELLED, VERDICTS["cancelled"])

    def cancel_where(self, matches: Callable[[Fence], bool]) -> None:
        """Abort the requests whose jobs were cancelled together."""
        for fence in [lease.fence for lease in self.desk.held if matches(lease.fence)]:
            self.cancel(fence)

    def stop_all(self) -> None:
        """Abort what still runs at the end of a drain."""
        for fence in list(self._executor.running):
            self._executor.stop(fence, Stop.SHUTDOWN)

    def running(self) -> list[Lease]:
        """Return the leases in flight; the lease thread calls this too."""
        return [running.lease for running in list(self._executor.running.values())]

    def _victims(self, count: int) -> list[Fence]:
        if count <= 0 or not self.desk.held.batch:
            return []
        running = self._executor.running.values()
        return victims([Candidate(r.lease.fence, r.started_at, protected=not _preemptable(r)) for r in running], count)

    def _leave_alone(self) -> None:
        """Hand back the batch that was claimed beside a suspect in its last attempt and that others can run now."""
        if self.desk.held.in_last_attempt:
            for lease in list(self.desk.held):
                if lease.cls is TrafficClass.BATCH and not lease.in_last_attempt and not lease.protected():
                    self.desk.withdraw(lease.fence, HandedBack(Reason.SHUTDOWN))

    def _has_lines_that_wait(self) -> bool:
        """Whether batch was claimed that may not start beside a suspect; more of it would take the slots from chat."""
        held, running = self.desk.held, self._executor.running
        return bool(held.in_last_attempt) and any(
            lease.cls is TrafficClass.BATCH and lease.fence not in running and not self.may_start(lease)
            for lease in held
        )

    def _stop(self, fence: Fence, why: Stop, unstarted: Outcome) -> None:
        """Stop a request; `unstarted` is its outcome where no slot has begun with it."""
        if not self._executor.stop(fence, why):
            self.desk.withdraw(fence, unstarted)

    def _note(self, lease: Lease, outcome: Outcome) -> None:
        self._measuring.ended(lease, outcome)
        match outcome:
            case HandedBack():
                self.report.handed_back += 1
            case Answered(status_code=status):
                self.report.ended += 1
                self.report.failed += status >= 400
            case Ended():
                self.report.failed += 1
            case Retry() | Abandoned():
                pass  # it has not ended, or not here
            case _:
                assert_never(outcome)


def count_interactive(leases: Iterable[Lease]) -> int:
    """Return how many of these are chat."""
    return sum(1 for lease in leases if lease.cls is TrafficClass.INTERACTIVE)


def _preemptable(running: Running) -> bool:
    lease = running.lease
    if running.protected or lease.protected():
        return False
    return lease.cls is TrafficClass.BATCH and running.in_engine and running.stop is None
