"""The events of a streamed answer, as bytes: the engine's own chunks, and the few that the gateway adds.

Chunks pass as they came. Only where a client has not asked for usage, which llmq always asks the engine for, its chunk
is taken out again; no other chunk is read. Decides and formats; sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from llmq.gateway.call import RESPONSES
from llmq.gateway.errors import ApiError
from llmq.scheduler.deltas import DeltaView, read_chunk

#: A comment: clients pass over it, and proxies see that the connection lives.
KEEP_ALIVE = b": waiting\n\n"

#: As a number: to look for one in bytes takes a tenth of the time that looking for bytes does.
_LF = b"\n"[0]

_DONE = b"data: [DONE]\n\n"


class Events:
    """The events of one stream."""

    def __init__(self, url: str, *, wants_usage: bool) -> None:
        self._named = url == RESPONSES
        self._drops_usage = not wants_usage and not self._named

    def of(self, chunks: Sequence[bytes]) -> bytes:
        """Return the events for an engine's chunks, each its own event."""
        if self._named:
            return b"".join(map(_named, chunks))
        drops = self._drops_usage
        events = [
            b"data: %b\n\n" % (_one_line(chunk) if _LF in chunk else chunk)
            for chunk in chunks
            if not (drops and b'"usage"' in chunk and _only_tells_usage(chunk))
        ]
        return events[0] if len(events) == 1 else b"".join(events)

    def of_rest(self, view: DeltaView) -> bytes:
        """Return the events for the rest of an answer of which chunks did not come (`DeltaOrder.rest`)."""
        chunk = view.chunk
        if self._named:
            kind = "response.incomplete" if chunk.get("status") == "incomplete" else "response.completed"
            return b"event: %s\ndata: %s\n\n" % (kind.encode(), orjson.dumps({"type": kind, "response": chunk}))
        if self._drops_usage:
            chunk.pop("usage", None)
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def end(self) -> bytes:
        """Return what ends a whole answer."""
        return b"" if self._named else _DONE

    def error(self, failure: ApiError) -> bytes:
        """Return the event that ends a stream without an end of its answer."""
        return self.error_event(failure.body())

    def error_event(self, body: bytes) -> bytes:
        """Return the same for an error that is JSON already (`{"error": {...}}`)."""
        if not self._named:
            return b"data: " + _one_line(body) + b"\n\n"
        error = orjson.loads(body)["error"]
        told = {"type": "error", "code": error.get("code"), "message": error.get("message"), "param": None}
        return b"event: error\ndata: " + orjson.dumps({**told, "error": error}) + b"\n\n"


def _only_tells_usage(chunk: bytes) -> bool:
    try:
        read = read_chunk(chunk)
    except ValueError:
        return False
    return isinstance(read, dict) and bool(read.get("usage")) and read.get("choices") == []


def _named(chunk: bytes) -> bytes:
    """Return an event of /v1/responses, whose name is its type."""
    try:
        kind = read_chunk(chunk).get("type")
    except (ValueError, AttributeError):
        kind = None
    name = b"event: " + kind.encode() + b"\n" if isinstance(kind, str) else b""
    return name + b"data: " + _one_line(chunk) + b"\n\n"


def _one_line(chunk: bytes) -> bytes:
    """Return a chunk as the value of `data:`; one that its engine wrote on several lines has several of them."""
    return chunk.replace(b"\n", b"\ndata: ")
