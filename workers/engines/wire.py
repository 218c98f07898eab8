"""The wire: one request to an engine and its answer, on a connection of its own, without a task woken for each piece.

What an engine streams is handed on in the turn of the loop that reads it. A client library wakes a task for each piece
of each stream, through several layers, which took twice the time of all that llmq does with a token. It knows HTTP/1.1
and TLS, and nothing of what is said: `http.py` does. There is one request a connection: an engine closes idle ones, and
a request that dies on one that was just closed looks like a crash of the engine.

Raises `EngineGone` and `EngineUnclear`. Only a connection that never came about proves that nothing is in flight: one
that was lost before an answer may have delivered the request, and counting it as in flight bounds how often a request
that kills engines is sent again. What ends a request is told to whoever sent it, and so does not say where the engine
is.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar, cast
from urllib.parse import quote, urlsplit

import httptools

from llmq.scheduler.errors import UsageError
from llmq.workers.engines.base import EngineGone, EngineUnclear

T = TypeVar("T")

#: A host that vanished without a word is noticed after 30 s: without this a dead stream is waited on for ever.
KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))

#: The head of an answer, in bytes; it holds for what stands between two pieces of its body, and behind it, too.
MAX_HEAD_BYTES = 64 * 1024

#: A large request is written in pieces: it does not hold up the other streams.
PIECE_BYTES = 256 * 1024

_IN_A_PATH = "/:@!$&'()*+,;=-._~%"


@dataclass(frozen=True, slots=True)
class Head:
    """The head of an answer; names of headers are in lower case."""

    status: int
    headers: dict[str, str]

    @property
    def content_type(self) -> str:
        """The media type, without its parameters."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()


