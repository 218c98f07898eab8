"""A TCP proxy with a bad network in it: it delays, cuts and swallows what goes between a process and its server.

It runs in the event loop of the test; whoever connects through it is best another process, or at least in no hurry.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class TcpProxy:
    """Forwards to a port of this host. `delay` (seconds) and `hole` act on what comes from then on."""

    def __init__(self, server_port: int) -> None:
        self.delay = 0.0
        self.port = 0
        self._server_port = server_port
        self._open = asyncio.Event()
        self._open.set()
        self._replies = asyncio.Event()
        self._replies.set()
        self._ends: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        """The Redis URL that leads through it."""
        return f"redis://127.0.0.1:{self.port}/0"

    def swallow(self) -> None:
        """Be a black hole: connections stay open, and nothing arrives until `heal`."""
        self._open.clear()

    def deafen(self) -> None:
        """Be half open: what is asked arrives and is done, and no reply comes back until `heal`."""
        self._replies.clear()

    def heal(self) -> None:
        """Be a good network; what was swallowed arrives now, as after a retransmission."""
        self.delay = 0.0
        self._open.set()
        self._replies.set()

    def cut(self) -> None:
        """Reset all connections; new ones are taken."""
        for end in list(self._ends):
            end.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection."""
        self._ends.add(writer)
        with contextlib.suppress(OSError):
            await self._open.wait()
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
            self._ends.add(far_writer)
            there, back = self._carry(reader, far_writer), self._carry(far_reader, writer, replies=True)
            await asyncio.gather(there, back)
            self._ends.discard(far_writer)
        self._ends.discard(writer)
        writer.close()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, replies: bool = False
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._open.wait()
                if replies:
                    await self._replies.wait()
                await asyncio.sleep(self.delay)
                writer.write(data)
                await writer.drain()
        writer.close()


@contextlib.asynccontextmanager
async def tcp_proxy(server_port: int) -> AsyncIterator[TcpProxy]:
    """Start a proxy on a free port; all its connections end with the block."""
    proxy = TcpProxy(server_port)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        proxy.heal()
        proxy.cut()
        await server.wait_closed()
