"""Sort what an engine answered: an answer, or which of the errors of `base.py`.

By HTTP status first, then by the type that an error names, because engines put the same fault into bodies of every
shape: an `error` object, a `detail` string or list, plain text. `http.py` reads, this module decides; it does no I/O.

    400 401 404 405 413 422 501, and all other 4xx    the caller's fault: an answer, never retried
    408 425 429 503 529                               overload: nothing is spent, Retry-After wins
    all else, and 2xx that is no answer               unclear: retried with backoff
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import orjson

from llmq.scheduler.lease import NO_USAGE
from llmq.workers.engines.base import EngineAnswer, EngineError, EngineOverloaded, EngineUnclear
from llmq.workers.engines.merge import dump, load

#: 529 is not in any RFC; Anthropic-shaped servers send it for "overloaded".
OVERLOAD = frozenset({408, 425, 429, 503, 529})

#: Statuses outside 4xx that are the caller's fault: the engine was not started for what the request wants.
NOT_IMPLEMENTED = 501

#: Where an error inside a stream has no status: what its type, code or message says, letters only, in this order.
STATUS_OF_WORD = (
    ("overloaded", 503),
    ("unavailable", 503),
    ("ratelimit", 429),
    ("toomanyrequests", 429),
    ("authentication", 401),
    ("notfound", 404),
    ("notsupported", 501),
    ("contextsize", 400),
    ("contextlength", 400),
    ("badrequest", 400),
    ("invalidrequest", 400),
    ("validation", 400),
)

#: What vLLM says to every request in flight when its engine process has died; the API server follows it soon after.
DEATH_WORDS = (b"EngineCore encountered an issue", b"EngineDeadError")

#: How much of an engine's words a message repeats.
EXCERPT = 200


def is_callers_fault(status: int) -> bool:
    """Return whether asking again cannot help: 4xx that are not overload, and 501."""
    return status == NOT_IMPLEMENTED or (400 <= status < 500 and status not in OVERLOAD)


def sort_status(status: int, body: bytes, request_id: str, retry_after: str | None) -> EngineAnswer | EngineError:
    """Sort a response whose status is not 2xx. A body that is no JSON becomes a JSON string."""
    if is_callers_fault(status):
        return EngineAnswer(status, as_json(body), request_id, NO_USAGE)
    if status in OVERLOAD:
        return EngineOverloaded(f"the engine refuses work (HTTP {status}): {excerpt(body)}", seconds_of(retry_after))
    if 300 <= status < 400:
        return EngineUnclear(f"the engine answered with a redirect (HTTP {status}), which llmq never follows", status)
    return EngineUnclear(f"the engine answered HTTP {status}: {excerpt(body)}", status, as_json(body))


def sort_error_chunk(chunk: dict[str, Any], raw: bytes, request_id: str) -> EngineAnswer | EngineError:
    """Sort an `error` that came where an answer was expected: inside a stream, or in a body with HTTP 200."""
    return sort_status(status_of_error(chunk.get("error")), raw, request_id, None)


def status_of_error(error: object) -> int:
    """Return the HTTP status that an `error` value means; 500 where it does not say."""
    fields = error if isinstance(error, dict) else {"message": error}
    for name in ("code", "status", "status_code"):
        value = fields.get(name)
        if isinstance(value, str) and re.fullmatch(r"[0-9]{3}", value):
            value = int(value)
        if isinstance(value, int) and 400 <= value < 600:
            return value
    # Only what classifies: a message may quote anything, the caller's prompt included.
    words = re.sub(r"[^a-z]", "", f"{fields.get('type')} {fields.get('code')}".lower())
    return next((status for word, status in STATUS_OF_WORD if word in words), 500)


def speaks_of_death(body: bytes) -> bool:
    """Return whether the words are those that an engine says when it has died."""
    return any(words in body for words in DEATH_WORDS)


def seconds_of(retry_after: str | None, now: datetime | None = None) -> float | None:
    """Read a Retry-After header: seconds, or an HTTP date; None where it is missing or unreadable."""
    if retry_after is None:
        return None
    text = retry_after.strip()
    if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text):
        return float(text)
    try:
        at = parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError):
        return None
    # "-0000" gives a time without a zone; HTTP dates are always UTC.
    at = at if at.tzinfo else at.replace(tzinfo=UTC)
    return max(0.0, (at - (now or datetime.now(UTC))).total_seconds())


def as_json(body: bytes) -> bytes:
    """Return the body as it came if it is JSON, else as a JSON string."""
    try:
        orjson.loads(body)
        return body
    except orjson.JSONDecodeError:
        pass
    try:
        return dump(load(body))
    except ValueError:
        return dump(body.decode("utf-8", "replace"))


def excerpt(body: bytes) -> str:
    """Return the beginning of a body for a message, on one line."""
    text = " ".join(body[: 4 * EXCERPT].decode("utf-8", "replace").split())
    if not text:
        return "(empty body)"
    return text if len(text) <= EXCERPT else f"{text[:EXCERPT]}..."
