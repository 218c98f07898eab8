"""The answers: what a client is sent for a job that has ended.

An engine's answer, a refusal of its own included, goes out with the engine's status and body, byte for byte. A job that
ended without one becomes an error in OpenAI's shape, so that the official clients try again where that helps, and not
where it does not (`x-should-retry`).
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from llmq.gateway.errors import ApiError
from llmq.scheduler.job_record import JobRecord
from llmq.scheduler.lease import ErrorCode
from llmq.scheduler.state import JobState

#: The official clients obey this header before all rules of their own.
_DO_NOT_RETRY = {"x-should-retry": "false"}


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """What an engine answered, as it is sent on."""

    status: int
    body: bytes
    content_type: str


def answer_of(record: JobRecord | None, retry_after: float) -> EngineAnswer:
    """Return the engine's answer; raises the ApiError that says why there is none."""
    if record is None or record.status_code is None:
        raise failure_of(record, retry_after)
    body = record.body
    if body[:1] != b'"':
        return EngineAnswer(record.status_code, body, "application/json")
    # What was no JSON is kept as a JSON text.
    return EngineAnswer(record.status_code, orjson.loads(body).encode(), "text/plain; charset=utf-8")


def failure_of(record: JobRecord | None, retry_after: float) -> ApiError:
    """Return the error for a job that ended without an engine's answer; None is a job that Redis no longer knows."""
    state = record.state if record is not None else JobState.LOST
    match state:
        case JobState.EXPIRED:
            message = f"no worker was free in time; try again in {retry_after:.0f} s"
            return ApiError(503, message, code="queue_timeout", retry_after=retry_after)
        case JobState.INTERRUPTED:
            message = "the answer broke off: its worker or engine stopped; send the request again"
            return ApiError(503, message, code="interrupted", retry_after=1)
        case JobState.CANCELLED:
            return ApiError(409, "the request was cancelled by an operator", code="cancelled", headers=_DO_NOT_RETRY)
        case JobState.LOST:
            message = "the queue no longer knows the request: its data was deleted; send it again"
            return ApiError(503, message, code="request_lost", retry_after=1)
    assert record is not None
    message = f"the request failed: {record.message or record.code or 'the engine gave no answer'}"
    if record.code == ErrorCode.RESULT_TOO_LARGE:
        return ApiError(400, message, code=record.code, headers=_DO_NOT_RETRY)
    if record.code == ErrorCode.WORKER_LOST:  # it was in flight at three deaths: not once more
        return ApiError(500, message, code=record.code, headers=_DO_NOT_RETRY)
    return ApiError(502, message, code=record.code or "engine_error")


def engine_error(answer: EngineAnswer) -> bytes:
    """Return the JSON of an engine's refusal as an event of a stream that has begun by then."""
    try:
        told = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        told = answer.body.decode(errors="replace")
    match told:
        case {"error": dict()}:
            return answer.body
        case {"error": str(message)} | {"message": str(message)} | {"detail": str(message)} | str(message):
            pass
        case _:
            message = orjson.dumps(told).decode()
    return ApiError(answer.status, message, code="engine_error").body()
