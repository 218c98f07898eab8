"""The application: all routes of the gateway behind its boundary, as one ASGI application.

Others add their routes and background parts to it (`Extras`): files and batches, metrics. It starts nothing and opens
no connection; `gateway.py` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import BaseRoute, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from llmq.gateway.admission import Admission
from llmq.gateway.body_guard import Pace
from llmq.gateway.boundary import Boundary
from llmq.gateway.call import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES
from llmq.gateway.host_guard import HostGuard
from llmq.gateway.inference import Inference, Service

#: What scripts of a web page may read beside the body, and send.
_EXPOSED = ("x-request-id", "x-llmq-job-id", "x-llmq-direct", "retry-after")


@dataclass(frozen=True, slots=True)
class WebLimits:
    """What the boundary goes by: the largest body, larger ones of some routes, how slowly they come, CORS, and the
    guard against web pages of strangers (None: there is none)."""

    max_body_bytes: int
    larger_bodies: Mapping[str, int] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    cors_origins: Sequence[str] = ()
    guard: HostGuard | None = None


def build_app(service: Service, routes: Sequence[BaseRoute], admission: Admission, limits: WebLimits) -> ASGIApp:
    """Return the application: the inference routes, and `routes` after them."""
    inference = [
        Route(url, Inference(url, service), methods=["POST"]) for url in (CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES)
    ]
    router = Router([*inference, *routes], redirect_slashes=False, default=_not_found)
    boundary: ASGIApp = Boundary(
        _WithApp(router),
        admission,
        limit=limits.max_body_bytes,
        limits=limits.larger_bodies,
        pace=limits.pace,
        guard=limits.guard,
    )
    if not limits.cors_origins:
        return boundary
    return CORSMiddleware(
        boundary,
        allow_origins=list(limits.cors_origins),
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=list(_EXPOSED),
    )


class _WithApp:
    """Routes that raise HTTPException, as they do where there is an application, instead of answering in plain text."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._app = Starlette()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self._app
        await self._router(scope, receive, send)


async def _not_found(scope: Scope, receive: Receive, send: Send) -> None:
    raise HTTPException(404)
