"""API keys at a real gateway, asked by the official client: who is let in, as whom, and what is told of limits."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import openai
import pytest
from redis.asyncio import Redis

from llmq.scheduler.api_key import KeyLimits
from llmq.scheduler.api_keys import ApiKeys
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.queue import Queue
from tests.engine.scripted import ScriptedEngine
from tests.gateway.serving import Gateway, closed, error_of, say_all
from tests.redis.serving import KEYS, until
from tests.system.cli_process import llmq, started

MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def keys(redis: Redis) -> ApiKeys:
    """The keys of the gateway's queue."""
    return ApiKeys(Queue(redis, KEYS.queue))


def client(front: Gateway, secret: str) -> openai.AsyncOpenAI:
    """Return the official client with a key, which does not try again."""
    return openai.AsyncOpenAI(base_url=f"{front.base}/v1", api_key=secret, max_retries=0)


async def test_a_key_is_the_tenant_and_its_limits_are_told(
    front: Gateway, engine: ScriptedEngine, keys: ApiKeys, redis: Redis
) -> None:
    """The job is in the tenant's lane; the answer has OpenAI's headers, and real usage corrects the estimate."""
    key, secret = await keys.create("anna", limits=KeyLimits(2, 100_000, 5))
    await closed(front)
    async with client(front, secret) as ai:
        asked = asyncio.ensure_future(
            ai.chat.completions.with_raw_response.create(model="m", messages=MESSAGES, max_tokens=500)
        )
        request = await engine.next()
        assert [b"i:anna"] == list(await cast(Any, redis).hgetall(KEYS.lanes))
        say_all(request, "hello")
        headers = (await asked).headers
    assert ("2", "1") == (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"])
    assert 99_400 <= int(headers["x-ratelimit-remaining-tokens"]) <= 99_500
    assert headers["x-ratelimit-reset-requests"].endswith("s")

    async def corrected() -> bool:
        return float(await cast(Any, redis).hget(KEYS.limit(key.id), "tokens") or 0) > 99_900

    await until(corrected)
    assert 0 == await redis.zcard(KEYS.passes(key.id))


async def test_beyond_its_limit_the_official_client_is_told_to_wait(front: Gateway, keys: ApiKeys) -> None:
    """RateLimitError with OpenAI's code and headers; nothing was queued."""
    _, secret = await keys.create("anna", limits=KeyLimits(tokens=100))
    await closed(front)
    async with client(front, secret) as ai:
        with pytest.raises(openai.RateLimitError) as caught:
            await ai.chat.completions.create(model="m", messages=MESSAGES, max_tokens=5000)
    assert ("rate_limit_exceeded", "tokens") == (caught.value.code, caught.value.type)
    assert "false" == caught.value.response.headers["x-should-retry"]


async def test_wrong_keys_and_classes_are_refused_as_openai_does(front: Gateway, keys: ApiKeys) -> None:
    """AuthenticationError, PermissionDeniedError."""
    _, secret = await keys.create("anna", classes=frozenset({TrafficClass.BATCH}))
    await closed(front)
    async with client(front, secret) as ai, client(front, "sk-wrong") as wrong:
        with pytest.raises(openai.PermissionDeniedError, match="batch"):
            await ai.chat.completions.create(model="m", messages=MESSAGES)
        with pytest.raises(openai.AuthenticationError):
            await wrong.models.list()
    async with front.get("/v1/models") as response:
        assert 401 == response.status
        assert "invalid_api_key" == (await error_of(response))["code"]


@pytest.mark.leaves("llmq:*")
def test_other_hosts_are_served_once_there_is_a_key(system_redis_url: str) -> None:
    """Without --anyone; and the line says so."""
    assert 0 == llmq("keys", "create", "--tenant", "anna", url=system_redis_url).code
    with started("gateway", "--host", "0.0.0.0", "--port", 0, url=system_redis_url) as process:
        assert "any host, with API keys" in process.until("/v1\n")
