"""Clients on real servers: what is sent once, what waits, what ends in time, and what an error tells a person."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from redis import exceptions
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from llmq.scheduler.connection import PrimaryDemoted, check_server, connect, connect_sync, redis_errors
from llmq.scheduler.errors import RedisFull, RedisUnavailable
from tests.conftest import OwnServer
from tests.servers import Server

#: Replies are late by events, not by time; this is only how long a client waits before it gives one up.
SHORT_S = 0.2


class LateReplies:
    """A TCP proxy that keeps back the replies to XADD until `release` is set; all else passes at once."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.release = asyncio.Event()
        self.sent = 0
        self._serving: set[asyncio.Task[Any]] = set()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        """Serve; yields the URL of the proxy."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        finally:
            self.release.set()
            server.close()
            await asyncio.gather(*self._serving)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self._port)
        late = asyncio.Event()

        async def forward() -> None:
            while data := await reader.read(65_536):
                if b"XADD" in data:
                    self.sent += data.count(b"XADD")
                    late.set()
                server_writer.write(data)

        async def answer() -> None:
            while data := await server_reader.read(65_536):
                if late.is_set():
                    await self.release.wait()
                writer.write(data)

        tasks = [asyncio.create_task(forward()), asyncio.create_task(answer())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for each in (writer, server_writer):
            each.close()
            # The other side may have hung up with bytes on the way to it.
            with contextlib.suppress(ConnectionError):
                await each.wait_closed()


async def _add(client: redis.asyncio.Redis) -> object:
    return await client.xadd("jobs", {"a": "1"})


async def _add_in_a_pipeline(client: redis.asyncio.Redis) -> object:
    pipeline = client.pipeline(transaction=False)
    pipeline.xadd("jobs", {"a": "1"})
    return await pipeline.execute()


class TestNothingIsSentTwice:
    """F-084: a reply that is late does not make a second job."""

    @pytest.mark.parametrize("add", [_add, _add_in_a_pipeline])
    async def test_a_late_reply_leaves_one_entry(
        self, own_server: OwnServer, add: Callable[[redis.asyncio.Redis], Awaitable[object]]
    ) -> None:
        """The command ends with a timeout, and it was sent once (F-084)."""
        server = own_server("--appendonly", "no")
        proxy = LateReplies(server.port)
        async with proxy.running() as url:
            client = connect(url, timeout_s=SHORT_S)
            with pytest.raises(RedisUnavailable, match="did not answer in time"), redis_errors(url):
                await add(client)
            await client.aclose()
        with server.client() as plain:
            assert (proxy.sent, plain.xlen("jobs")) == (1, 1)

    async def test_a_late_reply_leaves_one_entry_of_a_blocking_client(self, own_server: OwnServer) -> None:
        """The same in a thread, where redis-py has other code (F-084)."""
        server = own_server("--appendonly", "no")
        proxy = LateReplies(server.port)
        async with proxy.running() as url:
            client = connect_sync(url, timeout_s=SHORT_S)
            with pytest.raises(exceptions.TimeoutError):
                await asyncio.to_thread(client.xadd, "jobs", {"a": "1"})
            client.close()
        with server.client() as plain:
            assert (proxy.sent, plain.xlen("jobs")) == (1, 1)

    async def test_a_client_that_retries_makes_two(self, own_server: OwnServer) -> None:
        """What the tests above guard against does happen: with one retry the entry is there twice (F-084)."""
        server = own_server("--appendonly", "no")
        proxy = LateReplies(server.port)
        async with proxy.running() as url:
            client = redis.asyncio.Redis.from_url(
                url,
                socket_timeout=SHORT_S,
                retry=Retry(NoBackoff(), 1),
                retry_on_error=[exceptions.TimeoutError],
                protocol=2,
            )
            with pytest.raises(exceptions.TimeoutError):
                await client.xadd("jobs", {"a": "1"})
            await client.aclose()
        with server.client() as plain:
            assert (proxy.sent, plain.xlen("jobs")) == (2, 2)


class TestCluster:
    """A cluster is used like a server (F-044)."""

    async def test_commands_wait_and_are_sent_once(self, own_server: OwnServer) -> None:
        """More commands at once than connections (F-086); none is sent again when a node stands still (F-084)."""
        server = await _one_node_cluster(own_server)
        url = f"redis+cluster://127.0.0.1:{server.port}"
        patient = connect(url, max_connections=2)
        assert sorted(await asyncio.gather(*(patient.incr("n") for _ in range(200)))) == list(range(1, 201))
        await asyncio.gather(*(_cluster_pipeline(patient) for _ in range(200)))
        await patient.aclose()
        client, sync = connect(url, timeout_s=SHORT_S), connect_sync(url, timeout_s=SHORT_S)
        sync.xadd("{q}", {"a": "1"})
        assert await client.xlen("{q}") == 201
        server.freeze()
        with pytest.raises(RedisUnavailable), redis_errors(url):
            await client.xadd("{q}", {"a": "1"})
        with pytest.raises(RedisUnavailable), redis_errors(url):
            await asyncio.to_thread(sync.xadd, "{q}", {"a": "1"})
        server.thaw()
        with server.client() as plain:
            assert plain.xlen("{q}") == 203
        await client.aclose()
        sync.close()

    async def test_a_node_wants_the_url_of_its_cluster(self, own_server: OwnServer) -> None:
        """A plain client would fail on two keys of three; a cluster's client is told the facts of all primaries."""
        server = await _one_node_cluster(own_server)
        client, cluster = connect(server.url), connect(server.url.replace("redis://", "redis+cluster://"))
        with pytest.raises(RedisUnavailable, match=r"use redis\+cluster://"):
            await check_server(client)
        assert (await check_server(cluster)).cluster
        await client.aclose()
        await cluster.aclose()


