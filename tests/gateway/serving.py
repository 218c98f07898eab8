"""A gateway in the process of the test, behind a real socket; and what is asked of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
from openai import AsyncOpenAI

from llmq.gateway.gateway import GatewayOptions, GatewayReport, serve
from llmq.gateway.http_server import listen
from llmq.workers.shutdown import Shutdown
from tests.engine.scripted import Request
from tests.redis.serving import until

CHAT = "/v1/chat/completions"


@dataclass
class Gateway:
    """A gateway that serves, with a client of HTTP for it."""

    base: str
    shutdown: Shutdown
    task: asyncio.Task[GatewayReport]
    http: aiohttp.ClientSession

    def openai(self, **options: Any) -> AsyncOpenAI:
        """Return the official client; close it after use."""
        return AsyncOpenAI(base_url=f"{self.base}/v1", api_key="none", max_retries=0, **options)

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
        """Ask; bytes are sent as they are, other bodies as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(
            self.base + path, data=data, headers={"content-type": "application/json"} | (headers or {})
        )

    def chat(self, text: str = "hi", *, headers: dict[str, str] | None = None, **fields: Any) -> Any:
        """Ask for a chat completion."""
        return self.post(CHAT, {"messages": [{"role": "user", "content": text}], **fields}, headers)

    def get(self, path: str) -> Any:
        """Ask for a page."""
        return self.http.get(self.base + path)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self.base.rpartition(":")[2])


@contextlib.asynccontextmanager
async def gateway(url: str, **options: Any) -> AsyncIterator[Gateway]:
    """Serve until the block ends; then stop at once, and raise what the gateway died of."""
    sockets, shutdown, ready = listen("127.0.0.1", 0), Shutdown(), asyncio.Event()
    base = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
    task = asyncio.create_task(serve(url, GatewayOptions(**options), sockets, shutdown, ready.set))
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    try:
        async with aiohttp.ClientSession() as http:
            yield Gateway(base, shutdown, task, http)
    finally:
        shutdown.request_at_once()
        await asyncio.wait([task])
    task.result()


def chunk(text: str | None = None, **fields: Any) -> bytes:
    """Return a chunk of a chat completion, as an engine writes it."""
    delta = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": None if text is not None else "stop"}
    return json.dumps({"id": "c1", "object": "chat.completion.chunk", "choices": [choice], **fields}).encode()


def usage_chunk() -> bytes:
    """Return the chunk that tells what an answer cost."""
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    return json.dumps({"id": "c1", "object": "chat.completion.chunk", "choices": [], "usage": usage}).encode()


def whole(text: str) -> bytes:
    """Return a whole chat completion."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    return json.dumps({"id": "c1", "object": "chat.completion", "choices": [choice], "usage": usage}).encode()


def say_all(request: Request, *texts: str) -> None:
    """Let the engine answer a request with these pieces, streamed, and end it."""
    for text in texts:
        request.say(text, chunk(text))
    request.say("", chunk())
    request.say("", usage_chunk())
    request.answer(body=whole("".join(texts)))


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """Yield the events of a stream, each as it came without its empty line."""
    lines: list[str] = []
    async for line in response.content:
        text = line.decode().rstrip("\n")
        if text:
            lines.append(text)
        elif lines:
            yield "\n".join(lines)
            lines = []


async def closed(front: Gateway) -> None:
    """Wait until a gateway has seen the first key."""

    async def refuses() -> bool:
        async with front.get("/v1/models") as response:
            return bool(response.status == 401)

    await until(refuses)


async def error_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """Return the error of an answer, which must be in OpenAI's shape."""
    told = json.loads(await response.read())
    assert ["error"] == list(told)
    error: dict[str, Any] = told["error"]
    assert {"message", "type", "param", "code"} == set(error)
    assert "Traceback" not in error["message"]
    return error
