"""Clients that leave: what they asked for is not worked on any more."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from redis.asyncio import Redis

from tests.engine.scripted import ScriptedEngine
from tests.gateway.serving import Gateway, chunk, whole
from tests.redis.serving import KEYS, until


async def lanes(redis: Redis) -> int:
    """Return how many lanes hold a job."""
    return int(await redis.hlen(KEYS.lanes))


@pytest.mark.parametrize("streams", [False, True])
async def test_a_queued_call_whose_client_left_never_runs(
    front: Gateway, engine: ScriptedEngine, redis: Redis, streams: bool
) -> None:
    """It is taken out of the queue, and the next one runs (G14)."""
    first = asyncio.create_task(read(front, "first"))
    running = await engine.next()
    leaving = asyncio.create_task(read(front, "leaves", stream=streams))
    await until(lambda: waiting(redis, 1))

    leaving.cancel()
    await until(lambda: waiting(redis, 0))
    running.answer(body=whole("x"))
    await first
    last = asyncio.create_task(read(front, "last"))
    (await engine.next()).answer(body=whole("y"))
    await last

    assert ["first", "last"] == engine.prompts


@pytest.mark.parametrize("streams", [False, True])
async def test_a_running_call_whose_client_left_is_aborted_within_a_second(
    front: Gateway, engine: ScriptedEngine, redis: Redis, streams: bool
) -> None:
    """The engine stops working on it, whether or not it has said something (G14)."""
    leaving = asyncio.create_task(read(front, "leaves", stream=streams))
    request = await engine.next()
    request.say("begun", chunk("begun"))
    await until(lambda: redis.exists(KEYS.tries))

    leaving.cancel()
    async with asyncio.timeout(1):
        await request.aborted.wait()
    await until(lambda: lanes_empty(redis))


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("streams", [True, False])
async def test_a_client_that_has_asked_for_more_and_left_is_noticed(
    front: Gateway, engine: ScriptedEngine, streams: bool, at_once: bool
) -> None:
    """Its next request waits behind the answer that is under way, which nobody reads any more."""
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": streams})
    _, writer = await asyncio.open_connection("127.0.0.1", front.port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write((head + body).encode() * (1 + at_once))
    request = await engine.next()
    request.say("begun", chunk("begun"))
    if not at_once:
        writer.write((head + body).encode())
        await asyncio.sleep(0.05)
    writer.transport.abort()
    async with asyncio.timeout(1):
        await request.aborted.wait()


async def test_a_call_with_a_key_goes_on_without_its_client(front: Gateway, engine: ScriptedEngine) -> None:
    """Who sends a key may come back for the answer: the same key gives it, and the engine is asked once."""
    key = {"idempotency-key": "k1"}
    leaving = asyncio.create_task(read(front, "hi", key))
    request = await engine.next()
    leaving.cancel()
    await asyncio.wait([leaving])
    again = asyncio.create_task(read(front, "hi", key))
    request.answer(body=whole("answer"))

    assert whole("answer") == await again
    assert not request.aborted.is_set()
    assert ["hi"] == engine.prompts


async def read(front: Gateway, text: str, headers: dict[str, str] | None = None, **fields: Any) -> bytes:
    """Ask, and read the answer."""
    async with front.chat(text, headers=headers, **fields) as response:
        body: bytes = await response.read()
        return body


async def waiting(redis: Redis, count: int) -> bool:
    """Whether so many jobs of the default tenant wait."""
    lane = KEYS.lane("i:default")
    length = await redis.xlen(lane)
    pending = (await redis.xpending(lane, "workers"))["pending"] if length else 0
    return bool(length - pending == count)


async def lanes_empty(redis: Redis) -> bool:
    """Whether no job is left."""
    return await lanes(redis) == 0
