"""The result: what a job's answer looks like to who asked for it, and the error in its place where there is none.

The last step of a job's way: a record as the finish script left it becomes a `Result`, a `JobEnded` is raised, or a
line of a batch becomes a `LineResult`. Reads nothing from Redis.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson

from llmq.scheduler.errors import JobCancelled, JobEnded, JobExpired, JobFailed, JobInterrupted, JobLost
from llmq.scheduler.job_record import JobRecord
from llmq.scheduler.lease import Usage
from llmq.scheduler.records import ResultRecord
from llmq.scheduler.state import JobState

#: Of what an engine said about a refusal, as much as a line of an error message holds.
_EXCERPT = 300


@dataclass(frozen=True, slots=True)
class Result:
    """An engine's answer. `body` is its JSON, whole; `text` what it says, "" for answers that are no text."""

    job_id: str
    status_code: int
    body: Any = field(repr=False)
    text: str
    usage: Usage
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class LineResult:
    """How one line of a batch ended.

    `line` is its number in the file, from 1. `error_code` and `error_message` are "" where an engine answered;
    `status_code` and `body` are None where none did.
    """

    line: int
    custom_id: str
    ok: bool
    status_code: int | None
    body: Any = field(repr=False)
    text: str
    usage: Usage
    error_code: str = ""
    error_message: str = ""
    request_id: str = ""


def result_of(record: JobRecord) -> Result:
    """Return the answer of a job that has ended. Raises the JobEnded that says why there is none.

    Raises KeyMissing and TamperedError for an answer that was stored encrypted and cannot be read.
    """
    if record.unreadable is not None:
        raise record.unreadable
    if record.state is not JobState.COMPLETED or record.status_code is None:
        raise ended_error(record)
    body = read_body(record.body)
    return Result(record.id, record.status_code, body, text_of(body), record.usage, record.request_id)


def ended_error(record: JobRecord) -> JobEnded:
    """Return the error of a job that ended without an answer that counts."""
    about, why = f"job {record.id}", f": {record.message}" if record.message else ""
    match record.state:
        case JobState.CANCELLED:
            return JobCancelled(record.id, f"{about} was cancelled")
        case JobState.EXPIRED:
            return JobExpired(
                record.id,
                f"{about} waited longer than it may{why}; start more workers, or give it more time: "
                "submit(timeout=...) or llmq set queue_ttl",
            )
        case JobState.INTERRUPTED:
            return JobInterrupted(record.id, f"{about} broke off after its answer had begun{why}; submit it again")
        case JobState.LOST:
            return lost(record.id)
    body = read_body(record.body) if record.status_code is not None else None
    if record.status_code is not None:
        return JobFailed(
            record.id,
            f"{about}: the engine answered HTTP {record.status_code}: {_excerpt(body)}",
            record.status_code,
            body,
        )
    return JobFailed(record.id, f"{about} failed ({record.code or 'unknown'}){why}", None, None)


def lost(job_id: str) -> JobLost:
    """Return the error for a job that Redis no longer knows."""
    return JobLost(
        job_id,
        f"job {job_id} is lost: Redis no longer knows it (its data was deleted, or the result was kept no longer: "
        "llmq set keep_interactive); submit it again",
    )


def line_result(record: ResultRecord) -> LineResult:
    """Return a line of a batch as callers see it."""
    body = read_body(record.body) if record.status_code is not None else None
    return LineResult(
        record.line,
        record.key,
        record.ok,
        record.status_code,
        body,
        text_of(body),
        record.usage,
        record.error_code,
        record.error_message,
        record.request_id,
    )


def read_body(body: bytes) -> Any:
    """Return an engine's JSON; what is no JSON (a proxy's page) is text."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode(errors="replace")


def text_of(body: Any) -> str:
    """Return the text of an answer, of its first choice; "" where it holds none."""
    if not isinstance(body, dict):
        return ""
    match body:
        case {"choices": [{"message": {"content": str(text)}}, *_]} | {"choices": [{"text": str(text)}, *_]}:
            return text
        case {"output": [*items]}:  # responses
            parts = [part for item in items if isinstance(item, dict) for part in _list(item.get("content"))]
            return "".join(_texts(parts, "output_text"))
        case {"content": [*parts]}:  # messages
            return "".join(_texts(parts, "text"))
    return ""


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _texts(parts: list[Any], kind: str) -> list[str]:
    return [
        part["text"]
        for part in parts
        if isinstance(part, dict) and part.get("type") == kind and isinstance(part.get("text"), str)
    ]


def _excerpt(body: Any) -> str:
    """Return what an engine says about a refusal: its message where there is one, on one line, shortened."""
    match body:
        case {"error": {"message": str(said)}} | {"error": str(said)} | {"detail": str(said)} | {"message": str(said)}:
            pass
        case str(said):
            pass
        case _:
            said = orjson.dumps(body).decode()
    said = " ".join(said.split())
    return said if len(said) <= _EXCERPT else f"{said[: _EXCERPT - 3]}..."
