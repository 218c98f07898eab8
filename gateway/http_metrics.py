"""The metrics of one gateway's HTTP: requests by route and status, how long they took, what is in flight.

An ASGI application around all others. It adds a few counts to a request and looks into nothing; the labels are the
routes of the program, classes of status and codes of errors, never what a client has sent.
"""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llmq.gateway.body_writer import writer_of
from llmq.scheduler.metric_families import GATEWAY

#: A stream may take minutes.
_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

#: What a request to no route counts as, and a refusal without a code.
OTHER = "other"

#: Codes of errors are words of this program and its workers; should there ever be more, they are `other`.
MOST_REASONS = 64

#: Where the boundary notes the code of an error that it answers with, in a request's state.
REFUSED = "refused"


class HttpMetrics:
    """Counts the requests to `app`; `registry` holds what it counts, and the process' own metrics."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        labels = ("route", "method", "status")
        self._requests = Counter(
            f"{GATEWAY}http_requests", "Requests that were answered, or cut off (aborted).", labels, registry=registry
        )
        self._seconds = Histogram(
            f"{GATEWAY}http_request_seconds", "From a request's head to the end of its answer.", ("route",),
            buckets=_BOUNDS, registry=registry,
        )  # fmt: skip
        self._refusals = Counter(
            f"{GATEWAY}refusals",
            "Requests that the gateway itself answered with an error, by the error's code; not what engines refuse.",
            ("status", "reason"), registry=registry,
        )  # fmt: skip
        self._reasons: set[str] = set()
        self._sent = Counter(f"{GATEWAY}http_sent_bytes", "Bytes of answers, without heads.", registry=registry)
        self._received = Counter(f"{GATEWAY}http_received_bytes", "Bytes of bodies of requests.", registry=registry)
        self._open = Gauge(f"{GATEWAY}http_in_flight", "Requests that are open.", registry=registry)
        ProcessCollector(registry=registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; anything else (the lifespan) passes."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, answered, began = "aborted", 0, time.monotonic()
        sent = received = 0

        async def counted_send(message: Message) -> None:
            nonlocal status, answered, sent
            if message["type"] == "http.response.start":
                answered = message["status"]
                status = f"{answered // 100}xx"
            else:
                sent += len(message.get("body", b""))
            await send(message)

        async def counted_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        self._open.inc()
        try:
            await self._app(scope, counted_receive, counted_send)
        finally:
            self._open.dec()
            route, method = route_of(scope), scope["method"] if "endpoint" in scope else OTHER
            self._requests.labels(route, method, status).inc()
            if (reason := scope.get("state", {}).get(REFUSED)) is not None:
                self.refused(answered, reason)
            self._seconds.labels(route).observe(time.monotonic() - began)
            writer = writer_of(scope)
            self._sent.inc(sent + (writer.written if writer is not None else 0))
            self._received.inc(received)

    def refused(self, status: int, reason: str) -> None:
        """Count a request that was answered with an error; `reason` is its code, "" for none."""
        if reason not in self._reasons:
            if not reason or len(self._reasons) >= MOST_REASONS:
                reason = OTHER
            self._reasons.add(reason)
        self._refusals.labels(str(status), reason).inc()


def route_of(scope: MutableMapping[str, Any]) -> str:
    """Return the route that a request went to, with the names of its parameters in place of their values."""
    if "endpoint" not in scope:  # the router has found none
        return OTHER
    named = {str(value): f"{{{name}}}" for name, value in scope.get("path_params", {}).items()}
    return "/".join(named.get(part, part) for part in scope["path"].split("/"))