async def _cluster_pipeline(client: redis.asyncio.Redis) -> object:
    pipeline = client.pipeline()
    pipeline.xadd("{q}", {"a": "1"})
    return await pipeline.execute()


async def _one_node_cluster(own_server: OwnServer) -> Server:
    server = own_server("--appendonly", "no", "--cluster-enabled", "yes")
    with server.client() as plain:
        plain.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16_383)
        await _until(lambda: plain.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
    return server


class TestTimeouts:
    """F-073, F-075, F-078, F-080: a blocking command lives as long as it may, and not a moment longer."""

    async def test_a_blocking_read_outlives_the_timeout_of_other_commands(self, redis_url: str) -> None:
        """redis-py 8 ends every read after 5 s unless told otherwise (F-075)."""
        client = connect(redis_url, timeout_s=SHORT_S, blocking_s=3 * SHORT_S)
        assert await client.blpop(["bell"], timeout=3 * SHORT_S) is None
        await client.aclose()
        sync = connect_sync(redis_url, timeout_s=SHORT_S, blocking_s=3 * SHORT_S)
        assert await asyncio.to_thread(sync.blpop, ["bell"], 3 * SHORT_S) is None
        sync.close()

    async def test_a_server_that_stands_still_ends_every_command(self, own_server: OwnServer) -> None:
        """Also one that blocks, on a connection that was good (F-078, F-080); afterwards the client serves again."""
        server = own_server("--appendonly", "no")
        client = connect(server.url, timeout_s=SHORT_S, blocking_s=SHORT_S)
        await client.ping()
        server.freeze()
        began = time.monotonic()
        results = await asyncio.gather(
            client.blpop(["bell"], timeout=SHORT_S), client.get("a"), client.get("b"), return_exceptions=True
        )
        assert {type(result) for result in results} == {exceptions.TimeoutError}
        assert time.monotonic() - began < 10 * SHORT_S
        server.thaw()
        assert await client.ping()
        await client.aclose()


class TestCancellation:
    """A task that is cancelled while it talks to Redis ends, whenever the cancellation comes."""

    async def test_no_cancellation_is_swallowed(self, redis_url: str) -> None:
        """Cancelled after each number of steps of the loop, single commands and pipelines all end (F-027, F-142)."""
        client = connect(redis_url)

        async def commands() -> None:
            while True:
                await client.get("x")
                pipe = client.pipeline(transaction=False)
                pipe.get("x")
                pipe.get("y")
                await pipe.execute()

        async with asyncio.timeout(60):
            for steps in range(200):
                task = asyncio.create_task(commands())
                for _ in range(steps % 40 + 1):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task], timeout=2)
                assert task.cancelled()
        await client.aclose()


