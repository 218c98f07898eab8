"""A TCP proxy in front of a Redis server that can swallow the reply to a command, and cut the connection as well.

What a lossy network does to one command: the server has run it, and the client never hears of it. It understands
nothing of what it passes on; a command is known by a word in it.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from types import TracebackType
from urllib.parse import urlsplit


class ReplyEater:
    """The proxy; `url` is where clients find it, `swallowed` how many replies it has swallowed; `ate` is set then."""

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 6379)
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._clients: set[asyncio.StreamWriter] = set()
        self._word: bytes | None = None
        self._cut = False
        self.swallowed = 0
        self.ate = asyncio.Event()

    @property
    def url(self) -> str:
        """The URL that clients connect to."""
        assert self._server is not None
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    async def __aenter__(self) -> ReplyEater:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # what was closed is gone with the next turn of the loop

    def swallow_reply_to(self, word: str, *, cut: bool = False) -> None:
        """Let the reply to the next command with this word in it disappear; `cut` closes its connection too."""
        self._word, self._cut = word.encode(), cut

    def reset(self) -> None:
        """Reset all connections, as a host does that knows nothing of them any more."""
        for writer in self._clients:
            at_once = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._clients.add(writer)
        upstream_reader, upstream_writer = await asyncio.open_connection(*self._upstream)
        hungry = asyncio.Event()
        pumps = [
            asyncio.create_task(self._requests(reader, upstream_writer, hungry)),
            asyncio.create_task(self._replies(upstream_reader, writer, hungry)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            for end in (writer, upstream_writer):
                end.close()
            self._tasks.discard(task)
            self._clients.discard(writer)

    async def _requests(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, hungry: asyncio.Event) -> None:
        while data := await source.read(65536):
            if self._word is not None and self._word in data:
                self._word = None
                hungry.set()
            sink.write(data)
            await sink.drain()

    async def _replies(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, hungry: asyncio.Event) -> None:
        while data := await source.read(65536):
            if hungry.is_set():
                hungry.clear()
                self.swallowed += 1
                self.ate.set()
                if self._cut:
                    return
                continue
            sink.write(data)
            await sink.drain()
