"""Two tenants with API keys at one gateway: files, batches, results and answers of one are not there for the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from redis.asyncio import Redis

from llmq.scheduler.api_key import KeyLimits
from llmq.scheduler.api_keys import ApiKeys
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.queue import Queue
from tests.engine.scripted import Request, ScriptedEngine
from tests.gateway.batch_gateway import created, each_line_once, ended, questions, uploaded
from tests.gateway.serving import Gateway, chunk, closed, gateway, say_all
from tests.redis.serving import KEYS, serving, until


@pytest.fixture
async def front(redis_url: str, engine: ScriptedEngine, tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway with a worker whose engine answers with what it was asked."""
    engine.on_request = lambda request: say_all(request, request.prompt)
    async with serving(redis_url, engine, concurrency=2, reserve=0), gateway(redis_url, files=str(tmp_path)) as front:
        yield front


@pytest.fixture
def keys(redis: Redis) -> ApiKeys:
    """The keys of the gateway's queue."""
    return ApiKeys(Queue(redis, KEYS.queue))


def client(front: Gateway, secret: str, **options: Any) -> openai.AsyncOpenAI:
    """Return the official client with a key."""
    return openai.AsyncOpenAI(base_url=f"{front.base}/v1", api_key=secret, **{"max_retries": 0, **options})


async def test_nothing_of_another_tenant_is_there(front: Gateway, keys: ApiKeys) -> None:
    """By id, in lists, as an input, as results, and by no way to end or remove it."""
    (_, hers), (_, his) = await keys.create("anna"), await keys.create("bob")
    await closed(front)
    async with client(front, hers) as anna, client(front, his) as bob:
        batch = await ended(anna, (await created(anna, questions(6))).id)
        await each_line_once(anna, batch, 6)
        assert batch.output_file_id is not None
        for file_id in (batch.input_file_id, batch.output_file_id):
            for ask in (bob.files.retrieve, bob.files.content, bob.files.delete):
                with pytest.raises(openai.NotFoundError):
                    await ask(file_id)
        for look in (bob.batches.retrieve, bob.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                await look(batch.id)
        with pytest.raises(openai.NotFoundError):
            await bob.get(f"/batches/{batch.id}/results", cast_to=str)
        with pytest.raises(openai.NotFoundError):
            await bob.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
            )
        assert ([], []) == ((await bob.files.list()).data, (await bob.batches.list()).data)
        assert [batch.id] == [one.id async for one in await anna.batches.list(limit=1)]


async def test_both_run_batches_at_one_time(front: Gateway, keys: ApiKeys) -> None:
    """Each gets its own lines, and all of them once (G16)."""
    (_, hers), (_, his) = await keys.create("anna"), await keys.create("bob")
    await closed(front)
    async with client(front, hers) as anna, client(front, his) as bob:

        async def whole(ai: openai.AsyncOpenAI, count: int) -> None:
            batch = await ended(ai, (await created(ai, questions(count))).id)
            await each_line_once(ai, batch, count)

        await asyncio.gather(whole(anna, 20), whole(bob, 15))


async def test_an_idempotency_key_is_the_tenants_own(front: Gateway, keys: ApiKeys, engine: ScriptedEngine) -> None:
    """The same key of two tenants is two requests: nobody gets another's answer by guessing."""
    (_, hers), (_, his) = await keys.create("anna"), await keys.create("bob")
    await closed(front)
    asked: Any = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    headers = {"Idempotency-Key": "the-same"}
    ids = []
    for secret in (hers, his, hers):
        async with client(front, secret) as ai:
            raw = await ai.chat.completions.with_raw_response.create(**asked, extra_headers=headers)
            ids.append(raw.headers["x-llmq-job-id"])
    assert 2 == len(engine.started)
    assert ids[0] == ids[2] != ids[1]


async def test_making_a_batch_is_one_request_of_its_key(front: Gateway, keys: ApiKeys) -> None:
    """It is told and counted as one; beyond the limit the client is told to wait. Uploads count as nothing."""
    _, secret = await keys.create("anna", limits=KeyLimits(requests=2, tokens=100, concurrency=1))
    await closed(front)
    async with client(front, secret) as ai:
        file_id = await uploaded(ai, questions(3, max_tokens=5000))
        asked: Any = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        left, made = [], []
        for _ in range(2):
            raw = await ai.batches.with_raw_response.create(**asked)
            left.append((raw.headers["x-ratelimit-remaining-requests"], raw.headers["x-ratelimit-remaining-tokens"]))
            made.append(raw.parse().id)
        assert [("1", "100"), ("0", "100")] == left
        with pytest.raises(openai.RateLimitError) as refused:
            await ai.batches.create(**asked)
        assert "rate_limit_exceeded" == refused.value.code
        assert refused.value.response.headers["retry-after"]
        for batch_id in made:
            await ended(ai, batch_id)


async def test_a_key_for_chat_makes_no_batches(front: Gateway, keys: ApiKeys) -> None:
    """403, whatever is wrong with the rest."""
    _, secret = await keys.create("anna", classes=frozenset({TrafficClass.INTERACTIVE}))
    await closed(front)
    async with client(front, secret) as ai:
        with pytest.raises(openai.PermissionDeniedError) as refused:
            await created(ai, questions(1))
    assert "class_not_allowed" == refused.value.code


def say_much(request: Request) -> None:
    """Say 400 pieces, and do not end."""
    for _ in range(400):
        request.say("x", chunk("x"))


async def test_leaving_a_stream_early_is_not_cheaper(
    front: Gateway, keys: ApiKeys, engine: ScriptedEngine, redis: Redis
) -> None:
    """The pieces that came are paid for, also above what the call was expected to take."""
    engine.on_request = say_much
    key, secret = await keys.create("anna", limits=KeyLimits(tokens=1000))
    await closed(front)
    async with client(front, secret) as ai:
        stream = await ai.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=10, stream=True
        )
        came = 0
        async for _ in stream:
            came += 1
            if came == 400:
                break
        await stream.close()

    async def paid() -> bool:
        return float(await cast(Any, redis).hget(KEYS.limit(key.id), "tokens")) < 700

    await until(paid)
