"""Encryption at rest through the gateway: chat, stream and batch work, and Redis holds nothing to read."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from redis.asyncio import Redis

from llmq.scheduler.keyring import Keyring, new_key, parse_keys
from tests.engine.scripted import ScriptedEngine
from tests.gateway.batch_gateway import created, each_line_once, ended, questions, until_status
from tests.gateway.serving import gateway, say_all
from tests.redis.serving import serving

MARKER = "a-word-that-nobody-else-writes"
ASKED: Any = {"model": "m", "messages": [{"role": "user", "content": MARKER}]}


async def test_chat_streams_and_batches_are_not_to_be_read(
    redis_url: str, redis: Redis, engine: ScriptedEngine, tmp_path: Path
) -> None:
    """Answers are whole; neither prompts nor answers stand in Redis, while they wait and afterwards."""
    keyring = Keyring.from_secrets(parse_keys(new_key()))
    async with gateway(redis_url, keyring=keyring, files=str(tmp_path)) as front, front.openai() as client:
        waiting = [
            asyncio.create_task(client.chat.completions.create(**ASKED)),
            asyncio.create_task(client.chat.completions.create(**ASKED, stream=True)),
        ]
        batch = await created(client, questions(5, messages=ASKED["messages"]))
        await until_status(client, batch.id, "in_progress")
        assert not await _keys_with_the_marker(redis)
        engine.on_request = lambda request: say_all(request, "so: ", request.prompt)
        async with serving(redis_url, engine, concurrency=2, reserve=0, keyring=keyring):
            whole, stream = await asyncio.gather(*waiting)
            assert f"so: {MARKER}" == whole.choices[0].message.content
            pieces = [piece.choices[0].delta.content async for piece in stream if piece.choices]
            assert f"so: {MARKER}" == "".join(piece or "" for piece in pieces)
            assert not await _keys_with_the_marker(redis)
            output, _ = await each_line_once(client, await ended(client, batch.id), 5)
            assert {f"so: {MARKER}"} == {one["response"]["body"]["choices"][0]["message"]["content"] for one in output}
        assert not await _keys_with_the_marker(redis)


async def _keys_with_the_marker(redis: Redis) -> list[bytes]:
    keys: list[bytes] = [key async for key in redis.scan_iter()]
    dumps = [await redis.dump(key) for key in keys]
    return [key for key, dump in zip(keys, dumps, strict=True) if dump and MARKER.encode() in dump]
