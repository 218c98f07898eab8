"""The calls that write how an attempt went: finish, retry, hand back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.lease import (
    Answered,
    Ended,
    ErrorCode,
    Fence,
    HandedBack,
    Lease,
    Outcome,
    Reason,
    Retry,
)
from llmq.scheduler.scripts.call import Call, script
from llmq.scheduler.scripts.claiming import MOST_TOKENS

#: What an ended job's record says, by the error code of its end; all else is `failed`.
_STATES = {
    ErrorCode.EXPIRED: "expired",
    ErrorCode.TIMEOUT: "expired",
    ErrorCode.CANCELLED: "cancelled",
    ErrorCode.INTERRUPTED: "interrupted",
}


@dataclass(frozen=True, slots=True)
class Finish:
    """A job that ends: its lease, and how."""

    lease: Lease
    outcome: Answered | Ended


def _ending(finish: Finish) -> list[Any]:
    lease, outcome = finish.lease, finish.outcome
    kind = "line" if lease.batch_id else "job"
    head = [lease.fence.lane, lease.fence.entry, lease.fence.delivery, kind, lease.key]
    match outcome:
        case Answered(status_code, body, request_id, usage, dead):
            state = "completed" if status_code < 400 else "failed"
            used = [max(0, min(tokens, MOST_TOKENS)) for tokens in (usage.prompt_tokens, usage.completion_tokens)]
            tail = [state, status_code, request_id, body, "", "", *used]
            return [*head, *tail, lease.cost, int(dead), f"HTTP {status_code}" if dead else ""]
        case Ended(code, message, dead):
            tail = [_STATES.get(code, "failed"), "", "", b"", code.value, message, 0, 0]
            return [*head, *tail, lease.cost, int(dead), message if dead else ""]


def finish(keys: QueueKeys, consumer: str, host: str, endings: Sequence[Finish]) -> Call[list[Fence]]:
    """End jobs. Answers the fences that were refused: their lease belongs to another delivery."""
    touched = [
        key for item in endings for key in keys.of_ending(item.lease.fence.lane, item.lease.key, item.lease.reply_to)
    ]
    argv: list[Any] = [consumer, host]
    for item in endings:
        argv += _ending(item)
    fences = [item.lease.fence for item in endings]
    return Call(script("finish"), (*keys.shared, *touched), argv, lambda reply: [fences[int(i) - 1] for i in reply])


def retry(keys: QueueKeys, consumer: str, fence: Fence, outcome: Retry) -> Call[bool]:
    """Spend an attempt (or count a crash) and let the job wait until it is due; False where the lease is lost."""
    delay_ms = round(outcome.delay * 1000)
    argv = [consumer, fence.lane, fence.entry, fence.delivery, delay_ms, int(outcome.crashed)]
    return Call(script("retry"), (*keys.shared, *keys.of_lane(fence.lane)), argv, lambda reply: reply == 1)


def hand_back(keys: QueueKeys, consumer: str, returned: Sequence[tuple[Fence, HandedBack]]) -> Call[list[Fence]]:
    """Return unfinished jobs without spending an attempt. Answers the fences that were refused."""
    argv: list[Any] = [consumer]
    for fence, outcome in returned:
        preempted = int(outcome.reason is Reason.PREEMPTED)
        argv += (fence.lane, fence.entry, fence.delivery, round(outcome.delay * 1000), preempted, outcome.kept)
    touched = [key for fence, _ in returned for key in keys.of_lane(fence.lane)]
    fences = [fence for fence, _ in returned]
    return Call(script("hand_back"), (*keys.shared, *touched), argv, lambda reply: [fences[int(i) - 1] for i in reply])


def settle(
    keys: QueueKeys,
    consumer: str,
    host: str,
    settled: Sequence[tuple[Lease, Outcome]],
) -> list[Call[Any]]:
    """Return the calls that write outcomes: jobs that end in one call, those handed back in one, each retry in one."""
    endings = [Finish(lease, out) for lease, out in settled if isinstance(out, Answered | Ended)]
    returned = [(lease.fence, out) for lease, out in settled if isinstance(out, HandedBack)]
    calls: list[Call[Any]] = []
    if endings:
        calls.append(finish(keys, consumer, host, endings))
    if returned:
        calls.append(hand_back(keys, consumer, returned))
    calls += [retry(keys, consumer, lease.fence, out) for lease, out in settled if isinstance(out, Retry)]
    return calls
