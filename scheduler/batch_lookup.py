"""The batch lookup: reads the records of batches, with what is seen of them in their lanes, in one trip.

Reading writes nothing: a batch whose window is over is shown as it stands until somebody ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from llmq.scheduler.batch_record import RESULTS_NOT_COLLECTED, BatchRecord, Standing
from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.lease import lane_of_batch

#: Score of a lane in `asleep` whose results wait for a collector (queue.lua: UNCOLLECTED).
_UNCOLLECTED = 9e15


async def read_batches(redis: Redis, keys: QueueKeys, batch_ids: Sequence[str]) -> list[BatchRecord | None]:
    """Return the record of each batch; None for one that Redis does not know (any more)."""
    if not batch_ids:
        return []
    pipe = redis.pipeline(transaction=False)
    for batch_id in batch_ids:
        lane = lane_of_batch(batch_id)
        pipe.hgetall(keys.batch(batch_id))
        pipe.xlen(keys.lane(lane))
        pipe.xpending(keys.lane(lane), "workers")
        pipe.zscore(keys.asleep, lane)
    replies = await pipe.execute(raise_on_error=False)
    groups = [replies[place : place + 4] for place in range(0, len(replies), 4)]
    return [_record(batch_id, *group) for batch_id, group in zip(batch_ids, groups, strict=True)]


def _record(batch_id: str, fields: Any, in_lane: Any, pending: Any, sleeps: Any) -> BatchRecord | None:
    if isinstance(pending, ResponseError) and "NOGROUP" in str(pending):
        pending = {"pending": 0}  # no line has come yet, or all have ended
    for reply in (fields, in_lane, pending, sleeps):
        if isinstance(reply, Exception):
            raise reply
    if b"status" not in fields:
        return None
    reason = RESULTS_NOT_COLLECTED if sleeps == _UNCOLLECTED else ""
    return BatchRecord.from_hash(batch_id, fields, Standing(in_lane, pending["pending"], reason))