class TestPool:
    """F-086: connections are few, and a command waits for one."""

    async def test_a_command_waits_for_a_connection(self, own_server: OwnServer) -> None:
        """A thousand commands at once over two connections: none fails (F-086)."""
        server = own_server("--appendonly", "no")
        client = connect(server.url, max_connections=2)
        counts = await asyncio.gather(*(client.incr("n") for _ in range(1000)))
        assert sorted(counts) == list(range(1, 1001))
        with server.client() as plain:
            # One is the plain client's own.
            assert len(plain.client_list()) <= 3
        await client.aclose()

    async def test_a_pool_that_stays_used_up_is_an_error_that_says_so(self, redis_url: str) -> None:
        """Not "Redis cannot be reached": it can, and restarting it would not help."""
        client = connect(redis_url, blocking_s=30.0, max_connections=1)
        client.connection_pool.timeout = SHORT_S / 2  # type: ignore[attr-defined]
        # It has the only connection till it is cancelled, however slowly that is made.
        blocked = asyncio.ensure_future(client.blpop(["bell"], timeout=30))
        await asyncio.sleep(0)
        with (
            pytest.raises(RedisUnavailable, match="no free connection in this process's pool"),
            redis_errors(redis_url),
        ):
            await client.get("a")
        blocked.cancel()
        await asyncio.gather(blocked, return_exceptions=True)
        await client.aclose()

    async def test_an_idle_connection_to_a_server_that_restarted_is_replaced(self, own_server: OwnServer) -> None:
        """The first command after each restart succeeds, with no error to retry (F-081)."""
        server = own_server()
        client, sync = connect(server.url), connect_sync(server.url)
        for restarts in range(1, 4):
            assert (await client.incr("n"), sync.incr("m")) == (restarts, restarts)
            # In a thread: the loop must see that the connection has ended, as it does between two commands.
            await asyncio.to_thread(server.stop)
            await asyncio.to_thread(server.start)
        await client.aclose()
        sync.close()

    async def test_a_client_says_who_it_is_and_takes_bytes(self, redis_url: str) -> None:
        """RESP2 and bytes whatever redis-py's defaults are; the name shows in CLIENT LIST."""
        client = connect(redis_url, client_name="llmq:test")
        await client.set("a", "ä", px=60_000)
        assert await client.get("a") == "ä".encode()
        who = await client.client_info()
        assert (who["name"], str(who["resp"])) == ("llmq:test", "2")
        await client.aclose()

    async def test_a_peer_that_vanished_is_found_by_keepalive(self, redis_url: str) -> None:
        """The kernel asks after 30 s of silence (redis-py 5 asks for nothing)."""
        sync = connect_sync(redis_url)
        connection: Any = sync.connection_pool.make_connection()
        connection.connect()
        options = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE), (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)]
        kept = connection._sock
        assert [bool(kept.getsockopt(level, option)) for level, option in options] == [True, True]
        assert kept.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
        connection.disconnect()
        sync.close()

    async def test_a_unix_socket_is_a_place_like_any_other(self, own_server: OwnServer, tmp_path: Path) -> None:
        """With a database number and a space in its path."""
        path = tmp_path / "a b.sock"
        own_server("--appendonly", "no", "--unixsocket", str(path))
        url = f"unix://{str(path).replace(' ', '%20')}?db=1"
        client, sync = connect(url, client_name="x"), connect_sync(url)
        await client.set("a", "1")
        assert (await client.get("a"), sync.get("a")) == (b"1", b"1")
        await client.aclose()
        sync.close()


