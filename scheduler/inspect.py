"""The inspector: what a queue and its workers are doing now, for `llmq status`, the ops page and the metrics.

It reads, and changes nothing. Whatever waits in the queue, it costs the same: counts are read, not jobs, and at most
200 lanes are looked at. Where there are more, `lanes_cut` says so: what waits and runs together is exact all the same,
how much of it runs is then at least what is shown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from llmq.scheduler.bucket import Bucket, bucket_of
from llmq.scheduler.fleet import WorkerStatus, read_workers
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.lease import batch_of
from llmq.scheduler.live import LiveSettings
from llmq.scheduler.measures import Figures, merge
from llmq.scheduler.queue import Queue
from llmq.scheduler.stored_number import finite, whole
from llmq.scheduler.totals import read_totals, sums

__all__ = ["ClassStatus", "QueueStatus", "WorkerStatus", "read_status", "read_workers"]

#: Lanes that one look takes in; each costs some microseconds of the server's time.
MAX_LANES = 200

#: Decisions for the whole fleet that one look shows.
DECISIONS_SHOWN = 5

#: Dead letters that are looked at to tell their classes apart; with more, the numbers of the classes are not known.
MAX_DEAD_READ = 500

#: And bytes of them: a dead letter holds its whole job, which may be 16 MiB.
MAX_DEAD_BYTES = 4 * 2**20

# Jobs may be megabytes each. These two look at some on the server and bring back what is asked, and nothing else.

#: The id of the first entry of a lane that was never claimed.
_FIRST_NEW = """
local group = redis.call('XINFO', 'GROUPS', KEYS[1])[1]
for i = 1, #group, 2 do
  if group[i] == 'last-delivered-id' then
    local entry = redis.call('XRANGE', KEYS[1], '(' .. group[i + 1], '+', 'COUNT', 1)[1]
    return entry and entry[1]
  end
end
"""

#: How many dead letters are interactive, and batch; nothing where to read them all would be too much.
_DEAD_CLASSES = """
local found, bytes, after = {i = 0, b = 0}, 0, '-'
repeat
  local letters = redis.call('XRANGE', KEYS[1], after, '+', 'COUNT', 4)
  for _, letter in ipairs(letters) do
    after = '(' .. letter[1]
    for i = 1, #letter[2], 2 do
      local field, value = letter[2][i], letter[2][i + 1]
      bytes = bytes + #value
      if field == 'class' then found[value] = (found[value] or 0) + 1 end
    end
  end
  if bytes > tonumber(ARGV[1]) then return {} end
