"""A gateway that is started while Redis is away: it answers at once, and serves once Redis is there."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import aiohttp
import pytest

from llmq.gateway.arrival import arrival
from llmq.gateway.contact import Contact
from llmq.gateway.keyed_admission import KeyedAdmission
from llmq.scheduler.connection import connect
from llmq.scheduler.errors import RedisUnavailable
from llmq.scheduler.queue import Queue
from tests.conftest import OwnServer
from tests.engine.fake import FakeEngine, stream
from tests.gateway.serving import CHAT, error_of
from tests.redis.serving import until
from tests.system.cli_process import started

BODY = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


def base_in(said: str) -> str:
    """Return where a gateway serves; its log may go on after that."""
    base: str = re.findall(r"^ready .* (http://\S+)/v1$", said, re.M)[0]
    return base


async def status(base: str, path: str) -> int:
    """Return the status of a page."""
    async with aiohttp.ClientSession() as http, http.get(base + path) as response:
        return response.status


async def test_it_starts_and_serves_once_redis_is_there(own_server: OwnServer, tmp_path: Path) -> None:
    """Alive and not ready; callers get 503 with a time to come again, also where there is a direct engine."""
    server = own_server()
    server.kill()
    options = ("--port", "0", "--files", str(tmp_path), "--direct", "http://127.0.0.1:9")
    with started("gateway", *options, url=server.url) as process:
        said = await asyncio.to_thread(process.until, "/v1\n")
        base = base_in(said)
        assert "Redis away" in said
        assert (200, 503) == (await status(base, "/healthz"), await status(base, "/readyz"))
        async with aiohttp.ClientSession() as http, http.post(base + CHAT, json=BODY) as response:
            assert 503 == response.status
            assert "queue_unavailable" == (await error_of(response))["code"]
            assert 1 <= int(response.headers["retry-after"])
        server.start()
        await asyncio.to_thread(process.until, "Redis is there")

        async def serves() -> bool:
            return await status(base, "/v1/models") == 200

        await until(serves)
        process.terminate()
        assert 0 == (await asyncio.to_thread(process.end)).code


async def test_with_anyone_it_sends_chat_to_the_direct_engine_meanwhile(own_server: OwnServer, tmp_path: Path) -> None:
    """Who says that anyone may use it has said all that Redis could say of keys."""
    server, engine = own_server(), FakeEngine()
    server.kill()
    engine.replies[CHAT] = stream({"choices": [{"index": 0, "delta": {"content": "x"}}]})
    async with engine.serving():
        options = ("--port", "0", "--files", str(tmp_path), "--direct", engine.url, "--anyone")
        with started("gateway", *options, url=server.url) as process:
            said = await asyncio.to_thread(process.until, "/v1\n")
            base = base_in(said)
            async with aiohttp.ClientSession() as http, http.post(base + CHAT, json=BODY) as response:
                assert (200, "1") == (response.status, response.headers["x-llmq-direct"])
    server.start()


async def test_what_will_not_pass_is_raised() -> None:
    """A server that is away is looked at again; one of the wrong kind ends the gateway."""
    looks = []

    async def check() -> None:
        looks.append(1)
        raise RedisUnavailable("llmq needs Redis 7.0")

    with pytest.raises(RedisUnavailable, match="needs"):
        await arrival(check)
    assert 1 == len(looks)


async def test_keys_that_were_never_seen_open_only_to_anyone() -> None:
    """From the first look at Redis on, that is what counts."""
    redis = connect("redis://127.0.0.1:9", timeout_s=0.2)
    try:
        admission = KeyedAdmission(Queue(redis), Contact(), tenant="t", open_unseen=True)
        assert "t" == (await admission.identify("Bearer sk-llmq-none")).tenant
    finally:
        await redis.aclose()
