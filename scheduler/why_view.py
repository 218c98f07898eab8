"""What is seen of a job, a line or a batch at one moment: `why_reader.py` takes the snapshot, `why.py` explains it."""

from __future__ import annotations

from dataclasses import dataclass

from llmq.scheduler.batch_record import BatchRecord
from llmq.scheduler.bucket import Bucket
from llmq.scheduler.fleet import WorkerStatus
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.job_record import JobRecord
from llmq.scheduler.records import ResultRecord
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
class LineView:
    """A line of a batch, `key` being its custom_id.

    `state` is None for one that its file has not come to yet, and for blank lines. `result` is how it ended, where that
    could be found without reading all results. `before` counts the lines of the batch that come first, `more` says that
    there may be more.
    """

    queue: QueueView
    lane: LaneView
    batch: BatchRecord
    number: int
    key: str = ""
    state: JobState | None = None
    consumer: str | None = None
    due_at: float | None = None
    attempts: int = 0
    crashes: int = 0
    preemptions: int = 0
    before: int = 0
    more: bool = False
    result: ResultRecord | None = None
