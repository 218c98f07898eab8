"""Why a job or a batch does not run: from what is seen of it at one moment, in plain sentences.

`why_reader.py` takes the snapshot; here it is explained, in the order in which the claim script decides: the lane, the
class, the windows, the bucket, chat, slots, turns. It is an explanation, not a second policy: only the script decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmq.scheduler.batch_record import RESULTS_NOT_COLLECTED, BatchRecord
from llmq.scheduler.bucket import Bucket
from llmq.scheduler.fleet import DRAINING, SILENT, WorkerStatus
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.job_record import JobRecord
from llmq.scheduler.state import JobState


@dataclass(frozen=True, slots=True)
class QueueView:
    """What holds for every job of a queue.

    `chat_waits` is whether an interactive job can be claimed; `deadline_in_s` is when the deadline starts a batch job
    at the latest (None: nothing of batch can be claimed, or windows move it); `cap_reached` is of batch; `yields_for_s`
    is how long batch yields to chat in the whole fleet, at least (None: it does not).
    """

    name: str
    now: float
    paused: frozenset[TrafficClass]
    bucket: Bucket
    deadline_in_s: float | None
    chat_waits: bool
    preempt: bool
    cap_reached: bool
    yields_for_s: float | None
    workers: tuple[WorkerStatus, ...]


@dataclass(frozen=True, slots=True)
class LaneView:
    """Where a lane stands.

    `place` is that of its tenant among those that take turns (from 1; None: it has no turn now), `lanes_before` counts
    the tenant's lanes that come first, `wakes_in_s` is None where it does not sleep, or no clock wakes it.
    """

    tenant: str
    place: int | None
    tenants: int
    lanes_before: int
    wakes_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class JobView:
    """A single job; `before` counts the jobs of its lane that come first, `more` says that there may be more."""

    queue: QueueView
    lane: LaneView
    record: JobRecord
    before: int = 0
    more: bool = False


@dataclass(frozen=True, slots=True)
class BatchView:
    """A batch."""

    queue: QueueView
    lane: LaneView
    record: BatchRecord


@dataclass(frozen=True, slots=True)
class Reason:
    """One sentence, the word that programs know it by, and whether it keeps the job from starting now."""

    code: str
    text: str
    blocks: bool = False


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a job or batch is where it is."""

    id: str
    kind: str
    state: str
    reasons: tuple[Reason, ...]

    def to_json(self) -> dict[str, Any]:
        """Return what `why --json` prints."""
        return {
            "id": self.id,
            "kind": self.kind,
            "state": self.state,
            "blocked": any(reason.blocks for reason in self.reasons),
            "reasons": [{"code": one.code, "text": one.text, "blocks": one.blocks} for one in self.reasons],
        }


def explain(view: JobView | BatchView) -> Explanation:
    """Explain a snapshot."""
    if isinstance(view, JobView):
        kind, state, reasons = "job", view.record.state.value, list(_of_job(view))
    else:
        kind, state, reasons = "batch", view.record.status.value, list(_of_batch(view))
    return Explanation(view.record.id, kind, state, tuple(reasons))


def _of_job(view: JobView) -> Iterator[Reason]:
    record, now = view.record, view.queue.now
    if record.state.ended:
        how = f": {record.code}: {record.message}" if record.code else ""
        yield Reason("ended", f"the job has ended as {record.state.value}{how}")
        return
    if record.state is JobState.RUNNING:
        yield Reason("running", f"the job runs on worker {record.consumer}")
        return
    if record.attempts or record.crashes:
        went = f"{_count(record.attempts or 0, 'attempt')} went wrong, {_count(record.crashes or 0, 'crash')}"
        yield Reason("attempts", f"it was tried before: {went}")
    if record.expires_at is not None:
        left = record.expires_at - now
        over = "its time in the queue is over: it ends as expired with the next claim"
        yield Reason("expiry", over if left <= 0 else f"it expires if it has not started in {_time(left)}", left <= 0)
    if record.due_at is not None and record.state is JobState.DELAYED:
        yield Reason("retry", f"its next attempt is due in {_time(record.due_at - now)}", True)
        return
    blocks = _of_class(view.queue, record.cls, "job")
    yield from blocks
    if view.before:
        least = "at least " if view.more else ""
        yield Reason("place", f"{least}{_count(view.before, 'job')} of tenant {record.tenant} come first", True)
    yield from _turns(view.lane)
    if not (blocks or view.before):
        yield _next(view.queue, "the job")


def _of_batch(view: BatchView) -> Iterator[Reason]:
    record, queue = view.record, view.queue
    if record.ended:
        yield Reason("ended", f"the batch is {record.status.value}: {record.done:,} lines, {record.failed:,} failed")
        return
    if record.status.value != "in_progress" or record.overdue(queue.now):
        what = "is over its window" if record.cancelling_at is None else "was cancelled"
        yield Reason("ending", f"the batch {what}; no further line starts", True)
        return
    if record.running:
        yield Reason("running", f"{_count(record.running, 'line')} of it run now")
    if not record.sealed:
        yield _unsealed(view)
    if not record.waiting:
        return
    blocks = [*_of_lane(view), *_of_class(queue, TrafficClass.BATCH, "line")]
    yield from blocks
    yield from _turns(view.lane)
    if record.expires_at is not None:
        yield Reason("window", f"lines that have not started in {_time(record.expires_at - queue.now)} expire")
    if not blocks:
        yield _next(queue, f"{_count(record.waiting, 'line')} that wait")