class TestFailover:
    """F-087: after a promotion clients follow the primary."""

    async def test_a_connection_to_a_demoted_primary_is_closed(self, own_server: OwnServer) -> None:
        """READONLY ends the connection, so that the next command looks the name up again (F-087)."""
        server, other = own_server("--appendonly", "no"), own_server("--appendonly", "no")
        client, sync = connect(server.url), connect_sync(server.url)
        before = {await client.client_id(), sync.client_id()}
        with server.client() as plain:
            plain.replicaof("127.0.0.1", other.port)
            with pytest.raises(RedisUnavailable, match=r"is a replica.*redis\+sentinel://"), redis_errors(server.url):
                await client.set("a", "1")
            with pytest.raises(PrimaryDemoted):
                sync.set("a", "1")
            with pytest.raises(RedisUnavailable, match=f"this is a replica of 127.0.0.1:{other.port}"):
                await check_server(client)
            plain.replicaof("NO", "ONE")
        assert await client.set("a", "1")
        assert sync.set("a", "1")
        assert before.isdisjoint({await client.client_id(), sync.client_id()})
        await client.aclose()
        sync.close()

    async def test_a_sentinel_client_follows_the_primary(self, own_server: OwnServer, tmp_path: Path) -> None:
        """The URL names the sentinels, one of them dead; after a failover the same client writes to the new primary."""
        old, new = own_server("--appendonly", "no"), own_server("--appendonly", "no")
        with new.client() as plain:
            plain.replicaof("127.0.0.1", old.port)
        with _sentinel(old, tmp_path) as port:
            url = f"redis+sentinel://127.0.0.1:1,127.0.0.1:{port}/main"
            client, sync = connect(url), connect_sync(url)
            assert (await client.incr("n"), sync.incr("n")) == (1, 2)
            old.kill()
            with new.client() as plain:
                await _until(lambda: _is_primary(plain))
                # A command may fail while the connections move over; nothing but that is tried again.
                await _until(lambda: _succeeds(client.incr("a")))
                await _until(lambda: _succeeds(asyncio.to_thread(sync.incr, "b")))
                assert (plain.exists("a"), plain.exists("b")) == (1, 1)
            await client.aclose()
            sync.close()

    async def test_one_sentinel_s_word_is_not_enough(self, own_server: OwnServer) -> None:
        """F-087: the first names a server that is a replica by now. Reads there would not fail, and hear of nothing."""
        replica, primary = own_server("--appendonly", "no"), own_server("--appendonly", "no")
        async with _names(replica) as stale, _names(primary) as right:
            with replica.client() as plain:
                plain.replicaof("127.0.0.1", primary.port)
            url = f"redis+sentinel://127.0.0.1:{stale},127.0.0.1:{right}/main"
            client, sync = connect(url), connect_sync(url)
            for _ in range(2):
                assert "master" == (await client.info("replication"))["role"]
                assert "master" == (await asyncio.to_thread(sync.info, "replication"))["role"]
                await asyncio.sleep(1.1)  # by then the sentinels' word is old, and asked for anew
            await client.aclose()
            sync.close()

    async def test_where_no_sentinel_knows_a_primary_it_is_said(self, own_server: OwnServer) -> None:
        """F-087: it is Redis that is away, for as long as the sentinels name a replica; then it is there."""
        server, other = own_server("--appendonly", "no"), own_server("--appendonly", "no")
        async with _names(server) as sentinel:
            client = connect(f"redis+sentinel://127.0.0.1:{sentinel}/main")
            with server.client() as plain:
                plain.replicaof("127.0.0.1", other.port)
                with pytest.raises(exceptions.ConnectionError, match="is a replica"):
                    await client.get("a")
                plain.replicaof("NO", "ONE")
            assert await client.set("a", "1")
            await client.aclose()


@contextlib.asynccontextmanager
async def _names(server: Server) -> AsyncIterator[int]:
    """Be a sentinel that names this server, whatever has become of it; yields its port."""

    answering: set[asyncio.Task[None] | None] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answering.add(asyncio.current_task())
        while count := (await reader.readline())[1:]:
            words = [(await reader.readline(), await reader.readline())[1].strip() for _ in range(int(count))]
            port = str(server.port)
            named = f"*2\r\n$9\r\n127.0.0.1\r\n${len(port)}\r\n{port}\r\n"
            writer.write({b"SENTINEL": named.encode(), b"PING": b"+PONG\r\n"}.get(words[0], b"+OK\r\n"))
        writer.close()
        await writer.wait_closed()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening:
        yield listening.sockets[0].getsockname()[1]
    await asyncio.wait([task for task in answering if task is not None])


@contextlib.contextmanager
def _sentinel(primary: Server, folder: Path) -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    file = folder / "sentinel.conf"
    file.write_text(
        f"port {port}\nbind 127.0.0.1\nsentinel monitor main 127.0.0.1 {primary.port} 1\n"
        "sentinel down-after-milliseconds main 500\n"
    )
    process = subprocess.Popen([primary.binary, file, "--sentinel"], stdout=subprocess.DEVNULL)
    asked = redis.Redis(port=port, protocol=2, socket_timeout=5)
    try:
        while not _knows_a_replica(asked):
            time.sleep(0.02)
        yield port
    finally:
        asked.close()
        process.kill()
        process.wait()


