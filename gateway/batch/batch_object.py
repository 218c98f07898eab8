"""The batch object: what a client sees of a batch, made of the facts about it and of how its lines stand in Redis.

    validating -> in_progress -> finalizing -> completed | expired
    validating -> failed
    validating | in_progress -> cancelling -> cancelled

Pure functions. An object that has ended is made once (`ended_object`) and kept; every other one when it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from llmq.gateway.batch.examination import InputFault
from llmq.gateway.batch.facts import Accepted, Facts, Order
from llmq.gateway.batch.parts import Sums
from llmq.scheduler.batch_record import BatchRecord, BatchStatus

#: Fields of a batch's record in Redis that belong to the gateway: which life it is, and the sums before it.
LIFE, BEFORE = "life", "before"

#: What a batch in Redis ends as, in OpenAI's words, with the field that says when.
ENDS = {
    BatchStatus.COMPLETED: "completed",
    BatchStatus.CANCELLED: "cancelled",
    BatchStatus.EXPIRED: "expired",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a batch has ended: its last status, when its last line ended and when all was written, and what came out."""

    status: str
    finalizing_at: int | None
    at: int
    cancelling_at: int | None = None
    sums: Sums = field(default_factory=Sums)
    output_file_id: str | None = None
    error_file_id: str | None = None
    faults: Sequence[InputFault] = ()


def extra_of(life: int, before: Sums) -> dict[str, str]:
    """Return what the record of a batch in Redis says of its life."""
    return {LIFE: str(life), BEFORE: orjson.dumps(before).decode()}


def life_of(record: BatchRecord) -> tuple[int, Sums]:
    """Read what `extra_of` wrote; a batch that no gateway has opened is of no life."""
    extra = record.extra or {}
    return int(extra.get(LIFE, "0")), Sums(**orjson.loads(extra.get(BEFORE, "{}")))


def batch_object(facts: Facts, record: BatchRecord | None) -> dict[str, Any]:
    """Return a batch as it stands; `record` is that of Redis, None where it has none (yet, or for a moment)."""
    if facts.ended is not None:
        return facts.ended
    order, accepted = facts.order, facts.accepted
    assert order is not None  # a batch without an order is none
    shown = _blank(order, accepted)
    shown["status"] = _status(facts, record)
    if shown["status"] == "cancelling":
        shown["cancelling_at"] = _cancelling_at(facts.cancel_at, record)
    if record is not None:
        _, before = life_of(record)
        so_far = before + Sums(record.completed, record.failed, record.prompt_tokens, record.completion_tokens)
        shown |= _counts(shown["request_counts"]["total"], so_far)
        if shown["status"] == "finalizing":
            shown["finalizing_at"] = _whole(record.ended_at or record.expires_at)
    return shown


def ended_object(order: Order, accepted: Accepted | None, outcome: Outcome) -> dict[str, Any]:
    """Return a batch as it stays."""
    shown = _blank(order, accepted)
    shown |= _counts(accepted.total if accepted else 0, outcome.sums)
    shown["status"] = outcome.status
    shown[f"{outcome.status}_at"] = outcome.at
    shown["finalizing_at"] = None if outcome.status == "cancelled" else outcome.finalizing_at
    shown["cancelling_at"] = outcome.cancelling_at
    shown["output_file_id"] = outcome.output_file_id
    shown["error_file_id"] = outcome.error_file_id
    if outcome.faults:
        shown["errors"] = {"object": "list", "data": [fault.to_openai() for fault in outcome.faults]}
    return shown


def _blank(order: Order, accepted: Accepted | None) -> dict[str, Any]:
    return {
        "id": order.id,
        "object": "batch",
        "endpoint": order.endpoint,
        "model": accepted.model if accepted else None,
        "errors": None,
        "input_file_id": order.input_file_id,
        "completion_window": order.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": order.created_at,
        "in_progress_at": accepted.at if accepted else None,
        "expires_at": order.expires_at,
        "finalizing_at": None,
        "completed_at": None,
        "failed_at": None,
        "expired_at": None,
        "cancelling_at": None,
        "cancelled_at": None,
        "metadata": order.metadata,
        **_counts(accepted.total if accepted else 0, Sums()),
    }


def _counts(total: int, sums: Sums) -> dict[str, Any]:
    # Redis may count a line twice that the parts have once (it lost the first end); a client must not see 101 of 100.
    completed = min(sums.completed, total)
    return {
        "request_counts": {"total": total, "completed": completed, "failed": min(sums.failed, total - completed)},
        "usage": sums.usage(),
    }


def _status(facts: Facts, record: BatchRecord | None) -> str:
    if record is not None:
        match record.status:
            case BatchStatus.CANCELLING | BatchStatus.CANCELLED:
                return "cancelling"
            case BatchStatus.EXPIRING | BatchStatus.EXPIRED | BatchStatus.COMPLETED:
                return "finalizing"
    if facts.cancel_at is not None:
        return "cancelling"
    return "validating" if facts.accepted is None else "in_progress"


def _cancelling_at(asked_at: int | None, record: BatchRecord | None) -> int | None:
    return asked_at if asked_at is not None or record is None else _whole(record.cancelling_at)


def _whole(moment: float | None) -> int | None:
    return None if moment is None else int(moment)
