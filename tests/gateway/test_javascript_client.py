"""The official JavaScript client, unchanged, against the gateway: over a simulated GPU, and over a real engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from llmq.scheduler.api_key import KeyLimits
from llmq.scheduler.api_keys import ApiKeys
from llmq.scheduler.queue import Queue
from llmq.workers.engines.base import EngineGone
from llmq.workers.engines.sim import SimEngine
from tests.engine import llama_server
from tests.engine.fake import opened
from tests.engine.scripted import Request, ScriptedEngine
from tests.gateway.node import Node, install
from tests.gateway.serving import Gateway, chunk, closed, gateway, say_all, usage_chunk, whole
from tests.redis.serving import KEYS, serving

#: Checks of openai_client.mjs that hold whichever engine is behind the gateway.
ANY_ENGINE = ("chat", "stream", "streamHelper", "responses")


@pytest.fixture(scope="session")
def node(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Node:
    """Node with the client; all processes of a test run share it."""
    base = tmp_path_factory.getbasetemp()
    return install(base if worker_id == "master" else base.parent)


async def test_the_client_works_unchanged(node: Node, redis_url: str, tmp_path: Path) -> None:
    """Over a simulated GPU; what each check asserts stands in openai_client.mjs."""
    engine = SimEngine.from_url("sim://?instant=1")
    files = str(tmp_path / "files")
    async with serving(redis_url, engine, concurrency=4, reserve=0), gateway(redis_url, files=files) as front:
        await node.passes(front.base, *ANY_ENGINE, "embeddings", "models", "batch", "badInput")


async def test_a_real_engine_works_as_well(node: Node, redis_url: str) -> None:
    """The same over llama.cpp."""
    with llama_server(slots=2) as llama:
        async with (
            opened(llama.url) as engine,
            serving(redis_url, engine, concurrency=2, reserve=0),
            gateway(redis_url) as front,
        ):
            await node.passes(front.base, *ANY_ENGINE)


async def test_tools_pass_both_ways(node: Node, front: Gateway, engine: ScriptedEngine) -> None:
    """The engine sees the tools as the client sent them, and the client the engine's calls, whole and streamed."""
    call = {"id": "call-1", "type": "function", "function": {"name": "tide", "arguments": '{"at":"noon"}'}}
    answer = json.loads(whole(""))
    answer["choices"][0] |= {"message": {"role": "assistant", "content": None, "tool_calls": [call]}}
    seen: list[Any] = []

    def calls(request: Request) -> None:
        seen.append((request.job.body["tools"], request.job.body["tool_choice"]))
        request.say("", tool_chunk({**call, "function": {"name": "tide", "arguments": ""}}))
        for arguments in ('{"at":', '"noon"}'):
            request.say("", tool_chunk({"function": {"arguments": arguments}}))
        request.say("", tool_chunk(None, "tool_calls"))
        request.say("", usage_chunk())
        request.answer(body=json.dumps(answer).encode())

    engine.on_request = calls
    plain, streamed = await node.passes(front.base, "tools")
    assert [call] == plain
    assert "tide" == streamed[0]["function"]["name"]
    assert '{"at":"noon"}' == streamed[0]["function"]["arguments"]
    tools = [{"type": "function", "function": {"name": "tide", "parameters": {"type": "object", "properties": {}}}}]
    assert [(tools, "required")] * 2 == seen


async def test_a_refusal_is_tried_again(node: Node, redis: Redis, front: Gateway, engine: ScriptedEngine) -> None:
    """429: the client waits as long as it is told, and its caller notices nothing."""
    _, secret = await ApiKeys(Queue(redis, KEYS.queue)).create("anna", limits=KeyLimits(concurrency=1))
    await closed(front)
    blocking = asyncio.ensure_future(_status(front, secret))
    held = await engine.next()
    async with node.running(front.base, "retry", key=secret) as run:
        assert {"status": 429} == await run.told()
        say_all(held, "done")
        assert 200 == await blocking
        say_all(await engine.next(), "hello")
        assert {"status": 200} in await run.told_to_the_end()


async def test_a_wrong_key_is_refused(node: Node, redis: Redis, front: Gateway) -> None:
    """AuthenticationError, as with OpenAI; a good one is let in."""
    _, secret = await ApiKeys(Queue(redis, KEYS.queue)).create("anna", limits=KeyLimits(600))
    await closed(front)
    await node.passes(front.base, "badInput", "wrongKey", key=secret)


async def test_a_stream_that_breaks_off_raises(node: Node, front: Gateway, engine: ScriptedEngine) -> None:
    """It does not look like a short answer (G18)."""
    engine.on_request = lambda request: request.say("half", chunk("half"))
    async with node.running(front.base, "brokenStream") as run:
        assert {"content": "half"} == await run.told()
        engine.running[0].fail(EngineGone("died", in_flight=True))
        assert [] == await run.told_to_the_end()


async def test_a_stream_that_is_left_stops_the_engine(node: Node, front: Gateway, engine: ScriptedEngine) -> None:
    """The client leaves its loop and lives on: within seconds nothing runs any more (G14)."""
    engine.on_request = lambda request: request.say("half", chunk("half"))
    async with node.running(front.base, "leave") as run:
        assert "left" == await run.told()
        await engine.started[0].aborted.wait()


async def _status(front: Gateway, secret: str) -> int:
    async with front.chat(headers={"authorization": f"Bearer {secret}"}) as response:
        await response.read()
        return int(response.status)


def tool_chunk(call: dict[str, Any] | None, reason: str | None = None) -> bytes:
    """Return a chunk with a piece of a tool call, as engines write it."""
    delta = {} if call is None else {"role": "assistant", "tool_calls": [{"index": 0, **call}]}
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    return json.dumps({"id": "c1", "object": "chat.completion.chunk", "choices": [choice]}).encode()
