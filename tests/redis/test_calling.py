"""Script calls over kept connections: what they answer, what a lost reply leaves, and how many connections are kept."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from redis import exceptions
from redis.asyncio import Redis

from llmq.scheduler import kept_connection, scripts
from llmq.scheduler.calling import MOST_KEPT, KeptConnections, ScriptCalls, as_map
from llmq.scheduler.connection import PrimaryDemoted, connect
from llmq.scheduler.keys import QueueKeys
from tests.conftest import OwnServer
from tests.redis.serving import until
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


async def test_a_connection_that_was_lost_while_idle_costs_no_call(client: Redis) -> None:
    """F-084: nothing is on its way on it, so another is taken, and the caller hears of nothing."""
    calls = ScriptCalls(client)
    await calls.run(echo("before"))
    (kept,) = calls.connections._kept
    async with connect(client_url(client)) as other:
        await cast(Any, other).client_kill_filter(_type="normal", skipme=True)
    await until(lambda: kept.lost)
    assert "after" == await calls.run(echo("after"))


@pytest.mark.parametrize("kept", [True, False])
async def test_a_connection_that_was_reset_in_the_pool_costs_no_command(redis_url: str, kept: bool) -> None:
    """F-084: a reset is no end of the stream for redis-py, and uvloop answers a write to it with a RuntimeError."""
    async with ReplyEater(redis_url) as eater:
        client: Any = connect(eater.url, timeout_s=1)
        assert await client.ping()
        (connection,) = client.connection_pool._available_connections
        eater.reset()
        await until(connection._writer.transport.is_closing)
        if kept:
            assert [b"PONG"] == await KeptConnections(client).exchange([("PING",)])
        else:
            assert await client.ping()
        await client.aclose()


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("kept", [True, False])
async def test_a_connection_that_was_closed_in_the_pool_costs_no_command(
    redis_url: str, kept: bool, protocol: int
) -> None:
    """F-084: with RESP3, redis-py's pool gives it out all the same; a reply would be waited for in vain."""
    client: Any = connect(f"{redis_url}?protocol={protocol}", timeout_s=1)
    assert await client.ping()
    (connection,) = client.connection_pool._available_connections
    async with connect(redis_url) as other:
        await cast(Any, other).client_kill_filter(_type="normal", skipme=True)
    await until(connection._reader.at_eof)
    if kept:
        assert [b"PONG"] == await KeptConnections(client).exchange([("PING",)])
    else:
        assert await client.ping()
    await client.aclose()


async def test_a_connection_that_was_idle_in_the_pool_is_tried_first(redis_url: str) -> None:
    """F-084: the time that it lay there counts."""
    async with ReplyEater(redis_url) as eater:
        client: Any = connect(eater.url, timeout_s=0.3)
        await client.ping()
        (connection,) = client.connection_pool._available_connections
        connection.next_health_check = asyncio.get_running_loop().time() - 1
        connections = KeptConnections(client)
        eater.swallow_reply_to("PING")
        with pytest.raises(exceptions.TimeoutError):
            await connections.exchange([("ECHO", "never")])
        assert [b"after"] == await connections.exchange([("ECHO", "after")])
        await client.aclose()


