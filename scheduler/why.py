"""Why a job or a batch does not run: from what is seen of it at one moment, in plain sentences.

`why_reader.py` takes the snapshot; here it is explained, in the order in which the claim script decides: the lane, the
class, the windows, the bucket, chat, slots, turns. It is an explanation, not a second policy: only the script decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmq.scheduler.batch_record import RESULTS_NOT_COLLECTED, BatchRecord
from llmq.scheduler.fleet import DRAINING, SILENT, WorkerStatus
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.state import JobState
from llmq.scheduler.why_view import BatchView, JobView, LaneView, LineView, QueueView


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


def explain(view: JobView | BatchView | LineView) -> Explanation:
    """Explain a snapshot."""
    match view:
        case JobView(record=job):
            return Explanation(job.id, "job", job.state.value, tuple(_of_job(view)))
        case BatchView(record=batch):
            return Explanation(batch.id, "batch", batch.status.value, tuple(_of_batch(view)))
        case LineView(batch=batch, number=number, state=state):
            name = f"{batch.id}:{number}"
            return Explanation(name, "line", state.value if state else "not there", tuple(_of_line(view)))


def _of_job(view: JobView) -> Iterator[Reason]:
    record, now = view.record, view.queue.now
    if record.state.ended:
        how = f": {record.code}: {record.message}" if record.code else ""
        yield Reason("ended", f"the job has ended as {record.state.value}{how}")
        return
    if record.state is JobState.RUNNING:
        yield Reason("running", f"the job runs on worker {record.consumer}")
        return
    yield from _past(record.attempts or 0, record.crashes or 0, record.preemptions or 0)
    if record.expires_at is not None:
        left = record.expires_at - now
        over = "its time in the queue is over: it ends as expired with the next claim"
        yield Reason("expiry", over if left <= 0 else f"it expires if it has not started in {_time(left)}", left <= 0)
    if record.due_at is not None and record.state is JobState.DELAYED:
        yield Reason("retry", f"its next attempt is due in {_time(record.due_at - now)}", True)
        return
    blocks = _of_class(view.queue, record.cls, "job")
    yield from blocks
    yield from _place(view, f"of tenant {record.tenant}", "job")
    yield from _turns(view.lane)
    if not (blocks or view.before):
        yield _next(view.queue, "the job")


def _of_batch(view: BatchView) -> Iterator[Reason]:
    record, queue = view.record, view.queue
    if record.ended:
        yield Reason("ended", f"the batch is {record.status.value}: {record.done:,} lines, {record.failed:,} failed")
        return
    if _ends(view):
        yield _ending(record)
        return
    if record.running:
        yield Reason("running", f"{_count(record.running, 'line')} of it run now")
    if not record.sealed:
        yield _unsealed(view)
    if not record.waiting:
        return
    blocks = [*_of_lane(record, view.lane), *_of_class(queue, TrafficClass.BATCH, "line")]
    yield from blocks
    yield from _turns(view.lane)
    if record.expires_at is not None:
        yield Reason("window", f"lines that have not started in {_time(record.expires_at - queue.now)} expire")
    if not blocks:
        yield _next(queue, f"{_count(record.waiting, 'line')} that wait")


def _of_line(view: LineView) -> Iterator[Reason]:
    batch, queue = view.batch, view.queue
    if view.state is None or view.state.ended:
        yield _not_waiting(view)
        return
    if view.state is JobState.RUNNING:
        yield Reason("running", f"the line runs on worker {view.consumer}")
    yield from _past(view.attempts, view.crashes, view.preemptions)
    if view.state is JobState.RUNNING:
        return
    if _ends(BatchView(queue, view.lane, batch)):
        yield _ending(batch)
        return
    if view.state is JobState.DELAYED and view.due_at is not None:
        yield Reason("retry", f"its next attempt is due in {_time(view.due_at - queue.now)}", True)
        return
    blocks = [*_of_lane(batch, view.lane), *_of_class(queue, TrafficClass.BATCH, "line")]
    yield from blocks
    yield from _place(view, "of its batch", "line")
    yield from _turns(view.lane)
    if batch.expires_at is not None:
        yield Reason("window", f"it expires if it has not started in {_time(batch.expires_at - queue.now)}")
    if not (blocks or view.before):
        yield _next(queue, "the line")


def _not_waiting(view: LineView) -> Reason:
    """Say of a line that neither waits nor runs whether it has ended, is blank, or has not come yet."""
    batch, result = view.batch, view.result
    if view.state is None and view.number >= batch.next_line:
        if batch.sealed:
            return Reason("no_line", f"the file has no line {view.number:,}: its last one is {batch.next_line - 1:,}")
        found = _unsealed(BatchView(view.queue, view.lane, batch))
        return Reason(found.code, f"the line is not queued yet; {found.text}", True)
    if result is None:
        where = f"llmq batch results {batch.id}"
        return Reason("ended", f"the line has ended, or is blank; how it ended stands in the results: {where}")
    how = f"HTTP {result.status_code}" if result.status_code else f"{result.error_code}: {result.error_message}"
    return Reason("ended", f"the line has ended as {result.state}: {how}")


def _past(attempts: int, crashes: int, preemptions: int) -> Iterator[Reason]:
    """What happened to a job that came back."""
    if attempts or crashes:
        went = f"{_count(attempts, 'attempt')} went wrong, {_count(crashes, 'crash')}"
        yield Reason("attempts", f"it was tried before: {went}")
    if preemptions:
        yield Reason("preempted", f"it made way for chat: {_count(preemptions, 'time')}")
    if crashes:
        text = "it was in flight when a worker or engine died: a worker runs one such job at a time; 3 deaths end it"
        yield Reason("suspect", text)


def _place(view: JobView | LineView, of: str, noun: str) -> Iterator[Reason]:
    if view.before:
        least = "at least " if view.more else ""
        yield Reason("place", f"{least}{_count(view.before, noun)} {of} come first", True)


def _ends(view: BatchView) -> bool:
    return view.record.status.value != "in_progress" or view.record.overdue(view.queue.now)


def _ending(batch: BatchRecord) -> Reason:
    what = "is over its window" if batch.cancelling_at is None else "was cancelled"
    return Reason("ending", f"the batch {what}; no further line starts", True)


def _unsealed(view: BatchView) -> Reason:
    if view.queue.cap_reached:
        return Reason("cap", "the queue holds as many batch jobs as it may; further lines of the file wait for room")
    return Reason(
        "unsealed",
        f"its file is not queued to the end: {view.record.lines:,} lines so far. If nobody is queueing it, go on: "
        f"llmq submit-batch FILE --resume {view.record.id}",
    )


def _of_lane(batch: BatchRecord, lane: LaneView) -> Iterator[Reason]:
    """What holds back this batch alone."""
    batch_id = batch.id
    if batch.paused:
        yield Reason("batch_paused", f"the batch is paused; let it go on: llmq batch resume {batch_id}", True)
    if batch.reason == RESULTS_NOT_COLLECTED:
        yield Reason(
            "not_collected",
            "the queue holds as many results as it may (results_max_bytes), and nobody takes these away: "
            f"llmq batch results {batch_id} -o FILE",
            True,
        )
    if lane.wakes_in_s is not None:
        yield Reason("retry", f"all lines that wait are to be tried again, in {_time(lane.wakes_in_s)}", True)


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
