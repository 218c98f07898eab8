"""The job: one inference request, and how it is stored in Redis.

A job is immutable. What changes about it (waiting, running, attempts) is never stored in it: see `state.py`. The
encoded form is a msgpack map with short keys, written once at submit and read by the worker that claims the job.
This module knows nothing of Redis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgpack
import orjson

from llmq.scheduler.errors import EncodingError
from llmq.scheduler.raw_json import read_object

Body = dict[str, Any]

#: Endpoints that a job may name, each with the field that its body cannot do without.
ENDPOINTS: Mapping[str, str] = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/embeddings": "input",
    "/v1/responses": "input",
    "/v1/messages": "messages",
}

#: A body nested deeper than this is refused: no engine takes it, and recursion must end somewhere.
MAX_DEPTH = 64

#: LLM tokens assumed for an answer whose body names no limit.
DEFAULT_ANSWER_TOKENS = 256

#: No estimate is above this: whoever asks for a billion tokens is refused by the engine at once, and the bucket would
#: keep all other batch waiting for days until they were paid.
MOST_TOKENS = 1_000_000

#: A picture or a sound in a body (`data:image/png;base64,...`) counts as this, whatever its bytes: engines cut it up.
MEDIA_TOKENS = 1000

#: English text has about four characters to an LLM token (OpenAI's rule of thumb); good enough for a bucket.
CHARACTERS_PER_TOKEN = 4


class TrafficClass(StrEnum):
    """Whether people wait for the answer (`interactive`) or a program does (`batch`)."""

    INTERACTIVE = "interactive"
    BATCH = "batch"

    @property
    def letter(self) -> str:
        """The letter that stands for the class in key names: `i` or `b`."""
        return self.value[0]


@dataclass(frozen=True, slots=True)
class Job:
    """One inference request.

    `url` is one of `ENDPOINTS`, `body` the JSON object for it. `raw` is that object as its client wrote it, b"" where
    it was given as an object: what there is of it is stored and sent on byte for byte, and `body` is for looking at.
    """

    url: str
    body: Body
    raw: bytes = b""

    @classmethod
    def of_json(cls, url: str, raw: bytes) -> Job:
        """Return the job for a body as it came. Raises EncodingError for what is no object, or too deep."""
        try:
            body = read_object(raw)
        except ValueError as error:
            raise EncodingError("body", str(error)) from None
        # Brackets are counted first: few bodies have so many of them that they could be too deep.
        if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:
            _check_depth(body)
        return cls(url, body, raw)

    def encode(self, *, proven: bool = False) -> bytes:
        """Return the stored form. Raises EncodingError, with the path of the field, for what would not survive.

        `proven` says that the body was checked before (`line_form.py`): to look again would take four times as long as
        to encode it.
        """
        if self.raw:
            return _pack({"u": self.url, "j": self.raw})
        if not proven:
            check_storable(self.body, "body")
        try:
            return _pack({"u": self.url, "b": self.body})
        except (ValueError, TypeError, OverflowError):  # a model that took the place of the body's own: say so
            check_storable(self.body, "body")
            raise

    @classmethod
    def decode(cls, data: bytes) -> Job:
        """Read the stored form; raises EncodingError for anything that `encode` cannot have written."""
        try:
            record = msgpack.unpackb(data, strict_map_key=True)
        except (ValueError, TypeError, OverflowError, msgpack.UnpackException, RecursionError) as error:
            raise EncodingError("job", f"is not a stored job ({type(error).__name__})") from None
        if not isinstance(record, dict):
            raise EncodingError("job", "is not a stored job (no map)")
        url, body, raw = record.get("u"), record.get("b"), record.get("j")
        if isinstance(raw, bytes) and isinstance(url, str) and url in ENDPOINTS:
            return cls.of_json(url, raw)
        if not isinstance(url, str) or url not in ENDPOINTS or not isinstance(body, dict):
            raise EncodingError("job", "is not a stored job (fields missing or of the wrong type)")
        try:
            orjson.dumps(body)
        except TypeError as error:  # bytes, extension types, depth: msgpack has what JSON has not
            raise EncodingError("job", f"is not a stored job (its body is no JSON: {error})") from None
        return cls(url, body)

    def cost(self) -> int:
        """Estimate the LLM tokens of this job: its text at four characters a token, and its answer's limit."""
        tokens = _characters(self.body) // CHARACTERS_PER_TOKEN + _answer_tokens(self.url, self.body)
        return max(1, min(tokens, MOST_TOKENS))


def check_storable(value: object, path: str, depth: int = 0) -> None:
    """Raise EncodingError where `value` would not come back equal: NaN, integers over 64 bits, odd types, depth."""
    if depth > MAX_DEPTH:
        raise EncodingError(path, f"is nested deeper than {MAX_DEPTH} levels")
    match value:
        case None | bool():
            return
        case str():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise EncodingError(path, "holds text that is not valid Unicode (a lone surrogate)") from None
        case int():
            if not -(2**63) <= value < 2**64:
                raise EncodingError(path, "is an integer of more than 64 bits; send it as text")
        case float():
            if not math.isfinite(value):
                raise EncodingError(path, f"is {value}, which JSON does not have")
        case dict():
            for key, item in value.items():
                if not isinstance(key, str):
                    raise EncodingError(path, f"has a key that is not text: {key!r}")
                check_storable(key, f"{path}.{key!a}", depth + 1)
                check_storable(item, f"{path}.{key}", depth + 1)
        case list() | tuple():
            for index, item in enumerate(value):
                check_storable(item, f"{path}[{index}]", depth + 1)
        case bytes() | bytearray():
            raise EncodingError(path, "is bytes; JSON has only text (send base64)")
        case _:
            raise EncodingError(path, f"is a {type(value).__name__}, which JSON does not have")


def _check_depth(body: Body) -> None:
    left: list[tuple[Any, int]] = [(body, 0)]
    while left:
        value, depth = left.pop()
        if depth > MAX_DEPTH:
            raise EncodingError("body", f"is nested deeper than {MAX_DEPTH} levels")
        items = value.values() if isinstance(value, dict) else value
        left += [(item, depth + 1) for item in items if isinstance(item, dict | list)]


def _pack(record: dict[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(record)
    return packed


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value) if not value.startswith("data:") else MEDIA_TOKENS * CHARACTERS_PER_TOKEN
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return 0
    return sum(_characters(item) for item in value)


def _answer_tokens(url: str, body: Body) -> int:
    if url == "/v1/embeddings":
        return 0
    limit = DEFAULT_ANSWER_TOKENS
    for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
        if isinstance(given := body.get(name), int) and given >= 0:
            limit = given
            break
    copies = body.get("n", 1)
    return limit * (copies if isinstance(copies, int) and copies > 0 else 1)
