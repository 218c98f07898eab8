"""The body writer: pieces of an answer under way, written to their connection without a turn of the loop for each.

ASGI's `send` is a coroutine through every layer, which a token of a stream pays in full; here a piece is framed and
handed to the transport. It writes only where nothing has to be waited for: before the answer has begun, when the client
reads too slowly and once it has left, who asks goes through `send` as ever. The server puts it into a request's scope.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

#: Where it is in the scope of a request; another server than ours has none.
EXTENSION = "llmq.body_writer"


class BodyWriter:
    """Writes to the answer of one request; `written` are the bytes that did not pass through `send`."""

    __slots__ = ("_cycle", "written")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self.written = 0

    @property
    def clear(self) -> bool:
        """Whether a piece can be written now: an answer in pieces is under way, and its client keeps up."""
        cycle = self._cycle
        return not (
            cycle.response_complete
            or cycle.disconnected
            or cycle.flow.write_paused
            or not cycle.chunked_encoding
            or cycle.transport.is_closing()
        )

    def write(self, data: bytes) -> None:
        """Write a piece that is not empty; only while it is `clear`."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.written += len(data)


def writer_of(scope: MutableMapping[str, Any]) -> BodyWriter | None:
    """Return the writer of a request's answer, if its server has one."""
    writer: BodyWriter | None = scope.get("extensions", {}).get(EXTENSION)
    return writer