def _knows_a_replica(asked: redis.Redis) -> bool:
    try:
        return bool(asked.execute_command("SENTINEL", "REPLICAS", "main"))  # type: ignore[no-untyped-call]
    except exceptions.ConnectionError:
        return False


def _is_primary(plain: redis.Redis) -> bool:
    try:
        return bool(plain.info("replication")["role"] == "master")
    except exceptions.ConnectionError:
        # Sentinel ends all connections of a server whose role it changes.
        return False


async def _succeeds(call: Awaitable[object]) -> bool:
    try:
        await call
    except exceptions.ConnectionError:
        return False
    return True


async def _until(holds: Callable[[], Awaitable[bool] | bool]) -> None:
    """Ask until it holds: these are states of a server that announces nothing."""
    async with asyncio.timeout(30):
        while True:
            answer = holds()
            if answer if isinstance(answer, bool) else await answer:
                return
            await asyncio.sleep(0.02)


class TestErrors:
    """What each way of being unusable tells a person; the URL never shows its password (F-076)."""

    async def test_nobody_listens(self) -> None:
        """One line with the place and the next step."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            url = f"redis://u:secret@127.0.0.1:{probe.getsockname()[1]}/0"
            client = connect(url)
            with pytest.raises(RedisUnavailable) as caught, redis_errors(url):
                await client.ping()
            await client.aclose()
        assert str(caught.value).startswith("Redis at redis://u:***@127.0.0.1:")
        assert "cannot be reached" in str(caught.value)
        assert "LLMQ_REDIS_URL" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert "secret" not in str(caught.value)

    @pytest.mark.parametrize(
        ("userinfo", "words"),
        [("", "wants a user name or password"), (":wrong@", "refused the"), ("x:y@", "refused the")],
    )
    async def test_the_password_is_missing_or_wrong(self, own_server: OwnServer, userinfo: str, words: str) -> None:
        """Told apart from a server that is away."""
        server = own_server("--appendonly", "no", "--requirepass", "right")
        url = f"redis://{userinfo}127.0.0.1:{server.port}/0"
        client = connect(url)
        with pytest.raises(RedisUnavailable, match=words), redis_errors(url):
            await client.get("a")
        await client.aclose()

    async def test_the_user_may_not(self, own_server: OwnServer) -> None:
        """A user with too few rights is told which line to type."""
        server = own_server("--appendonly", "no")
        with server.client() as plain:
            plain.execute_command("ACL SETUSER small on >p ~other:* +@all")
        url = f"redis://small:p@127.0.0.1:{server.port}/0"
        client = connect(url)
        with pytest.raises(RedisUnavailable, match=r"does not permit.*ACL SETUSER"), redis_errors(url):
            await client.get("llmq:a")
        await client.aclose()

    @pytest.mark.parametrize("script", [False, True])
    async def test_redis_is_full(self, own_server: OwnServer, script: bool) -> None:
        """A class of its own, also when a script was refused."""
        server = own_server("--appendonly", "no", "--maxmemory", "100")
        client = connect(server.url)
        command = ("EVAL", "return redis.call('SET', KEYS[1], '1')", 1, "a") if script else ("SET", "a", "1")
        with pytest.raises(RedisFull, match="uses all its maxmemory"), redis_errors(server.url):
            await client.execute_command(*command)  # type: ignore[no-untyped-call]
        await client.aclose()

    async def test_what_answers_is_no_redis(self) -> None:
        """A wrong port that leads to a web server."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        client = connect(url)
        with pytest.raises(RedisUnavailable, match="is no Redis"), redis_errors(url):
            await client.get("a")
        await client.aclose()
        server.close()

    async def test_a_cluster_url_of_a_server_that_is_none(self, redis_url: str) -> None:
        """The form to use instead is named."""
        url = redis_url.replace("redis://", "redis+cluster://")
        client = connect(url)
        with pytest.raises(RedisUnavailable, match=r"is no cluster .*use redis://"), redis_errors(url):
            await client.get("a")
        await client.aclose()

    @pytest.mark.parametrize(
        ("error", "words"),
        [
            (exceptions.BusyLoadingError("Redis is loading the dataset in memory"), "still loading"),
            (exceptions.ResponseError("MISCONF Errors writing to the AOF file"), "cannot write to its disk"),
            (exceptions.ResponseError("BUSY Redis is busy running a script"), "SCRIPT KILL"),
            (exceptions.ResponseError("NOREPLICAS Not enough good replicas"), "too few replicas"),
            (exceptions.ClusterDownError("The cluster is down"), "CLUSTER INFO"),
            (exceptions.SlotNotCoveredError("Slot 1 is not covered"), "CLUSTER INFO"),
            (exceptions.MovedError("1 127.0.0.1:7000"), "does not agree yet"),
            (exceptions.ResponseError("UNBLOCKED force unblock from blocking operation"), "has just become a replica"),
            (exceptions.TryAgainError("Multiple keys request during rehashing"), "moving this queue"),
            (exceptions.MasterDownError("Link with MASTER is down"), "whose primary is away"),
            (exceptions.TimeoutError("Timeout reading from socket"), "did not answer in time"),
            (exceptions.MaxConnectionsError("Too many connections"), "cannot be reached"),
        ],
    )
    def test_what_is_hard_to_bring_about(self, error: Exception, words: str) -> None:
        """As the server and redis-py word it."""
        with pytest.raises(RedisUnavailable, match=words), redis_errors("redis://h"):
            raise error

    def test_a_group_of_such_errors_is_opened(self) -> None:
        """A task group wraps what its tasks raise, in groups of groups (F-076)."""
        inner = ExceptionGroup("inner", [exceptions.TimeoutError("slow"), exceptions.ConnectionError("gone")])
        with pytest.raises(RedisUnavailable, match="did not answer in time"), redis_errors("redis://h"):
            raise ExceptionGroup("outer", [inner])

    @pytest.mark.parametrize(
        "error",
        [
            exceptions.ResponseError("WRONGTYPE Operation against a key"),
            exceptions.ResponseError("BUSYGROUP Consumer Group name already exists"),
            exceptions.ResponseError("ERR user_script:1: attempt to index a nil value"),
            exceptions.NoScriptError("No matching script"),
            exceptions.RedisClusterException("No way to dispatch this command to Redis Cluster."),
            ValueError("no error of Redis"),
            TimeoutError("a timeout of the caller"),
            ExceptionGroup("mixed", [exceptions.TimeoutError("slow"), ValueError("ours")]),
        ],
    )
    def test_a_fault_of_llmq_is_not_hidden(self, error: Exception) -> None:
        """Only what means "Redis cannot be used" is turned into that."""
        with pytest.raises(type(error)) as caught, redis_errors("redis://h"):
            raise error
        assert caught.value is error


