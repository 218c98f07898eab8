"""Script calls over kept connections: what they answer, what a lost reply leaves, and how many connections are kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from redis import exceptions
from redis.asyncio import Redis

from llmq.scheduler import scripts
from llmq.scheduler.calling import MOST_KEPT, ScriptCalls
from llmq.scheduler.connection import connect
from llmq.scheduler.keys import QueueKeys
from tests.reply_eater import ReplyEater

KEYS = QueueKeys("calling")


def echo(word: str) -> scripts.Call[str]:
    """Return a call that answers with a word."""
    text = "return ARGV[1]"
    return scripts.Call(scripts.Script("echo", text, _SHA), (KEYS.config,), [word], scripts.text)


def refused() -> scripts.Call[str]:
    """Return a call that Redis answers with an error."""
    return scripts.Call(scripts.script("submit_job"), (KEYS.config,), [], scripts.text)


_SHA = "098e0f0d1448c0a81dafe820f66d460eb09263da"  # of the text above, which no server knows at first


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Redis]:
    """A client of four connections more than are kept."""
    client = connect(redis_url, max_connections=MOST_KEPT + 4)
    yield client
    await client.aclose()


async def test_a_script_that_the_server_does_not_know_is_loaded(client: Redis) -> None:
    """Alone and among others, after a SCRIPT FLUSH too (G12)."""
    calls = ScriptCalls(client)
    for _ in range(2):
        assert "one" == await calls.run(echo("one"))
        assert ["two", "three"] == await calls.run_all([echo("two"), echo("three")])
        await cast(Any, client).script_flush()
        assert ["four", "five"] == await calls.run_all([echo("four"), echo("five")])
        await cast(Any, client).script_flush()


async def test_an_error_is_one_calls_own(client: Redis) -> None:
    """Other calls of the trip are answered, and the connection goes on."""
    calls = ScriptCalls(client)
    first, error, last = await calls.run_all([echo("one"), refused(), echo("two")])
    assert ("one", "two") == (first, last)
    assert isinstance(error, exceptions.ResponseError)
    with pytest.raises(exceptions.ResponseError):
        await calls.run(refused())
    assert "three" == await calls.run(echo("three"))


async def test_many_calls_at_once_are_each_answered(client: Redis) -> None:
    """More than the pool has connections: those that are kept are no other call's, and none waits for ever."""
    calls = ScriptCalls(client)
    words = [str(number) for number in range(50)]
    assert words == await asyncio.gather(*(calls.run(echo(word)) for word in words))
    pool: Any = client.connection_pool
    assert MOST_KEPT == len(pool._in_use_connections)


async def test_a_call_that_was_cancelled_leaves_no_reply_behind(redis_url: str) -> None:
    """F-031: the next call on a kept connection gets its own answer, not the one that nobody waited for."""
    async with ReplyEater(redis_url) as eater:
        client = connect(eater.url)
        calls = ScriptCalls(client)
        await calls.run(echo("before"))
        eater.swallow_reply_to("abandoned")
        call = asyncio.create_task(calls.run(echo("abandoned")))
        async with asyncio.timeout(5):
            await eater.ate.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert "after" == await calls.run(echo("after"))
        await client.aclose()


async def test_a_connection_that_was_cut_is_made_anew(redis_url: str) -> None:
    """The call that finds out fails, and nothing is sent twice (F-084); the next one has a new connection."""
    async with ReplyEater(redis_url) as eater:
        client = connect(eater.url)
        calls = ScriptCalls(client)
        await calls.run(echo("before"))
        eater.swallow_reply_to("lost", cut=True)
        with pytest.raises(exceptions.ConnectionError):
            await calls.run(echo("lost"))
        assert (1, "after") == (eater.swallowed, await calls.run(echo("after")))
        await client.aclose()