class Address:
    """Where the engine at a URL is reached; `connect_timeout` and `idle_timeout` (None: no limit) are in seconds.

    Raises UsageError for a host that can be none.
    """

    def __init__(self, url: str, connect_timeout: float, idle_timeout: float | None) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._url = url
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._connect_timeout = connect_timeout
        self._idle_timeout = idle_timeout
        try:
            name = f"[{self._host}]" if ":" in self._host else self._host.encode("idna").decode()
        except UnicodeError:
            raise UsageError(f"expected the URL of an engine, got one whose host can be no name: {url!r}") from None
        self._name = name if parts.port is None else f"{name}:{parts.port}"
        self._prefix = quote(parts.path, safe=_IN_A_PATH)

    async def open(self) -> Wire:
        """Connect. Raises EngineGone with nothing in flight."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, wire = await loop.create_connection(
                    lambda: Wire(loop, self._idle_timeout), self._host, self._port, ssl=self._tls
                )
        except TimeoutError:
            reason = f"it took longer than {self._connect_timeout:g} s"
            raise EngineGone(f"no connection to the engine at {self._url}: {reason}", in_flight=False) from None
        except OSError as error:  # TLS that failed is one, too
            reason = str(error) or type(error).__name__
            raise EngineGone(f"no connection to the engine at {self._url}: {reason}", in_flight=False) from error
        return wire

    def post(self, path: str, headers: dict[str, str], length: int) -> bytes:
        """Return the head of a request."""
        given = {"Host": self._name, "User-Agent": "llmq", "Accept": "*/*", "Accept-Encoding": "identity"}
        given |= {"Connection": "close", "Content-Length": str(length), **headers}
        lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
        return f"POST {self._prefix}{quote(path, safe=_IN_A_PATH)} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")


class Wire(asyncio.Protocol):
    """One connection: `send`, then `head`, then `body` or `read`, then `close`, which aborts whatever is under way."""

    def __init__(self, loop: asyncio.AbstractEventLoop, idle_timeout: float | None) -> None:
        self._loop = loop
        self._idle_timeout = idle_timeout
        self._parser = httptools.HttpResponseParser(self)
        # Two lengths (a proxy that copies its upstream's headers) harm nobody where nothing follows an answer.
        self._parser.set_dangerous_leniencies(lenient_chunked_length=True, lenient_optional_cr_before_lf=True)
        self._head: asyncio.Future[Head] = loop.create_future()
        self._headers: dict[str, str] = {}
        self._bodiless_bytes = 0
        self._ends_by_closing = False
        self._early: list[bytes] = []
        self._feed: Callable[[bytes], object] = self._early.append
        self._ended: BaseException | bool = False
        self._on_end: Callable[[], None] = lambda: None
        self._clear: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard_at = loop.time()

    async def send(self, head: bytes, body: bytes) -> None:
        """Write a request; an answer that comes before all of it is out ends the writing."""
        if len(body) <= PIECE_BYTES:
            self._transport.write(head + body)
            return
        self._transport.write(head)
        view = memoryview(body)
        for start in range(0, len(body), PIECE_BYTES):
            if self._head.done() or self._ended:
                return
            self._transport.write(view[start : start + PIECE_BYTES])
            if self._clear is not None:
                await self._clear

    async def head(self) -> Head:
        """Wait for the head of the answer."""
        return await self._head

    async def body(self, feed: Callable[[bytes], T | None], end: Callable[[], T]) -> T:
        """Hand each piece of the body to `feed` as it comes; return what it returns in the end, or `end` does."""
        done: asyncio.Future[T] = self._loop.create_future()

        def take(data: bytes) -> None:
            if not done.done():
                try:
                    if (result := feed(data)) is not None:
                        done.set_result(result)
                except Exception as error:
                    done.set_exception(error)

        def close() -> None:
            if done.done():
                return
            if isinstance(self._ended, BaseException):
                done.set_exception(self._ended)
                return
            try:
                done.set_result(end())
            except Exception as error:
                done.set_exception(error)

        early, self._feed, self._on_end = self._early, take, close
        for data in early:
            take(data)
        if self._ended:
            close()
        return await done

    async def read(self, limit: int) -> bytes:
        """Return the body, or as much of it as may be."""
        pieces: list[bytes] = []
        left = limit

        def take(data: bytes) -> bytes | None:
            nonlocal left
            pieces.append(data[:left])
            left -= len(data)
            return b"".join(pieces) if left <= 0 else None

        return await self.body(take, lambda: b"".join(pieces))

    def close(self) -> None:
        """Close the connection now: what the engine still has to say is of no use, and it must notice at once."""
        self._end(True)
        self._transport.abort()

    # --- what the loop calls ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The connection is there."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        watched = transport.get_extra_info("socket")
        if watched is not None:
            watched.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE:
                if hasattr(socket, name):
                    watched.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        if self._idle_timeout is not None:
            self._timer = self._loop.call_later(self._idle_timeout, self._look)

    def data_received(self, data: bytes) -> None:
        """Bytes have come."""
        if self._ended:
            return
        self._heard_at = self._loop.time()
        self._bodiless_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._end(EngineUnclear(f"what the engine sent is no HTTP answer: {error or type(error).__name__}"))
            return
        if self._bodiless_bytes > MAX_HEAD_BYTES:
            what = "what stands around the body" if self._head.done() else "the head"
            self._end(EngineUnclear(f"{what} of the engine's answer is larger than {MAX_HEAD_BYTES:,} bytes"))

    def eof_received(self) -> None:
        """The engine has said all: right for an answer that ends so, a loss in the middle of any other."""
        self.connection_lost(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self.resume_writing()
        if self._ends_by_closing and exc is None:
            self._end(True)
            return
        reason = str(exc or "") or ("Connection reset" if exc else "it closed the connection in mid-answer")
        self._end(EngineGone(f"the engine was lost with the request in flight: {reason}", in_flight=True))

    def pause_writing(self) -> None:
        """The engine does not read as fast as it is written to."""
        self._clear = self._clear or self._loop.create_future()

    def resume_writing(self) -> None:
        """It has caught up."""
        if self._clear is not None and not self._clear.done():
            self._clear.set_result(None)
        self._clear = None

    # --- what the parser calls ----------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header has come."""
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        """The head has come; one that only says that another will (100, 103) is passed over."""
        status, headers = self._parser.get_status_code(), self._headers
        self._headers = {}
        if status < 200 or self._head.done():
            return
        encoding = headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            self._end(EngineUnclear(f"the engine's answer is encoded ({encoding}), which it was asked not to do"))
            return
        chunked = "chunked" in headers.get("transfer-encoding", "").lower()
        self._ends_by_closing = not chunked and "content-length" not in headers
        self._bodiless_bytes = 0
        self._head.set_result(Head(status, headers))
        self.resume_writing()

    def on_body(self, data: bytes) -> None:
        """A piece of the body has come; what follows the end of an answer is none, whatever it looks like."""
        if not self._ended:
            self._bodiless_bytes = 0
            self._feed(data)

    def on_message_complete(self) -> None:
        """The answer is whole: one that ends with its connection is only where it can have no body (204, 304)."""
        if self._head.done():
            self._end(True)

    # ------------------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        assert self._idle_timeout is not None
        left = self._heard_at + self._idle_timeout - self._loop.time()
        if left <= 0:
            message = f"the engine fell silent in mid-answer: nothing came for {self._idle_timeout:g} s"
            self._end(EngineUnclear(message))
        else:
            self._timer = self._loop.call_later(left, self._look)

    def _end(self, how: BaseException | bool) -> None:
        """End: with the whole answer, or with what went wrong. The first end counts."""
        if self._ended:
            return
        self._ended = how
        if self._timer is not None:
            self._timer.cancel()
        if not self._head.done():
            if isinstance(how, BaseException):
                self._head.set_exception(how)
                self._head.exception()  # who waits is told; where nobody does any more, nothing is amiss
            else:
                self._head.cancel()
        self._on_end()


def is_sayable(value: str) -> bool:
    """Whether a text can be the value of a header."""
    return value.isprintable() and value.isascii()
