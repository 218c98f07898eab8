"""Idempotency keys: the same key is the same job and the same answer, for one tenant and one body."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from llmq.scheduler.queue import Queue
from tests.engine.scripted import ScriptedEngine
from tests.gateway.serving import Gateway, error_of, events, gateway, say_all, whole
from tests.redis.serving import configure, serving

KEY = {"idempotency-key": "order-17"}


async def test_the_same_key_gets_the_same_answer(front: Gateway, engine: ScriptedEngine) -> None:
    """The engine is asked once."""
    engine.on_request = lambda request: request.answer(body=whole("once"))

    for _ in range(2):
        async with front.chat(headers=KEY) as response:
            assert (200, whole("once")) == (response.status, await response.read())

    assert 1 == len(engine.prompts)


async def test_who_comes_while_it_runs_joins_it(redis_url: str, front: Gateway, engine: ScriptedEngine) -> None:
    """Through another gateway, too: each gets the whole answer, streamed or not."""
    async with gateway(redis_url) as other:
        asked = [
            asyncio.create_task(_text(gate, stream)) for gate, stream in ((front, True), (front, True), (other, True))
        ]
        request = await engine.next()
        say_all(request, "to ", "all")
        assert ["to all"] * 3 == await asyncio.gather(*asked)
    assert 1 == len(engine.prompts)


async def test_another_body_with_the_same_key_is_refused(front: Gateway, engine: ScriptedEngine) -> None:
    """It would be answered with what it did not ask; official clients do not try it again."""
    engine.on_request = lambda request: request.answer(body=whole("x"))
    async with front.chat("one", headers=KEY) as response:
        assert 200 == response.status

    async with front.chat("two", headers=KEY) as response:
        assert 409 == response.status
        assert "idempotency_key_reused" == (await error_of(response))["code"]
        assert "false" == response.headers["x-should-retry"]


async def test_a_refusal_of_the_engine_is_an_answer(front: Gateway, engine: ScriptedEngine) -> None:
    """The same question would be refused again."""
    engine.on_request = lambda request: request.answer(400, b'{"error":{"message":"no"}}')
    for _ in range(2):
        async with front.chat(headers=KEY) as response:
            assert 400 == response.status
    assert 1 == len(engine.prompts)


async def test_a_key_that_got_no_answer_is_free_again(redis_url: str, redis: Redis, engine: ScriptedEngine) -> None:
    """A call that nobody took in time is asked again by the same key."""
    await configure(redis, queue_ttl="300")
    async with gateway(redis_url) as front:
        async with front.chat(headers=KEY) as response:
            assert 503 == response.status
        await configure(redis, queue_ttl="")
        async with serving(redis_url, engine, concurrency=1, reserve=0):
            engine.on_request = lambda request: request.answer(body=whole("late"))
            async with front.chat(headers=KEY) as response:
                assert (200, whole("late")) == (response.status, await response.read())


async def test_a_key_that_another_request_has_just_freed_is_joined(
    redis_url: str, redis: Redis, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that come again at once: the first begins the job anew, the second waits for that one."""
    free, others, begun = Queue.delete_job, list[asyncio.Task[bytes]](), asyncio.Event()

    async def free_late(queue: Queue, job_id: str) -> None:
        if others:
            await free(queue, job_id)
            return
        others.append(asyncio.create_task(_body(front)))
        await engine.next()
        try:
            await free(queue, job_id)
        finally:
            begun.set()

    await configure(redis, queue_ttl="300")
    async with gateway(redis_url) as front:
        async with front.chat(headers=KEY) as response:
            assert 503 == response.status
        await configure(redis, queue_ttl="")
        monkeypatch.setattr(Queue, "delete_job", free_late)
        async with serving(redis_url, engine, concurrency=1, reserve=0), asyncio.timeout(10):
            asked = asyncio.create_task(_body(front))
            await begun.wait()
            engine.running[0].answer(body=whole("once"))
            assert [whole("once")] * 2 == [await asked, await others[0]]
    assert 1 == len(engine.prompts)


async def test_a_key_that_is_too_long_is_refused(front: Gateway) -> None:
    """A key is a name, and not a text."""
    async with front.chat(headers={"idempotency-key": "k" * 256}) as response:
        assert 400 == response.status
        assert "invalid_idempotency_key" == (await error_of(response))["code"]


async def _body(front: Gateway) -> bytes:
    async with front.chat(headers=KEY) as response:
        body: bytes = await response.read()
        return body


async def _text(front: Gateway, stream: bool) -> str:
    import json

    async with front.chat(headers=KEY, stream=stream) as response:
        told = [event.removeprefix("data: ") async for event in events(response)]
    assert "[DONE]" == told.pop()
    deltas = [json.loads(event)["choices"][0]["delta"] for event in told]
    return "".join(delta.get("content", "") for delta in deltas)
