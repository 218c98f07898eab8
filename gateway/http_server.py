"""The HTTP server: uvicorn on sockets that listen already, each connection under its guard (`connection_guard.py`).

It ends when it is told, never by a signal of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from llmq.gateway.connection_guard import HEAD_S, STALL_S, GuardedProtocol

#: Between two requests of a connection. Balancers keep theirs for 60 s and must not find them closed.
IDLE_S = 75.0

BACKLOG = 2048


class HttpServer:
    """Serves `app` on sockets that listen already.

    `on_refused` is told status and code of what is answered without the application.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_connections: int = 10_000,
        head_s: float = HEAD_S,
        stall_s: float = STALL_S,
        idle_s: float = IDLE_S,
        last_s: float | None = None,
        on_refused: Callable[[int, str], object] = lambda status, reason: None,
    ) -> None:
        limits: dict[str, Any] = {"max_connections": max_connections, "head_s": head_s, "stall_s": stall_s}
        limits["on_refused"] = staticmethod(on_refused)
        protocol = type("Protocol", (GuardedProtocol,), limits)
        self._server = _Server(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=round(idle_s),
                timeout_graceful_shutdown=None if last_s is None else max(1, round(last_s)),
            )
        )

    async def serve(self, sockets: list[socket.socket]) -> None:
        """Serve until `stop`, and until what is open then has ended."""
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await self._server.serve(sockets)

    async def started(self) -> None:
        """Wait until it serves."""
        await self._server.serving.wait()

    @property
    def requests(self) -> int:
        """How many requests were answered so far."""
        return self._server.server_state.total_requests

    def stop(self) -> None:
        """Listen no more, close idle connections, and let open requests end."""
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the command line has its own."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.serving = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.serving.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def listen(host: str, port: int) -> list[socket.socket]:
    """Return the sockets that listen on an address; raises OSError."""
    sockets: list[socket.socket] = []
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.bind(address)
            listening.listen(BACKLOG)
        except OSError:
            listening.close()
            for other in sockets:
                other.close()
            raise
        listening.setblocking(False)
        sockets.append(listening)
        if port == 0:
            break
    return sockets