async def test_the_facts_of_a_server_are_read(own_server: OwnServer) -> None:
    """From a real one: name, version, run id, and a warning for each setting that can lose jobs (F-026, F-094)."""
    server = own_server("--appendonly", "no")
    client = connect(server.url)
    with server.client() as plain:
        plain.config_set("maxmemory-policy", "allkeys-lru")
        run_id = plain.info("server")["run_id"]
    facts = await check_server(client)
    assert (facts.run_id, facts.cluster, facts.append_only, facts.maxmemory_policy) == (
        run_id,
        False,
        False,
        "allkeys-lru",
    )
    assert ["maxmemory-policy noeviction" in facts.warnings[0], "loses all jobs" in facts.warnings[1]] == [True, True]
    await client.aclose()


@pytest.mark.parametrize(
    ("url", "hinted"),
    [
        ("rediss://h:1/0?ssl_ca_certs=/ca.pem", True),
        ("rediss://h:1/0?ssl_certfile=/c.pem&ssl_keyfile=/c.key", False),
        ("redis://h:1/0", False),
    ],
)
def test_a_tls_server_that_hangs_up_may_want_a_certificate(url: str, hinted: bool) -> None:
    """In TLS 1.3 its refusal comes after the handshake, and is often lost with the connection."""
    with pytest.raises(RedisUnavailable) as caught, redis_errors(url):
        raise exceptions.ConnectionError("Error while reading from h:1 : (104, 'Connection reset by peer')")
    assert hinted == ("ssl_certfile=/path" in str(caught.value))