until #letters < 4
return {found.i, found.b}
"""

#: Commands that `_read_lanes` sends for each lane.
_REPLIES_A_LANE = 7


@dataclass(frozen=True, slots=True)
class ClassStatus:
    """One traffic class. `dead` is None where there are too many dead letters to tell their classes apart.

    `oldest_wait_s` is the age of the job that waits longest (of a batch's line: of the batch); None: none waits.
    """

    waiting: int = 0
    running: int = 0
    delayed: int = 0
    dead: int | None = 0
    oldest_wait_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the figures of one class in `status --json`."""
        return {
            "waiting": self.waiting,
            "running": self.running,
            "delayed": self.delayed,
            "dead": self.dead,
            "oldest_wait_s": self.oldest_wait_s,
        }


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision for the whole fleet: batch yields to chat, or goes on; of `seen` first tokens `far_over` were late."""

    at: float
    batch: str
    seen: int
    far_over: int
    workers: int

    def to_json(self) -> dict[str, Any]:
        """Return a decision as `status --json` prints it."""
        return {"at": self.at, "batch": self.batch, "seen": self.seen, "far_over": self.far_over}


@dataclass(frozen=True, slots=True)
class ChatObjective:
    """What chat shall see, in seconds (None: nothing is asked), whether batch yields to it now, and what was decided.

    `decisions` are the last ones, newest first.
    """

    ttft_p95_s: float | None = None
    itl_p95_s: float | None = None
    yields: bool = False
    decisions: tuple[Decision, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the `objective` of `status --json`."""
        return {
            "ttft_p95_s": self.ttft_p95_s,
            "itl_p95_s": self.itl_p95_s,
            "yields": self.yields,
            "decisions": [decision.to_json() for decision in self.decisions],
        }


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """A queue at one moment, by its own clock (`at`, seconds since the epoch)."""

    queue: str
    at: float
    interactive: ClassStatus
    batch: ClassStatus
    dead: int
    bucket: Bucket
    paused: tuple[TrafficClass, ...]
    figures: Figures
    workers: tuple[WorkerStatus, ...]
    lanes: int
    lanes_cut: bool
    results_bytes: int
    totals: Mapping[str, int]
    objective: ChatObjective

    def to_json(self) -> dict[str, Any]:
        """Return what `status --json` prints; null stands where nothing was measured."""
        throughput, mean_wait = self.figures.throughput_per_s, self.figures.batch_wait.mean
        return {
            "queue": self.queue,
            "at": self.at,
            "interactive": self.interactive.to_json(),
            "batch": {
                **self.batch.to_json(),
                "throughput_per_s": None if throughput is None else round(throughput, 4),
                "mean_wait_s": None if mean_wait is None else round(mean_wait, 4),
                "done": self.figures.batch_done,
                "failed": self.figures.batch_failed,
                "preempted": self.figures.preempted,
                "kept_tokens": self.figures.kept_tokens,
                "wasted_tokens": self.figures.wasted_tokens,
            },
            "dead": self.dead,
            "bucket": self.bucket.to_json(),
            "paused": [cls.value for cls in self.paused],
            "objective": self.objective.to_json(),
            "latency": {**self.figures.latency(), "window_s": self.figures.window_s or None},
            "workers": [worker.to_json() for worker in self.workers],
            "lanes": self.lanes,
            "lanes_cut": self.lanes_cut,
            "results_bytes": self.results_bytes,
            "totals": sums(self.totals),
        }


@dataclass(frozen=True, slots=True)
class _Shared:
    """What the keys of the whole queue say."""

    config: Mapping[bytes, bytes]
    bucket: Mapping[bytes, bytes]
    counts: Mapping[bytes, bytes]
    lanes: int
    dead: int
    results_bytes: int
    totals: Mapping[bytes, bytes]
    decisions: Sequence[tuple[bytes, Mapping[bytes, bytes]]]


@dataclass(frozen=True, slots=True)
class _Lane:
    """One lane: how many of its entries run and are delayed, and since when the oldest that waits does (ms)."""

    cls: TrafficClass
    running: int
    delayed: int
    waits_since_ms: float | None


async def read_status(queue: Queue) -> QueueStatus:
    """Return what a queue and its workers are doing now."""
    shared, names, workers, now_ms = await asyncio.gather(
        _read_shared(queue), _read_lane_names(queue), read_workers(queue), queue.now_ms()
    )
    lanes = await _read_lanes(queue, names, now_ms)
    dead = await _read_dead(queue, shared.dead)
    classes = {cls: _class_status(cls, shared, lanes, dead, now_ms) for cls in TrafficClass}
    return QueueStatus(
        queue=queue.name,
        at=now_ms / 1000,
        interactive=classes[TrafficClass.INTERACTIVE],
        batch=classes[TrafficClass.BATCH],
        dead=shared.dead,
        bucket=bucket_of(shared.config, shared.bucket, now_ms),
        paused=tuple(cls for cls in TrafficClass if shared.config.get(f"paused_{cls.letter}".encode())),
        figures=merge(worker.measures for worker in workers),
        workers=tuple(workers),
        lanes=shared.lanes,
        lanes_cut=shared.lanes > len(names),
        results_bytes=shared.results_bytes,
        totals=read_totals(shared.totals),
        objective=_objective(shared, now_ms),
    )


def _objective(shared: _Shared, now_ms: int) -> ChatObjective:
    asked = LiveSettings.from_hash(shared.config)
    return ChatObjective(
        ttft_p95_s=asked.ttft_p95_s,
        itl_p95_s=asked.itl_p95_s,
        yields=whole(shared.config.get(b"yields_b")) > now_ms,
        decisions=tuple(_decision(entry, fields) for entry, fields in shared.decisions),
    )


def _decision(entry: bytes, fields: Mapping[bytes, bytes]) -> Decision:
    seen, far_over, workers = (whole(fields.get(name)) for name in (b"seen", b"far_over", b"workers"))
    return Decision(
        _milliseconds(entry) / 1000, fields.get(b"batch", b"").decode(errors="replace"), seen, far_over, workers
    )


def _class_status(
    cls: TrafficClass, shared: _Shared, lanes: Sequence[_Lane], dead: Mapping[TrafficClass, int] | None, now_ms: int
) -> ClassStatus:
    mine = [lane for lane in lanes if lane.cls is cls]
    running, delayed = sum(lane.running for lane in mine), sum(lane.delayed for lane in mine)
    since = [lane.waits_since_ms for lane in mine if lane.waits_since_ms is not None]
    # The count of all that lives is exact and costs nothing; what of it waits is the rest.
    alive = whole(shared.counts.get(cls.letter.encode()))
    return ClassStatus(
        waiting=max(0, alive - running - delayed),
        running=running,
        delayed=delayed,
        dead=dead.get(cls, 0) if dead is not None else None,
        oldest_wait_s=round(max(0.0, now_ms - min(since)) / 1000, 3) if since else None,
    )


async def _read_shared(queue: Queue) -> _Shared:
    keys = queue.keys
    pipe = queue.redis.pipeline(transaction=False)
    pipe.hgetall(keys.config)
    pipe.hgetall(keys.bucket)
    pipe.hgetall(keys.counts)
    pipe.hlen(keys.lanes)
    pipe.xlen(keys.dead)
    pipe.get(keys.held)
    pipe.hgetall(keys.totals)
    pipe.xrevrange(keys.decisions, count=DECISIONS_SHOWN)
    config, bucket, counts, lanes, dead, held, totals, decisions = await pipe.execute()
    return _Shared(config, bucket, counts, lanes, dead, whole(held), totals, decisions)


async def _read_lane_names(queue: Queue) -> dict[str, TrafficClass]:
    """Return at most MAX_LANES lanes with their classes."""
    found: dict[str, TrafficClass] = {}
    async for lane, known in cast(Any, queue.redis).hscan_iter(queue.keys.lanes, count=MAX_LANES):
        # "+b|tenant|due": state, class, and what does not matter here.
        found[lane.decode(errors="replace")] = TrafficClass.INTERACTIVE if known[1:2] == b"i" else TrafficClass.BATCH
        if len(found) == MAX_LANES:
            break
    return found


async def _read_lanes(queue: Queue, names: Mapping[str, TrafficClass], now_ms: int) -> list[_Lane]:
    if not names:
        return []
    pipe = queue.redis.pipeline(transaction=False)
    for name in names:
        stream, back = queue.keys.of_lane(name)
        pipe.xlen(stream)
        pipe.xpending(stream, "workers")
        pipe.zcount(back, f"({now_ms}", "+inf")
        pipe.zcount(back, "-inf", now_ms)
        pipe.zrange(back, 0, 0)
        pipe.eval_ro(_FIRST_NEW, 1, stream)
        pipe.hget(queue.keys.batch(batch_of(name) or ""), "created_at")
    # A lane that ended a moment ago has no group to ask for what is pending.
    replies = [None if isinstance(reply, Exception) else reply for reply in await pipe.execute(raise_on_error=False)]
    rows = [replies[first : first + _REPLIES_A_LANE] for first in range(0, len(replies), _REPLIES_A_LANE)]
    return [_lane(cls, row) for cls, row in zip(names.values(), rows, strict=True)]


def _lane(cls: TrafficClass, row: Sequence[Any]) -> _Lane:
    length, pending, delayed, again, first_back, first_new, created_at = row
    running = int(pending["pending"]) if pending else 0
    since: float | None = None
    if (length or 0) - running - (delayed or 0) > 0:
        if created_at is not None:  # entries of a batch are numbered by line
            since = finite(created_at, 0.0) or None
        elif again:  # what waits again was there before whatever is new
            since = _milliseconds(first_back[0])
        elif first_new:
            since = _milliseconds(first_new)
    return _Lane(cls, running, delayed or 0, since)


def _milliseconds(entry: bytes) -> float:
    return finite(entry.partition(b"-")[0], 0.0)


async def _read_dead(queue: Queue, total: int) -> dict[TrafficClass, int] | None:
    if not total:
        return {}
    if total > MAX_DEAD_READ:
        return None
    found = await cast(Any, queue.redis).eval_ro(_DEAD_CLASSES, 1, queue.keys.dead, MAX_DEAD_BYTES)
    if not found:
        return None
    interactive, batch = found
    return {TrafficClass.INTERACTIVE: interactive, TrafficClass.BATCH: batch}
