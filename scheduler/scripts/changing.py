"""The calls that change jobs and batches from outside: cancel, pause, collect, delete."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.lease import (
    ErrorCode,
)
from llmq.scheduler.scripts.call import Call, script, text
from llmq.scheduler.scripts.submitting import Verdict, verdict_of


def cancel_job(
    keys: QueueKeys, job_id: str, *, lane: str, client: str, state: str, code: ErrorCode, message: str
) -> Call[Verdict]:
    """End a waiting single job, or mark a running one. Answers unknown | ended | cancelled | signalled | running."""
    touched = (*keys.shared, *keys.of_lane(lane), keys.job(job_id), keys.inbox(client))
    return Call(script("cancel_job"), touched, [job_id, lane, state, code.value, message], verdict_of)


@dataclass(frozen=True, slots=True)
class BatchCancel:
    """What cancelling a batch found: `unknown`, `ended`, or `cancelling` with the consumers that run lines of it."""

    word: str
    status: str = ""
    consumers: tuple[str, ...] = ()


def cancel_batch(keys: QueueKeys, batch_id: str, *, lane: str) -> Call[BatchCancel]:
    """Let no line of the batch start any more."""

    def read(reply: list[Any]) -> BatchCancel:
        if reply[0] == b"cancelling":
            return BatchCancel("cancelling", "cancelling", tuple(text(name) for name in reply[1]))
        return BatchCancel(text(reply[0]), text(reply[1]) if len(reply) > 1 else "")

    return Call(script("cancel_batch"), (*keys.shared, *keys.of_batch(batch_id)), [lane], read)


def pause_batch(keys: QueueKeys, batch_id: str, *, lane: str, paused: bool) -> Call[Verdict]:
    """Take a batch out of its tenant's order, or put it back. Answers ok | ended (status) | unknown."""
    argv = [lane, "-" if paused else "+"]
    return Call(script("pause_batch"), (*keys.shared, keys.batch(batch_id)), argv, verdict_of)


def collect(keys: QueueKeys, batch_id: str, *, collector: str, cursor: str, lapse_ms: int = 0) -> Call[int]:
    """Say how far a collector has written and synced. Answers how many results were trimmed.

    With `lapse_ms` it is gone for good when it says nothing for so long.
    """
    touched = (*keys.shared, keys.batch(batch_id), keys.results(batch_id))
    return Call(script("collect"), touched, [collector, cursor, lapse_ms], int)


def delete_batch(keys: QueueKeys, batch_id: str, *, lane: str) -> Call[Verdict]:
    """Remove a batch that has ended, with its results. Answers ok | open (status) | unknown."""
    touched = (*keys.shared, keys.batch(batch_id), keys.results(batch_id))
    return Call(script("delete_batch"), touched, [batch_id, lane], verdict_of)


def delete_job(keys: QueueKeys, job_id: str) -> Call[Verdict]:
    """Remove the record of a single job that has ended. Answers ok | open | unknown."""
    return Call(script("delete_job"), (*keys.shared, keys.job(job_id)), [job_id], verdict_of)
