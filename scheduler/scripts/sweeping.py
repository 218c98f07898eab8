"""The calls that put in order what others left: reclaim, lose, recount, reap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.lease import (
    batch_of,
)
from llmq.scheduler.scripts.call import Call, script, text
from llmq.scheduler.scripts.claiming import Doomed, doomed

#: A time that no clock gets to.
FAR_AWAY_MS = 9 * 10**15


@dataclass(frozen=True, slots=True)
class Swept:
    """One step of a sweep: where to go on, jobs that wait again, jobs to end, entries that somebody deleted."""

    cursor: str
    reclaimed: int
    doomed: list[Doomed]
    deleted: list[str]


def sweep(
    keys: QueueKeys,
    consumer: str,
    *,
    lane: str,
    lease_ms: int,
    cursor: str,
    count: int = 100,
    not_after_ms: int = FAR_AWAY_MS,
) -> Call[Swept]:
    """Reclaim the jobs of one lane whose lease ran out; nothing where Redis comes to it after `not_after_ms`."""

    def read(reply: list[Any]) -> Swept:
        cursor, again, to_end, deleted = reply
        return Swept(text(cursor), int(again), doomed(to_end), [text(entry) for entry in deleted])

    argv = [consumer, lane, lease_ms, cursor, count, not_after_ms]
    return Call(script("sweep"), (*keys.shared, *keys.of_lane(lane)), argv, read)


def lose(keys: QueueKeys, *, lane: str, entries: Sequence[str]) -> Call[int]:
    """Account for entries that a sweep found deleted. Answers how many."""
    batch_id = batch_of(lane)
    record = batch_id or "-"
    touched = (*keys.shared, *keys.of_lane(lane), keys.batch(record), keys.results(record))
    return Call(script("lose"), touched, [lane, "line" if batch_id else "job", *entries], int)


def recount(keys: QueueKeys, *, lanes: Sequence[str]) -> Call[int]:
    """Set right the counts that the caps compare with. Answers by how many jobs they were wrong."""
    return Call(script("recount"), (*keys.shared, *(keys.lane(lane) for lane in lanes)), lanes, int)


def reap(keys: QueueKeys, batch_id: str, *, lane: str, cursor: str, count: int = 500) -> Call[tuple[str, int]]:
    """End waiting lines of a batch that was cancelled or whose window is over. Answers next cursor and how many."""
    return Call(
        script("reap"),
        (*keys.shared, *keys.of_batch(batch_id)),
        [lane, cursor, count],
        lambda reply: (text(reply[0]), int(reply[1])),
    )
