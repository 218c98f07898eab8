"""What is asked for: the parameters of uploads and batches, read and judged by OpenAI's rules.

Pure functions; each raises ApiError (400) that names the parameter. What a parameter is worth (whether the file is
there) is for the service to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from llmq.gateway.batch import places
from llmq.gateway.batch.files import KEEP_INPUT_S
from llmq.gateway.errors import ApiError
from llmq.scheduler.errors import UsageError
from llmq.scheduler.job import ENDPOINTS
from llmq.scheduler.units import DURATION_FORMS, format_duration, parse_duration

#: Seconds that a file may be asked to be kept.
LEAST_KEEP_S, MOST_KEEP_S = 3600, 30 * 86_400

#: Seconds that a batch may be given.
LEAST_WINDOW_S, MOST_WINDOW_S = 1.0, 30 * 86_400.0

#: Pairs of a metadata, characters of a name and of a value.
MOST_PAIRS, NAME_CHARACTERS, VALUE_CHARACTERS = 16, 64, 512


@dataclass(frozen=True, slots=True)
class BatchAsked:
    """The parameters of a batch; `window` is in seconds, `keep_s` is for its output files (None: for ever)."""

    input_file_id: str
    endpoint: str
    completion_window: str
    window: float
    metadata: dict[str, str] | None
    keep_s: int | None


def read_batch(body: bytes) -> BatchAsked:
    """Read the body of a request for a batch."""
    try:
        asked = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}") from None
    if not isinstance(asked, dict):
        raise ApiError(400, "The body: expected a JSON object.")
    endpoint = _text(asked, "endpoint")
    if endpoint not in ENDPOINTS:
        raise _wrong("endpoint", f"expected one of {', '.join(ENDPOINTS)}, got {endpoint[:80]!r}")
    completion_window = _text(asked, "completion_window")
    return BatchAsked(
        input_file_id=_text(asked, "input_file_id"),
        endpoint=endpoint,
        completion_window=completion_window,
        window=_window(completion_window),
        metadata=_metadata(asked.get("metadata")),
        keep_s=_keep(asked.get("output_expires_after"), "output_expires_after"),
    )


def read_purpose(fields: Mapping[str, str]) -> str:
    """Read the purpose of an upload: batches are all that the gateway has files for."""
    if "purpose" not in fields:
        raise ApiError(
            400, "Missing required parameter: 'purpose'.", param="purpose", code="missing_required_parameter"
        )
    if fields["purpose"] != "batch":
        raise _wrong(
            "purpose",
            f"expected 'batch', got {fields['purpose'][:80]!r}: llmq keeps files for batches, and for nothing else",
        )
    return "batch"


def read_expiry(fields: Mapping[str, str]) -> int:
    """Read for how many seconds an upload is kept: `expires_after[anchor]` and `expires_after[seconds]`."""
    given: dict[str, Any] = {
        name: fields[f"expires_after[{name}]"] for name in ("anchor", "seconds") if f"expires_after[{name}]" in fields
    }
    if not given and "expires_after" in fields:
        try:
            given = orjson.loads(fields["expires_after"])
        except orjson.JSONDecodeError:
            raise _wrong("expires_after", "expected an object with anchor and seconds") from None
    keep_s = _keep(given or None, "expires_after")
    return KEEP_INPUT_S if keep_s is None else keep_s


def check_file_id(asked: BatchAsked) -> None:
    """Raise ApiError where the input file's id is no id of a file."""
    if not places.is_file_id(asked.input_file_id):
        raise _wrong("input_file_id", f"expected the id of a file (file-...), got {asked.input_file_id[:80]!r}")


def _text(asked: Mapping[str, Any], name: str) -> str:
    value = asked.get(name)
    if value is None:
        raise ApiError(400, f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")
    if not isinstance(value, str):
        raise _wrong(name, f"expected text, got {orjson.dumps(value).decode()[:80]}")
    return value


def _window(text: str) -> float:
    try:
        window = parse_duration(text)
    except UsageError:
        raise _wrong("completion_window", f"expected a duration like {DURATION_FORMS}, got {text[:40]!r}") from None
    if not LEAST_WINDOW_S <= window <= MOST_WINDOW_S:
        most = format_duration(MOST_WINDOW_S)
        raise _wrong("completion_window", f"expected from {LEAST_WINDOW_S:g}s to {most}, got {text[:40]!r}")
    return window


def _metadata(value: object) -> dict[str, str] | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _wrong("metadata", "expected an object of texts")
    if len(value) > MOST_PAIRS:
        raise _wrong("metadata", f"expected at most {MOST_PAIRS} pairs, got {len(value)}")
    for name, text in value.items():
        if len(name) > NAME_CHARACTERS:
            raise _wrong("metadata", f"expected names of at most {NAME_CHARACTERS} characters, got {len(name)}")
        if not isinstance(text, str):
            raise _wrong(f"metadata.{name}", f"expected text, got {orjson.dumps(text).decode()[:80]}")
        if len(text) > VALUE_CHARACTERS:
            raise _wrong(f"metadata.{name}", f"expected at most {VALUE_CHARACTERS} characters, got {len(text)}")
    return value


def _keep(value: object, param: str) -> int | None:
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("anchor") != "created_at":
        raise _wrong(f"{param}.anchor" if isinstance(value, dict) else param, "expected the anchor 'created_at'")
    seconds = value.get("seconds")
    if isinstance(seconds, str) and seconds.isascii() and seconds.isdigit() and len(seconds) < 10:
        seconds = int(seconds)
    if isinstance(seconds, float) and seconds.is_integer():  # to JSON 3600.0 is a whole number
        seconds = int(seconds)
    if isinstance(seconds, bool) or not isinstance(seconds, int) or not LEAST_KEEP_S <= seconds <= MOST_KEEP_S:
        raise _wrong(f"{param}.seconds", f"expected a whole number from {LEAST_KEEP_S} to {MOST_KEEP_S}")
    return seconds


def _wrong(param: str, fault: str) -> ApiError:
    return ApiError(400, f"Invalid '{param}': {fault}.", param=param, code="invalid_value")
