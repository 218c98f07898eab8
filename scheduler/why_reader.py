"""Takes the snapshot of a job or a batch that `why.py` explains. It reads, and changes nothing.

One look costs the same whatever waits: of a single job's lane at most 500 jobs, or some megabytes, are looked at to
tell its place, and they stay on the server.
"""

from __future__ import annotations

from typing import Any, cast

from llmq.scheduler.batch_lookup import read_batches
from llmq.scheduler.bucket import bucket_of
from llmq.scheduler.errors import NotFoundError
from llmq.scheduler.fleet import read_workers
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.job_record import NEVER_MS
from llmq.scheduler.live import LiveSettings
from llmq.scheduler.queue import Queue
from llmq.scheduler.state import JobState
from llmq.scheduler.stored_number import finite, whole
from llmq.scheduler.why_view import BatchView, JobView, LaneView, QueueView

#: Jobs of a lane that are counted, and bytes of them that the server looks at: it answers nobody else meanwhile.
MOST_BEFORE = 500
_MOST_BYTES = 4 * 2**20

#: How many entries of a lane were never claimed and come before one; and whether the count was cut off.
_BEFORE = """
local group = redis.pcall('XINFO', 'GROUPS', KEYS[1])
local after = '-'
for i = 1, group[1] and #group[1] or 0, 2 do
  if group[1][i] == 'last-delivered-id' then after = '(' .. group[1][i + 1] end
end
local found, bytes = 0, 0
while found < tonumber(ARGV[2]) and bytes < tonumber(ARGV[3]) do
  local entries = redis.call('XRANGE', KEYS[1], after, '(' .. ARGV[1], 'COUNT', 4)
  for _, entry in ipairs(entries) do
    after = '(' .. entry[1]
    for _, part in ipairs(entry[2]) do bytes = bytes + #part end
  end
  found = found + #entries
  if #entries < 4 then return {found, 0} end
end
return {found, 1}
"""


async def read_why(queue: Queue, name: str) -> JobView | BatchView:
    """Return the snapshot of the batch or single job of that id. Raises NotFoundError."""
    (batch,) = await read_batches(queue.redis, queue.keys, [name])
    if batch is not None:
        view = await read_queue_view(queue)
        return BatchView(view, await read_lane(queue, batch.lane, view.now), batch)
    try:
        job = await queue.job(name)
    except NotFoundError:
        raise NotFoundError(
            f"there is no job and no batch {name!r} in queue {queue.name!r}: it was never submitted there, "
            "or is kept no longer; see: llmq batch ls"
        ) from None
    view = await read_queue_view(queue)
    waits = job.state is JobState.WAITING
    before, more = await read_before(queue, job.lane, job.entry) if waits else (0, False)
    return JobView(view, await read_lane(queue, job.lane, view.now), job, before, more)


async def read_queue_view(queue: Queue) -> QueueView:
    """Return what holds for every job of a queue."""
    keys = queue.keys
    pipe = queue.redis.pipeline(transaction=False)
    pipe.hgetall(keys.config)
    pipe.hgetall(keys.bucket)
    pipe.hget(keys.counts, "b")
    pipe.exists(keys.ready("i"))
    pipe.exists(keys.ready("b"))
    pipe.zrange(keys.starts, 0, 0, desc=True, withscores=True)
    config, bucket, batch_jobs, chat_waits, batch_waits, newest = await pipe.execute()
    live, now_ms = LiveSettings.from_hash(config), await queue.now_ms()
    moved = bool(config.get(b"plan"))  # the deadline counts from when a window opened
    last_ms = max(finite(bucket.get(b"start"), 0.0), finite(bucket.get(b"since"), 0.0), newest[0][1] if newest else 0)
    return QueueView(
        name=queue.name,
        now=now_ms / 1000,
        paused=frozenset(cls for cls in TrafficClass if config.get(f"paused_{cls.letter}".encode())),
        bucket=bucket_of(config, bucket, now_ms),
        deadline_in_s=(last_ms - now_ms) / 1000 + live.deadline_s if batch_waits and not moved else None,
        chat_waits=bool(chat_waits),
        preempt=live.preempt,
        yields_for_s=_yields_for_s(config.get(b"yields_b", b""), now_ms),
        cap_reached=whole(batch_jobs) >= live.cap_batch,
        workers=tuple(await read_workers(queue)),
    )


def _yields_for_s(stored: bytes, now_ms: int) -> float | None:
    left_ms = whole(stored) - now_ms if stored.isdigit() else 0
    return left_ms / 1000 if left_ms > 0 else None


async def read_lane(queue: Queue, lane: str, now: float) -> LaneView:
    """Return where a lane stands."""
    keys = queue.keys
    stored = await cast(Any, queue.redis).hget(keys.lanes, lane)
    if stored is None:  # it has ended
        return LaneView("", None, 0, 0)
    known = stored.decode(errors="replace")
    letter, (tenant, _, due) = known[1:2], known[3:].partition("|")
    member = f"{tenant}|{due}|{lane}"
    pipe = queue.redis.pipeline(transaction=False)
    pipe.zrank(keys.ready(letter), tenant)
    pipe.zcard(keys.ready(letter))
    pipe.zscore(keys.order(letter), member)
    pipe.zlexcount(keys.order(letter), f"[{tenant}|", f"({member}")
    pipe.zscore(keys.asleep, lane)
    rank, tenants, listed, before, wakes_ms = await pipe.execute()
    asleep = wakes_ms is not None and wakes_ms < NEVER_MS
    return LaneView(
        tenant=tenant,
        place=rank + 1 if rank is not None and listed is not None else None,
        tenants=tenants,
        lanes_before=before if listed is not None else 0,
        wakes_in_s=max(0.0, wakes_ms / 1000 - now) if asleep else None,
    )


async def read_before(queue: Queue, lane: str, entry: str) -> tuple[int, bool]:
    """Return how many jobs of a lane come before one that waits there, and whether there may be more."""
    stream, back = queue.keys.of_lane(lane)
    redis = cast(Any, queue.redis)
    rank = await redis.zrank(back, entry)
    if rank is not None:
        return int(rank), False
    again = await redis.zcount(back, "-inf", await queue.now_ms())
    new, cut = await redis.eval_ro(_BEFORE, 1, stream, entry, MOST_BEFORE, _MOST_BYTES)
    return int(again) + int(new), bool(cut)
