"""A call: what a client asks of the inference routes, read from its headers and its body.

The body stays as it came (`Job.raw`); looked at are only the fields that llmq needs: whether the answer streams, and
with its usage; the class; what the cost is estimated from. Reads nothing from anywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmq.gateway.errors import ApiError
from llmq.scheduler.errors import EncodingError
from llmq.scheduler.job import Job, TrafficClass

CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses",
)  # fmt: skip

#: Makes a single call batch class, or says that it is interactive whatever its tier.
CLASS_HEADER = "x-llmq-class"
KEY_HEADER = "idempotency-key"

#: OpenAI's word for a call that may wait in exchange for a lower price.
FLEX = "flex"

_LONGEST_KEY = 255


@dataclass(frozen=True, slots=True)
class Call:
    """One call. `key` is its idempotency key, None where it has none; `wants_usage` is for streams."""

    job: Job
    cls: TrafficClass
    key: str | None
    streams: bool
    wants_usage: bool

    @property
    def digest(self) -> str:
        """What is asked, as a digest; "" for a call without a key, which is never compared."""
        if self.key is None:
            return ""
        return hashlib.sha256(b"%s\n%s\n%s" % (self.job.url.encode(), self.cls.encode(), self.job.raw)).hexdigest()


def read_call(url: str, headers: Mapping[str, str], raw: bytes) -> Call:
    """Return the call. Raises ApiError (400) that names the field at fault."""
    try:
        job = Job.of_json(url, raw)
    except EncodingError as error:
        raise ApiError(400, f"the body: {error.fault}", code="invalid_json") from None
    body = job.body
    _check(body, "stream", bool, "true or false")
    _check(body, "model", str, "the name of a model")
    if url == CHAT and not (isinstance(body.get("messages"), list) and body["messages"]):
        fault = "expected a list of at least one message"
        code = "invalid_type" if "messages" in body else "missing_required_parameter"
        raise ApiError(400, f"messages: {fault}", code=code, param="messages")
    options = body.get("stream_options")
    return Call(
        job,
        _class(headers.get(CLASS_HEADER), body.get("service_tier")),
        _key(headers.get(KEY_HEADER)),
        streams=body.get("stream") is True and url != EMBEDDINGS,
        wants_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )


def _check(body: Mapping[str, Any], field: str, kind: type, expected: str) -> None:
    value = body.get(field)
    if value is not None and not isinstance(value, kind):
        raise ApiError(400, f"{field}: expected {expected}, got {_shown(value)}", code="invalid_type", param=field)


def _class(header: str | None, tier: object) -> TrafficClass:
    if header is None:
        return TrafficClass.BATCH if tier == FLEX else TrafficClass.INTERACTIVE
    try:
        return TrafficClass(header.strip().lower())
    except ValueError:
        message = f"X-LLMQ-Class: expected interactive or batch, got {header[:60]!r}"
        raise ApiError(400, message, code="invalid_class") from None


def _key(header: str | None) -> str | None:
    if header is not None and not 1 <= len(header) <= _LONGEST_KEY:
        message = f"Idempotency-Key: expected 1 to {_LONGEST_KEY} characters, got {len(header)}"
        raise ApiError(400, message, code="invalid_idempotency_key")
    return header


def _shown(value: object) -> str:
    return {dict: "an object", list: "an array", str: "text", bool: "true or false"}.get(type(value), "a number")