async def test_the_time_to_send_a_large_command_is_not_that_of_its_reply() -> None:
    """As in redis-py: each may take as long as the client says."""
    size, pause = 16 * 2**20, 0.6

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**10):
            if b"LARGE" in data:
                await asyncio.sleep(pause)
                left = size - len(data)
                while left > 0:
                    left -= len(await reader.read(2**20))
                await asyncio.sleep(pause)
            writer.write(b"+PONG\r\n" if b"PING" in data else b"+OK\r\n" * (1 + data.count(b"\r\n*")))
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = connect(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", timeout_s=1.0)
    assert [b"OK"] == await KeptConnections(client).exchange([("LARGE", bytes(size))])
    await client.aclose()
    server.close()


async def test_no_more_are_kept_where_a_lost_one_goes_back_slowly(client: Redis) -> None:
    """Another call may not take its place twice."""
    connections, pool = KeptConnections(client), cast(Any, client.connection_pool)
    pings = [connections.exchange([("PING",)]) for _ in range(MOST_KEPT)]
    await asyncio.gather(*pings)
    kept = list(connections._kept)
    for one in kept:
        one._transport.abort()
    await until(lambda: all(one.lost for one in kept))
    async with pool._condition:  # held by somebody who takes a connection
        calls = [asyncio.create_task(connections.run(("PING",))) for _ in range(2 * MOST_KEPT)]
        await asyncio.sleep(0.05)
    await asyncio.gather(*calls)
    assert 0 <= connections._left
    assert MOST_KEPT == connections._left + len(connections._kept)
    assert len(connections._kept) == len(pool._in_use_connections)


async def test_a_connection_that_is_being_closed_costs_no_call(client: Redis) -> None:
    """F-084: asyncio says so in its next turn only; what is written till then is a TypeError from Python 3.12 on."""
    calls = ScriptCalls(client)
    await calls.run(echo("before"))
    (kept,) = calls.connections._kept
    kept._transport.abort()
    assert "after" == await calls.run(echo("after"))


async def test_a_reply_is_waited_for_as_long_as_the_client_says(redis_url: str) -> None:
    """F-031: then the connection is closed, and a reply that comes late is nobody's."""
    async with ReplyEater(redis_url) as eater:
        client = connect(eater.url, timeout_s=0.3)
        calls = ScriptCalls(client)
        for word in ("one", "two"):  # the second one after the timer of the first has gone off in vain
            await calls.run(echo(word))
            await asyncio.sleep(0.2)
        eater.swallow_reply_to("late")
        began = time.monotonic()
        with pytest.raises(exceptions.TimeoutError):
            await calls.run(echo("late"))
        assert 0.3 <= time.monotonic() - began < 2
        assert "after" == await calls.run(echo("after"))
        await client.aclose()


async def test_a_connection_that_was_idle_is_tried_first(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """F-084: what may have vanished in silence is asked a PING, and what is sent after it has not been sent before."""
    monkeypatch.setattr(kept_connection, "HEALTH_CHECK_S", 0.0)
    async with ReplyEater(redis_url) as eater:
        client = connect(eater.url, timeout_s=0.3)
        calls = ScriptCalls(client)
        await calls.run(echo("before"))
        assert "fine" == await calls.run(echo("fine"))
        eater.swallow_reply_to("PING")
        eater.ate.clear()
        with pytest.raises(exceptions.TimeoutError):
            await calls.run(echo("never"))
        assert eater.ate.is_set()
        assert "after" == await calls.run(echo("after"))
        await client.aclose()


async def test_what_cannot_be_packed_is_not_sent_and_leaves_nothing_behind(client: Redis) -> None:
    """The caller gets the error, and asyncio has none to tell that nobody asked for."""
    said: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: said.append(context))
    connections = KeptConnections(client)
    with pytest.raises(exceptions.DataError):
        await connections.run(("ECHO", None))
    await asyncio.sleep(0.05)
    gc.collect()
    assert ([], [b"after"]) == (said, await connections.run(("ECHO", "after")))


async def test_a_primary_that_became_a_replica_is_left(own_server: OwnServer) -> None:
    """F-087: the connection is closed with its refusal; the next one may lead to the new primary."""
    server = own_server()
    client, admin = connect(server.url), connect(server.url)
    connections = KeptConnections(client)
    await connections.exchange([("SET", "key", "1", "PX", 60_000)])
    (kept,) = connections._kept
    await cast(Any, admin).execute_command("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(PrimaryDemoted):
        await connections.exchange([("PING",), ("SET", "key", "2", "PX", 60_000)])
    assert kept.lost
    await cast(Any, admin).execute_command("REPLICAOF", "NO", "ONE")
    assert [b"OK"] == await connections.exchange([("SET", "key", "3", "PX", 60_000)])
    await admin.aclose()
    await client.aclose()


@pytest.mark.parametrize("protocol", [2, 3])
async def test_a_command_reads_the_same_whoever_sends_it(redis_url: str, protocol: int) -> None:
    """Over a kept connection, and the client's own way where none is free; in both protocols."""
    async with connect(f"{redis_url}?protocol={protocol}", max_connections=2) as client:
        connections = KeptConnections(client)
        key = KEYS.job("one")
        told: Any = await connections.run(("HSET", key, "a", "1", "b", "2"), ("PEXPIRE", key, 60_000))
        kept = await connections.run(("HGETALL", key), ("HMGET", key, "b", "c"))
        connections._kept, left = [], connections._kept
        connections._left = 0
        own = await connections.run(("HGETALL", key), ("HMGET", key, "b", "c"))
        (alone,) = await connections.run(("HGETALL", key))
        for found, values in (kept, own):
            assert ({b"a": b"1", b"b": b"2"}, [b"2", None]) == (as_map(found), values)
        assert (as_map(alone), [2, 1]) == (as_map(kept[0]), told)
        connections._kept = left
        with pytest.raises(exceptions.ResponseError):
            await connections.run(("HGETALL", key), ("XLEN", key))


async def test_a_client_closes_what_is_kept(client: Redis) -> None:
    """At once: redis-py waits for its own protocol to hear of the end."""
    calls = ScriptCalls(client)
    await calls.run(echo("one"))
    (kept,) = calls.connections._kept
    began = time.monotonic()
    await client.aclose()
    assert time.monotonic() - began < 1
    assert kept.lost


def client_url(client: Redis) -> str:
    """Return where a client leads."""
    where = client.connection_pool.connection_kwargs
    return f"redis://{where['host']}:{where['port']}/0"
