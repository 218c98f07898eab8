"""One connection of the gateway: uvicorn's, with the limits that a server at the edge needs and uvicorn lacks.

It has so long to send the head of its request, from its first byte or from its beginning, and so long to read its
answer; so many requests may wait behind the one that is answered; above a number of connections it is answered 503 at
once; a peer that vanished is noticed by the kernel. How slowly a body may come is the boundary's affair
(`body_guard.py`), because only it knows the body.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from llmq.gateway.body_writer import EXTENSION, BodyWriter
from llmq.gateway.errors import ApiError

#: For the head of a request, and for a connection that sends nothing at all.
HEAD_S = 10.0

#: The head of a request in bytes; headers are kept in memory until it is whole. It holds for what stands between two
#: pieces of a chunked body, and behind it, too.
MAX_HEAD_BYTES = 64 * 1024

#: A client that reads so little of its answer that no more can be written for so long is gone, for all that matters.
STALL_S = 60.0

#: An answer that was given before its request had come whole: so long the rest is read and thrown away. Whoever closes
#: a connection on which data is still coming may take the answer with it.
LINGER_S = 5.0

#: Requests of a connection that wait behind the one that is answered: some 3 KiB each, where a packet holds thousands.
MOST_PIPELINED = 100

#: A peer that vanished without a word is noticed after 30 s.
_KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))

#: Headers of a request that offer another protocol.
_OF_UPGRADE = frozenset({b"upgrade", b"connection", b"http2-settings"})


class GuardedProtocol(HttpToolsProtocol):
    """One connection; its limits are set by `HttpServer` on a class of its own."""

    max_connections = 10_000
    head_s = HEAD_S
    stall_s = STALL_S
    on_refused: Callable[[int, str], object] = staticmethod(lambda status, reason: None)
    _head_timer: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _begun = False
    _lingering: asyncio.TimerHandle | None = None
    _stalled: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or refuse it where there are too many."""
        super().connection_made(transport)
        self._open: deque[RequestResponseCycle] = deque()
        _watch_peer(transport)
        if len(self.connections) > self.max_connections:
            self._refuse(ApiError(503, "too many connections; try again in a moment", code="overloaded", retry_after=1))
            return
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._end_head()
        for timer in (self._lingering, self._stalled):
            if timer is not None:
                timer.cancel()
        for cycle in self._open:  # uvicorn tells the last one only, behind which others may wait
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request."""
        if self._lingering is not None:
            return
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES + len(data):
            self._refuse(ApiError(431, f"expected a head of at most {MAX_HEAD_BYTES:,} bytes", code="head_too_large"))
            return
        self._parse(data)

    def on_message_begin(self) -> None:
        """A head begins: the parser passes over the empty line that old clients send behind a body."""
        super().on_message_begin()
        self._begun = True
        self._unset_keepalive_if_required()
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        """The head has come; where it asks for another protocol, it will come again without that (`_parse`)."""
        if not self.parser.should_upgrade():
            self._end_head()
            super().on_headers_complete()
            if self.cycle is not None and self.cycle.scope is self.scope:
                extensions: dict[str, Any] = self.scope.setdefault("extensions", {})
                extensions[EXTENSION] = BodyWriter(self.cycle)
                self._open.append(self.cycle)
            if len(self.pipeline) > MOST_PIPELINED:
                raise ValueError("too many requests that wait")  # the parser stops, and the connection is closed
            if len(self.pipeline) == 1:  # uvicorn reads no more then, and would not see the client leave
                self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        """A piece of the body has come."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request has come whole: what follows is the head of the next one."""
        if not self.parser.should_upgrade():
            super().on_message_complete()
            self._begun, self._head_bytes = False, 0

    def on_response_complete(self) -> None:
        """The answer is out; where its request had not come whole, nothing that follows can be read as another one."""
        super().on_response_complete()
        while self._open and self._open[0].response_complete:
            self._open.popleft()
        if self.cycle.response_complete and self.cycle.more_body:
            self._linger()

    def pause_writing(self) -> None:
        """The client does not read as fast as its answer comes: it has so long to catch up."""
        self._stalled = self.loop.call_later(self.stall_s, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        """It has caught up."""
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, in the shape of all other errors."""
        self._refuse(ApiError(400, "expected an HTTP request, got what cannot be read as one", code="bad_request"))

    @property
    def _answering(self) -> bool:
        """Whether an answer is under way."""
        return self.cycle is not None and not self.cycle.response_complete

    def _parse(self, data: bytes) -> None:
        """Parse; a request that offers another protocol (Java's client does: `Upgrade: h2c`) is served in this one."""
        if self._begun:
            self._unset_keepalive_if_required()
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                head, rest = self._without_offer(), data[upgrade.args[0] :]
            except httptools.HttpParserError:
                head, rest = b"", b""
            if not head:
                self.send_400_response("")
                return
            # The parser takes what follows an offer for the other protocol: another one begins anew.
            self.parser = httptools.HttpRequestParser(self)
            data = head + rest

    def _without_offer(self) -> bytes:
        """Return the head that has come, without its offer; nothing for a tunnel, which is all that it asks for."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            return b""
        line = b"%s %s HTTP/%s\r\n" % (method, self.url, self.parser.get_http_version().encode())
        return line + b"".join(b"%s: %s\r\n" % pair for pair in self.headers if pair[0] not in _OF_UPGRADE) + b"\r\n"

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(self.head_s, self._head_is_late)

    def _end_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self._answering:  # the head is that of the next request, which has its time from the end of this one on
            self._head_timer = self.loop.call_later(self.head_s, self._head_is_late)
            return
        self._head_timer = None
        if not self._begun:  # it asked for nothing: nobody waits for an answer
            self.transport.close()
        else:
            message = f"the head of the request did not come within {self.head_s:g} s"
            self._refuse(ApiError(408, message, code="head_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Answer without the application, and close."""
        self._end_head()
        if self._answering:
            self.transport.close()  # an answer is under way: nothing may be written into it
            return
        self.on_refused(error.status, error.code or "")
        body = error.body()
        headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        lines = "".join(f"{name}: {value}\r\n" for name, value in (headers | error.headers).items())
        self.transport.write(f"HTTP/1.1 {error.status} \r\n{lines}\r\n".encode() + body)
        self._linger()

    def _linger(self) -> None:
        if self._lingering is None and not self.transport.is_closing():
            self._lingering = self.loop.call_later(LINGER_S, self.transport.abort)
            if self.transport.can_write_eof():
                self.transport.write_eof()


def _watch_peer(transport: asyncio.Transport) -> None:
    peer = transport.get_extra_info("socket")
    if peer is None or peer.family not in (socket.AF_INET, socket.AF_INET6):
        return
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if hasattr(socket, name):
            peer.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
