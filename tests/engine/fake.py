"""An HTTP server that misbehaves on demand, for the tests of the HTTP engine.

It speaks raw HTTP over a socket: what a test writes is what the engine gets, byte for byte.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from llmq.scheduler.job import Job
from llmq.workers.engines.base import EngineAnswer
from llmq.workers.engines.http import HttpEngine

SAMPLES = Path(__file__).parents[1] / "data" / "engine-samples"

CHAT_BODY = {"messages": [{"role": "user", "content": "hi"}]}
DONE = "data: [DONE]\n\n"

Reply = Callable[[asyncio.StreamWriter], Awaitable[None]]


class FakeEngine:
    """An HTTP server that answers each path with what a test set for it, and remembers what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.replies: dict[str, bytes | Reply] = {"/v1/models": page(200, {"object": "list", "data": [{"id": "m1"}]})}
        self.asked: list[tuple[str, dict[str, str], Any]] = []
        self.hung_up = asyncio.Event()
        self._server: asyncio.Server | None = None

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeEngine]:
        """Serve on a free port."""
        async with await asyncio.start_server(self._answer, "127.0.0.1", 0, backlog=1024) as self._server:
            host, port = self._server.sockets[0].getsockname()
            self.url = f"http://{host}:{port}"
            yield self

    def stop_listening(self) -> None:
        """Refuse new connections; those that are open go on."""
        assert self._server is not None
        self._server.close()

    def body(self, path: str) -> Any:
        """Return the body of the last request for a path."""
        return next(body for asked, _, body in reversed(self.asked) if asked == path)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            request, *lines = head.strip().split("\r\n")
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            path = request.split()[1]
            self.asked.append((path, headers, json.loads(body) if body else None))
            reply = self.replies.get(path, page(404, {"detail": "Not Found"}))
            if callable(reply):
                watch = asyncio.create_task(self._watch(reader))
                await reply(writer)
                watch.cancel()
            else:
                writer.write(reply)
        with contextlib.suppress(ConnectionError):
            writer.close()
            await writer.wait_closed()

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        self.hung_up.set()


def page(status: int, body: Any = b"", **headers: str) -> bytes:
    """Return a whole HTTP response; text is sent as it is, other bodies as JSON."""
    data = body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()
    kind = "text/plain" if isinstance(body, str) else "application/json"
    given = {"Content-Type": kind, **{name.replace("_", "-"): value for name, value in headers.items()}}
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"HTTP/1.1 {status} X\r\n{lines}Content-Length: {len(data)}\r\n\r\n".encode() + data


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def stream(*events: Any, end: str = DONE) -> bytes:
    """Return a streamed HTTP response of these events."""
    return STREAM_HEAD + "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode() + end.encode()


def chunked(text: str) -> bytes:
    """Return one chunk of a chunked body."""
    return f"{len(text.encode()):x}\r\n{text}\r\n".encode()


def piece(content: str = "", finish: str | None = None, **fields: Any) -> dict[str, Any]:
    """Return one chunk of a streamed chat completion."""
    choice = {"index": 0, "delta": {"content": content} if content else {}, "finish_reason": finish}
    return {"id": "chat-1", "object": "chat.completion.chunk", "choices": [choice], **fields}


def sample(name: str) -> Any:
    """Return a recorded request and response."""
    return json.loads((SAMPLES / f"{name}.json").read_text(encoding="utf-8"))


def chat(**fields: Any) -> Job:
    """Return a chat job."""
    return Job("/v1/chat/completions", {**CHAT_BODY, **fields})


def body_of(answer: EngineAnswer) -> Any:
    """Return the JSON of an answer."""
    return json.loads(answer.body)


@contextlib.asynccontextmanager
async def opened(url: str, **options: Any) -> AsyncIterator[HttpEngine]:
    """Open an engine; close it whatever happens."""
    engine = HttpEngine(url, **options)
    try:
        yield engine
    finally:
        await engine.close()
