"""The boundary: what every request passes on its way in, and every answer on its way out.

On the way in a request gets its id, its body is guarded (`body_guard.py`), and its caller is identified
(`scope["state"]["caller"]`). On the way out the headers of the exchange are added, and whatever was raised becomes an
error in OpenAI's shape: this is the one place that makes them, and no stack trace passes it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from llmq.gateway.admission import Admission
from llmq.gateway.body_guard import BodyGuard, Message, Pace, Receive
from llmq.gateway.body_writer import BodyWriter, writer_of
from llmq.gateway.errors import ApiError
from llmq.gateway.host_guard import HostGuard
from llmq.gateway.http_metrics import REFUSED
from llmq.gateway.translation import api_error

Send = Callable[[Message], Awaitable[None]]
Scope = MutableMapping[str, Any]

#: An id that a client gives its request: it is repeated in headers and logs, so it holds nothing that could harm them.
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")

_log = logging.getLogger("llmq.gateway")


class Boundary:
    """The outermost ASGI application, around the routes.

    `limits` are the largest bodies of routes (by the beginning of their path) for which `limit` does not hold.
    """

    def __init__(
        self,
        app: ASGIApp,
        admission: Admission,
        *,
        limit: int,
        limits: Mapping[str, int] | None = None,
        pace: Pace | None = None,
        guard: HostGuard | None = None,
    ) -> None:
        self._app = app
        self._admission = admission
        self._limit = limit
        self._limits = dict(limits or {})
        self._pace = pace or Pace()
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; anything else (the lifespan) passes."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name: value for name, value in scope["headers"] if name in _READ_HEADERS}
        exchange = Exchange(send, _request_id(headers.get(b"x-request-id", b"")), writer_of(scope))
        state = scope.setdefault("state", {})
        state["exchange"] = exchange
        try:
            if self._guard is not None:
                self._guard.check(headers)
            _check_encoding(headers.get(b"content-encoding", b""))
            guard = BodyGuard(receive, _length(headers), self._limit_of(scope["path"]), self._pace)
            if scope["path"].startswith("/v1"):
                authorization = headers.get(b"authorization")
                state["caller"] = await self._admission.identify(
                    None if authorization is None else authorization.decode("latin-1")
                )
            await self._app(scope, guard, exchange.send)
        except (ClientDisconnect, asyncio.CancelledError):
            raise
        except Exception as error:
            await self._fail(exchange, scope, error)

    async def _fail(self, exchange: Exchange, scope: Scope, error: Exception) -> None:
        answer = api_error(error)
        if answer.status >= 500:
            about = f"{scope['method']} {scope['path']!r} ({exchange.request_id})"
            unforeseen = answer.code == "internal_error"
            _log.log(logging.ERROR if unforeseen else logging.INFO, "%s: %s", about, error, exc_info=unforeseen)
        if exchange.begun:
            raise error  # the server closes the connection: a half answer must not look like a whole one
        scope["state"][REFUSED] = answer.code or ""
        await exchange.answer(answer.status, answer.body(), answer.headers)

    def _limit_of(self, path: str) -> int:
        return next((limit for begin, limit in self._limits.items() if path.startswith(begin)), self._limit)


class Exchange:
    """One request and its answer; `headers` may be added to until the answer begins."""

    __slots__ = ("_send", "_writer", "begun", "headers", "request_id")

    def __init__(self, send: Send, request_id: str, writer: BodyWriter | None = None) -> None:
        self._send = send
        self._writer = writer
        self.request_id = request_id
        self.headers: dict[str, str] = {"x-request-id": request_id}
        self.begun = False

    async def send(self, message: Message) -> None:
        """Send a message of the answer; its first one takes the exchange's headers along."""
        if not self.begun and message["type"] == "http.response.start":
            self.begun = True
            given = message.get("headers", [])
            named = {name.lower() for name, _ in given}
            added = ((name.encode("latin-1"), value.encode("latin-1")) for name, value in self.headers.items())
            message["headers"] = [*given, *(pair for pair in added if pair[0] not in named)]
        await self._send(message)

    async def begin(self, status: int, headers: Mapping[str, str]) -> None:
        """Begin an answer whose body follows in pieces."""
        pairs = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self.send({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, data: bytes, *, more: bool = True) -> None:
        """Send a piece of the body; waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    def writer(self) -> BodyWriter | None:
        """Return what writes a piece of the body now, with no turn of the loop; None where that cannot be.

        Only while nobody is within `write`: what that has to say comes first.
        """
        return self._writer if self.begun and self._writer is not None and self._writer.clear else None

    async def answer(
        self, status: int, body: bytes, headers: Mapping[str, str], content_type: str = "application/json"
    ) -> None:
        """Send a whole answer."""
        length = {"content-type": content_type, "content-length": str(len(body))}
        await self.begin(status, {**length, **headers})
        await self.write(body, more=False)


_READ_HEADERS = frozenset(
    {
        b"authorization",
        b"content-encoding",
        b"content-length",
        b"host",
        b"origin",
        b"transfer-encoding",
        b"x-request-id",
    }
)


def _request_id(given: bytes) -> str:
    return given.decode() if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"


def _check_encoding(encoding: bytes) -> None:
    if encoding.strip().lower() not in (b"", b"identity"):
        raise ApiError(
            415,
            f"expected a body without Content-Encoding, got {encoding.decode('latin-1')!r}; send it as it is",
            code="unsupported_encoding",
        )


def _length(headers: Mapping[bytes, bytes]) -> int | None:
    """Return how long the body says it is; None where it is chunked (the server has checked the number)."""
    if b"transfer-encoding" in headers:
        return None
    return int(headers.get(b"content-length", b"0"))