def _unsealed(view: BatchView) -> Reason:
    if view.queue.cap_reached:
        return Reason("cap", "the queue holds as many batch jobs as it may; further lines of the file wait for room")
    return Reason(
        "unsealed",
        f"its file is not queued to the end: {view.record.lines:,} lines so far. If nobody is queueing it, go on: "
        f"llmq submit-batch FILE --resume {view.record.id}",
    )


def _of_lane(view: BatchView) -> Iterator[Reason]:
    """What holds back this batch alone."""
    batch_id = view.record.id
    if view.record.paused:
        yield Reason("batch_paused", f"the batch is paused; let it go on: llmq batch resume {batch_id}", True)
    if view.record.reason == RESULTS_NOT_COLLECTED:
        yield Reason(
            "not_collected",
            "the queue holds as many results as it may (results_max_bytes), and nobody takes these away: "
            f"llmq batch results {batch_id} -o FILE",
            True,
        )
    if view.lane.wakes_in_s is not None:
        yield Reason("retry", f"all lines that wait are to be tried again, in {_time(view.lane.wakes_in_s)}", True)


def _of_class(queue: QueueView, cls: TrafficClass, noun: str) -> list[Reason]:
    """What holds back every job of the class, in the order of the claim script; empty where nothing does."""
    found: list[Reason] = []
    paused = cls in queue.paused
    if paused:
        text = f"{cls.value} is paused in the whole queue: llmq resume {cls.value}"
        found.append(Reason("class_paused", text, True))
    if cls is TrafficClass.BATCH:
        found += _of_bucket(queue)
        if queue.chat_waits and TrafficClass.INTERACTIVE not in queue.paused:
            found.append(Reason("chat", "chat waits too, and goes first", True))
        if queue.yields_for_s is not None:
            text = "chat is far slower than it shall be (ttft_p95) in the whole fleet: batch yields until that is over"
            found.append(Reason("objective", text, True))
    nobody = list(_of_fleet(queue))
    found += nobody or _of_slots(queue, cls)
    may_start = queue.bucket.open and not (paused or nobody)
    if cls is TrafficClass.BATCH and queue.deadline_in_s is not None and found and may_start:
        moment = "now" if queue.deadline_in_s <= 0 else f"in {_time(queue.deadline_in_s)} at the latest"
        found.append(Reason("deadline", f"all the same the deadline starts a batch {noun} {moment}"))
    return found


def _of_bucket(queue: QueueView) -> Iterator[Reason]:
    bucket = queue.bucket
    if not bucket.open:
        until = f" for {_time(bucket.changes_at_ms / 1000 - queue.now)}" if bucket.changes_at_ms else ""
        yield Reason("window_closed", f"no batch starts{until}, by the windows of the queue (llmq set windows)", True)
    elif bucket.limit is not None and bucket.tokens is not None and bucket.tokens < 1:
        rate = bucket.limit.rate.per_second
        wait = _time((1 - bucket.tokens) / rate)
        yield Reason("bucket", f"the rate ({bucket.limit}) allows the next batch start in {wait} (llmq rate)", True)


def _of_fleet(queue: QueueView) -> Iterator[Reason]:
    alive = [worker for worker in queue.workers if worker.state != SILENT]
    serving = [worker for worker in alive if worker.state != DRAINING]
    if not serving:
        there = "those there are drain" if alive else "there is none"
        start = "llmq worker --gpu 0" + (f" --queue {queue.name}" if queue.name != "default" else "")
        yield Reason("no_worker", f"no worker serves queue {queue.name} ({there}): {start}", True)
    elif not _ready(queue):
        states = ", ".join(sorted({worker.state for worker in serving}))
        yield Reason("no_engine", f"no worker is ready: {states}; see: llmq workers", True)


def _of_slots(queue: QueueView, cls: TrafficClass) -> Iterator[Reason]:
    ready = _ready(queue)
    slots, chat = sum(one.slots for one in ready), sum(one.busy_interactive for one in ready)
    batch = sum(one.busy_batch for one in ready)
    runs = f"{_count(slots, 'slot')} {chat:,} run chat and {batch:,} batch"
    if cls is TrafficClass.INTERACTIVE:
        if slots - chat - (0 if queue.preempt else batch) <= 0:
            yield Reason("busy", f"no slot is free for chat: of {runs}", True)
    elif sum(_room_for_batch(worker) for worker in ready) == 0:
        kept = sum(min(one.reserve, max(0, one.slots - one.busy)) for one in ready)
        yield Reason("busy", f"no slot is free for batch: of {runs}, and {kept:,} are kept free for chat", True)


def _ready(queue: QueueView) -> list[WorkerStatus]:
    return [worker for worker in queue.workers if worker.state == "ready"]


def _room_for_batch(worker: WorkerStatus) -> int:
    return max(0, min(worker.slots - worker.busy - worker.reserve, worker.batch_cap - worker.busy_batch))


def _turns(lane: LaneView) -> Iterator[Reason]:
    if lane.place is not None and lane.tenants > 1:
        yield Reason(
            "turns",
            f"tenant {lane.tenant} is number {lane.place} of {lane.tenants} tenants that take turns; "
            "who was served least for its weight is next",
        )
    if lane.lanes_before:
        yield Reason("earlier", f"{_count(lane.lanes_before, 'batch')} of tenant {lane.tenant} are due before it")


def _next(queue: QueueView, what: str) -> Reason:
    return Reason("next", f"nothing holds {what} back: a worker of queue {queue.name} takes the next within a second")


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith(("ch", "sh")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def _time(seconds: float) -> str:
    """Write a time that is still to pass, as exactly as it matters."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{max(0.0, seconds):.3g} s"
