"""The calls of a job that runs: claim it, renew its lease, say that its answer has begun."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmq.scheduler.job import TrafficClass
from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.lease import (
    Fence,
    Lease,
    Why,
)
from llmq.scheduler.scripts.call import Call, script, text

#: What a worker passes at most: more lanes make the script's KEYS long for little gain.
MAX_CANDIDATES = 16

#: More digits than any number of ours has.
_MOST_DIGITS = 18

#: LLM tokens that one answer is believed to have used. Redis adds them up in 64 bits, and a sum that does not fit would
#: end the finish script in its middle, with every job of the call (G16).
MOST_TOKENS = 10**9


@dataclass(frozen=True, slots=True)
class Doomed:
    """A job that was claimed only to be ended: why, and the lease that allows it."""

    lease: Lease
    verdict: str


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a claim gave: leases; jobs to end; else why nothing more, and seconds until that may change.

    `candidates` are the lanes to give next time; None where those given were right. `protects` says that the youngest
    line that was named may not be preempted any more.
    """

    leases: list[Lease]
    doomed: list[Doomed]
    reason: str
    wait: float
    candidates: list[str] | None
    protects: bool = False


def _lease(row: list[Any], why: Why) -> Lease:
    lane, entry, delivery, _, cls, tenant, attempts, crashes, preemptions, flat, *kept = row
    # Whoever can write to Redis can add an entry; one that llmq did not write has no data, and ends as malformed.
    fields: dict[bytes, bytes] = dict(zip(flat[::2], flat[1::2], strict=False))
    queued_ms = fields.get(b"t", entry.partition(b"-")[0])
    return Lease(
        Fence(text(lane), text(entry), int(delivery)),
        TrafficClass.INTERACTIVE if cls == b"i" else TrafficClass.BATCH,
        why,
        tenant.decode(errors="replace"),
        fields.get(b"k", entry).decode(errors="replace"),
        fields.get(b"d", b""),
        min(_number(fields.get(b"c", b"1")), MOST_TOKENS),
        int(attempts),
        int(crashes),
        int(preemptions),
        fields.get(b"r", b"").decode(errors="replace"),
        _number(queued_ms) / 1000,
        *kept,
    )


def _number(value: bytes) -> int:
    return int(value) if value.isdigit() and len(value) <= _MOST_DIGITS else 0


def doomed(rows: list[list[Any]]) -> list[Doomed]:
    """Read the rows of jobs that were claimed only to be ended."""
    return [Doomed(_lease(row, Why.CHAT if row[4] == b"i" else Why.BUCKET), text(row[3])) for row in rows]


def _claimed(reply: list[Any]) -> Claimed:
    jobs, ended, reason, wait_ms, candidates, protects = reply
    return Claimed(
        [_lease(row, Why(text(row[3]))) for row in jobs],
        doomed(ended),
        text(reason),
        int(wait_ms) / 1000,
        [text(lane) for lane in candidates] if reason == b"lanes" else None,
        protects == 1,
    )


def claim(
    keys: QueueKeys,
    consumer: str,
    *,
    room: int,
    free: int,
    reserve: int | None,
    suspects: int,
    candidates: Sequence[str],
    youngest: Fence | None = None,
) -> Call[Claimed]:
    """Take the next jobs for one worker under the policy; a `reserve` of None is no batch, not even by the deadline."""
    lanes = candidates[:MAX_CANDIDATES]
    touched = [key for lane in lanes for key in keys.of_lane(lane)]
    line = f"{youngest.lane}|{youngest.entry}" if youngest else ""
    argv = [consumer, room, free, "" if reserve is None else reserve, suspects, line, *lanes]
    return Call(script("claim"), (*keys.shared, *touched), argv, _claimed)


@dataclass(frozen=True, slots=True)
class Renewed:
    """Fences whose lease belongs to another delivery, and fences of jobs that somebody cancelled."""

    lost: list[Fence]
    cancelled: list[Fence]


def renew(keys: QueueKeys, consumer: str, fences: Sequence[Fence]) -> Call[Renewed]:
    """Keep the leases of jobs that this worker still runs."""
    lanes = list(dict.fromkeys(fence.lane for fence in fences))
    number = {lane: position for position, lane in enumerate(lanes, 1)}
    argv: list[Any] = [consumer]
    for fence in fences:
        argv += (fence.lane, number[fence.lane], fence.entry, fence.delivery)

    def read(reply: list[list[int]]) -> Renewed:
        lost, cancelled = reply
        return Renewed([fences[int(i) - 1] for i in lost], [fences[int(i) - 1] for i in cancelled])

    return Call(script("renew"), (*keys.shared, *(keys.lane(lane) for lane in lanes)), argv, read)


def first_delta(keys: QueueKeys, consumer: str, lease: Lease, *, inbox: str, data: bytes) -> Call[bool]:
    """Send the first delta of an interactive job; False where the lease is lost."""
    fence = lease.fence
    argv = [consumer, fence.lane, fence.entry, fence.delivery, lease.key, data]
    return Call(script("first_delta"), (*keys.shared, keys.lane(fence.lane), inbox), argv, lambda reply: reply == 1)


def tell(keys: QueueKeys, *, inbox: str, data: bytes) -> Call[bool]:
    """Send deltas of answers that have begun."""
    return Call(script("tell"), (*keys.shared, inbox), [data], lambda reply: reply == 1)
