"""Engines as they were recorded: an HTTP server that answers a request as a real engine answered its like.

The recordings are those of `tests/data/engine-samples`: streams line by line, refusals with their status and body,
whole answers where only those were recorded. What it adds is what no recording holds: a request that is to go on for
ever repeats a line of the stream, and the server can die and come back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from tests.engine.fake import STREAM_HEAD, FakeEngine, page, sample

#: Longer than any prompt that was recorded as an ordinary one.
LONG_PROMPT = 4000

#: From so many tokens on, a request has no end by itself.
ENDLESS_TOKENS = 1000

ANOTHER_LINE_S = 0.02

PAGES = ("models", "health", "slots", "metrics")


class RecordedEngine(FakeEngine):
    """The engine of that name: `vllm` or `transformers`. `running` are the answers under way."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.running: set[asyncio.StreamWriter] = set()
        self._serving = contextlib.AsyncExitStack()
        self._port = 0
        for page_name in PAGES:
            path = "/v1/models" if page_name == "models" else f"/{page_name}"
            self.replies[path] = self._whole(page_name)
        self.replies["/v1/chat/completions"] = self._chat
        self.replies["/v1/completions"] = self._streamed("completions-stream")
        self.replies["/v1/embeddings"] = self._whole("embeddings-unsupported")
        self.replies["/v1/messages"] = self._whole("anthropic-messages")
        self.replies["/v1/responses"] = self._whole("responses")

    async def start(self) -> None:
        """Serve: on a free port the first time, on the same one after that."""
        server = await asyncio.start_server(self._answer, "127.0.0.1", self._port, backlog=1024)
        self._server = server
        self._port = server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"

    def die(self) -> None:
        """Drop all connections, and take no new ones."""
        self.stop_listening()
        for writer in list(self.running):
            writer.transport.abort()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[RecordedEngine]:
        """Serve until the end of the block."""
        await self.start()
        try:
            yield self
        finally:
            self.die()

    async def _chat(self, writer: asyncio.StreamWriter) -> None:
        body = self.asked[-1][2]
        self.running.add(writer)
        try:
            if isinstance(limit := body.get("max_tokens"), int) and limit >= ENDLESS_TOKENS:
                await self._go_on(writer)
            elif (what := like(body)) == "chat-stream":
                writer.write(self._streamed(what))
            else:
                writer.write(self._whole(what))
            await writer.drain()
        finally:
            self.running.discard(writer)

    async def _go_on(self, writer: asyncio.StreamWriter) -> None:
        """Send a stream that has begun, and one of its lines again and again; ends when nobody listens."""
        lines = [line for _, line in sample(f"{self.name}-chat-stream")["sse_lines"]]
        writer.write(STREAM_HEAD + "".join(f"{line}\n\n" for line in lines[:2]).encode())
        while True:
            writer.write(f"{lines[1]}\n\n".encode())
            await writer.drain()
            await asyncio.sleep(ANOTHER_LINE_S)

    def _whole(self, what: str) -> bytes:
        recorded = sample(f"{self.name}-{what}")
        body, headers = recorded["body"], recorded["headers"]
        given = {name: value for name, value in headers.items() if name in ("x-request-id",)}
        if "event-stream" in headers.get("content-type", ""):
            return STREAM_HEAD + str(body).encode()
        return page(recorded["status"], body, **given)

    def _streamed(self, what: str) -> bytes:
        lines = [line for _, line in sample(f"{self.name}-{what}")["sse_lines"]]
        return STREAM_HEAD + "".join(f"{line}\n\n" for line in lines).encode()


def like(body: Any) -> str:
    """Return the recording whose request was like this one."""
    messages = body.get("messages")
    if not messages:
        return "err-no-messages"
    if len(str(messages[0]["content"])) > LONG_PROMPT:
        return "err-prompt-too-long"
    if messages[0]["role"] not in ("system", "user", "assistant"):
        return "err-bad-role"
    if body.get("model") == "no-such-model":
        return "err-bad-model"
    if isinstance(body.get("max_tokens"), str):
        return "err-bad-type"
    if body.get("max_tokens", 1) < 0:
        return "err-neg-max-tokens"
    if body.get("temperature", 0) < 0:
        return "err-temperature"
    if "response_format" in body:
        return "chat-json-schema"
    if "logprobs" in body:
        return "chat-logprobs"
    return "chat-n2" if body.get("n") == 2 else "chat-stream"
