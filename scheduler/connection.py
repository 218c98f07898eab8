"""The one place where Redis clients are built.

Every process of llmq gets its clients here, so that what the queue depends on is said once and does not change with
redis-py's version: explicit timeouts, a bounded pool that waits, replies as bytes in
the shapes of RESP2 (which is also what is spoken, unless the URL says otherwise), and above all **no command is ever
sent twice**. redis-py 6 and later send a command again when its reply is late; the late XADD then made two jobs.
Whoever calls decides what is safe to repeat; submit is idempotent by its own rules.

What a URL may say is in `redis_url.py`, what an error means to a person in `redis_errors.py`.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import hiredis
import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError, DataError, ReadOnlyError, ResponseError
from redis.retry import Retry

from llmq.scheduler.cluster_map import ClusterMap
from llmq.scheduler.redis_errors import redis_errors
from llmq.scheduler.redis_url import RedisAddress, Topology, parse_redis_url, redact
from llmq.scheduler.route import told_apart
from llmq.scheduler.routed import Routed
from llmq.scheduler.routed_sync import SyncRouted
from llmq.scheduler.sentinel_map import SentinelMap
from llmq.scheduler.server_check import ServerFacts, check_server

# What a caller that connects needs beside the client.
__all__ = [
    "PrimaryDemoted",
    "SendsAtOnce",
    "ServerFacts",
    "check_server",
    "connect",
    "connect_sync",
    "redact",
    "redis_errors",
]

#: Connecting, and a reply to a command that does not block, take at most this long.
TIMEOUT_S = 5.0

#: A connection that was idle for this long is tried with PING before a command is trusted to it.
HEALTH_CHECK_S = 30

#: A command of so many bytes is sent without waiting for the kernel to take it; buffers of sockets hold more.
SMALL_BYTES = 32 * 1024


class PrimaryDemoted(ConnectionError):
    """The server that a connection leads to has become a replica; the connection was closed (F-087)."""


def connect(
    url: str,
    *,
    blocking_s: float = 0.0,
    timeout_s: float = TIMEOUT_S,
    max_connections: int = 64,
    client_name: str | None = None,
) -> redis.asyncio.Redis:
    """Return a client for `url`; it connects with its first command. Raises SettingsError for a bad URL.

    `blocking_s` is the longest time that a command of this client blocks in the server; `timeout_s` is what connecting,
    and any other reply, may take. A command whose pool is used up waits for a connection. The caller closes the client
    (`await client.aclose()`).
    """
    address = parse_redis_url(url)
    options = _options(address, blocking_s, timeout_s, client_name) | {
        "max_connections": max_connections,
        "timeout": _pool_wait(blocking_s, timeout_s),
        "retry": _no_async_retry(),
    }
    match address.topology:
        case Topology.CLUSTER:
            return Routed(ClusterMap(address.hosts), lambda node: _server(address, _place(node), options))
        case Topology.SENTINEL:
            return Routed(
                SentinelMap(address.hosts, address.service),
                lambda node: _server(address, _place(node), options),
                lambda node: _server(
                    _of_sentinels(address), _place(node), options | _credentials_of_sentinels(address)
                ),
            )
        case Topology.SERVER:
            return _server(address, {"path": address.path} if address.path else _place(address.hosts[0]), options)


def connect_sync(
    url: str,
    *,
    blocking_s: float = 0.0,
    timeout_s: float = TIMEOUT_S,
    max_connections: int = 64,
    client_name: str | None = None,
    health_check_s: int = HEALTH_CHECK_S,
) -> redis.Redis:
    """Return a client that blocks its thread; as `connect` in everything else. The caller closes it (`close()`).

    With `health_check_s` 0 no PING is sent, not even on connecting: a server that loads its data refuses it.
    """
    address = parse_redis_url(url)
    options = _options(address, blocking_s, timeout_s, client_name) | {
        "health_check_interval": health_check_s,
        "max_connections": max_connections,
        "timeout": _pool_wait(blocking_s, timeout_s),
        "retry": _no_retry(),
    }
    match address.topology:
        case Topology.CLUSTER:
            return SyncRouted(ClusterMap(address.hosts), lambda node: _sync_server(address, _place(node), options))
        case Topology.SENTINEL:
            return SyncRouted(
                SentinelMap(address.hosts, address.service),
                lambda node: _sync_server(address, _place(node), options),
                lambda node: _sync_server(
                    _of_sentinels(address), _place(node), options | _credentials_of_sentinels(address)
                ),
            )
        case Topology.SERVER:
            return _sync_server(address, {"path": address.path} if address.path else _place(address.hosts[0]), options)


def _server(address: RedisAddress, place: Mapping[str, Any], options: Mapping[str, Any]) -> redis.asyncio.Redis:
    """Return the client of one server, or of one node of a cluster."""
    kind = _SocketConnection if address.path else _TLSConnection if address.tls else _Connection
    pool = redis.asyncio.BlockingConnectionPool(connection_class=kind, db=address.db, **place, **options)
    return _shaped(redis.asyncio.Redis.from_pool(pool))


def _shaped(client: redis.asyncio.Redis) -> redis.asyncio.Redis:
    """Have a client give replies in one shape, whatever the protocol: RESP3 has a map where XREAD has a list."""
    callbacks = cast(dict[str, Callable[..., Any]], client.response_callbacks)
    plain = callbacks["XREAD"]
    callbacks["XREAD"] = lambda reply, **options: _listed(plain(reply, **options))
    return client


def _listed(streams: Any) -> Any:
    """Return XREAD's streams as pairs; in a map redis-py puts the entries of a stream into one more list."""
    if not isinstance(streams, dict):
        return streams
    return [[name, [entry for some in entries for entry in some]] for name, entries in streams.items()]


def _sync_server(address: RedisAddress, place: Mapping[str, Any], options: Mapping[str, Any]) -> redis.Redis:
    kind = _SyncSocketConnection if address.path else _SyncTLSConnection if address.tls else _SyncConnection
    pool = redis.BlockingConnectionPool(  # type: ignore[no-untyped-call]
        connection_class=kind, db=address.db, **place, **options
    )
    return redis.Redis.from_pool(pool)


def _options(address: RedisAddress, blocking_s: float, timeout_s: float, client_name: str | None) -> dict[str, Any]:
    """Return what every connection is made with, whichever class makes it."""
    return {
        "username": address.username,
        "password": address.password,
        "client_name": client_name,
        "socket_connect_timeout": timeout_s,
        # Some servers restart the clock of a blocked command once, when another consumer is served (F-073): twice.
        "socket_timeout": timeout_s + 2 * blocking_s,
        "health_check_interval": HEALTH_CHECK_S,
        "protocol": address.protocol,
        "decode_responses": False,
        **_keepalive(address),
        **(address.tls or {}),
    }


def _keepalive(address: RedisAddress) -> dict[str, Any]:
    """Return the TCP options that find a peer that vanished without a word within 45 s (redis-py 5 set none)."""
    if address.path:
        return {}
    wanted = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
    known = {getattr(socket, name): value for name, value in wanted.items() if hasattr(socket, name)}
    return {"socket_keepalive": True, "socket_keepalive_options": known}


def _place(node: tuple[str, int]) -> dict[str, Any]:
    return {"host": node[0], "port": node[1]}


def _of_sentinels(address: RedisAddress) -> RedisAddress:
    """Return how the sentinels themselves are reached: TLS is shared, databases they have none."""
    return replace(address, db=0)


def _credentials_of_sentinels(address: RedisAddress) -> dict[str, Any]:
    return {"username": address.sentinel_username, "password": address.sentinel_password, "client_name": None}


def _pool_wait(blocking_s: float, timeout_s: float) -> float:
    """Return how long a command waits for a connection: one command before it may take its whole time."""
    return 2 * timeout_s + 2 * blocking_s


def _no_retry() -> Retry:
    return Retry(NoBackoff(), 0)


def _no_async_retry() -> AsyncRetry:
    return AsyncRetry(NoBackoff(), 0)


class _ClosesWhenDemoted:
    """A connection that is closed when its server answers READONLY, so that the next command resolves the name anew.

    The error becomes a connection error: a pipeline must not read on from a connection that is closed.
    """

    async def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().read_response(*args, **kwargs)  # type: ignore[misc]
        except ReadOnlyError as error:
            await self.disconnect()  # type: ignore[attr-defined]
            raise PrimaryDemoted(f"READONLY {error}") from error
        except ResponseError as error:
            raise told_apart(error) from None


class _PacksInC:
    """A connection that has hiredis pack its commands, as redis-py's connections that block do.

    The 31 parts of a submit take 3 us then; redis-py's asynchronous connections take 19 us, in Python.
    """

    def pack_command(self, *args: Any) -> list[bytes]:
        if not isinstance(args[0], str) or " " in args[0]:  # of two words, such as CLIENT SETNAME: rare
            return super().pack_command(*args)  # type: ignore[misc,no-any-return]
        try:
            return [hiredis.pack_command(args)]
        except TypeError as error:
            raise DataError(str(error)) from error


class SendsAtOnce:
    """A connection that hands a command to the kernel without a task of its own, and never swallows a cancellation.

    redis-py sends within `asyncio.wait_for`: a task and two turns of the loop for each command, and before Python 3.12
    it forgets a cancellation that comes while the sending ends: the task would run on as if nobody had cancelled it,
    and Ctrl-C, a drain or a timeout would be lost. What is small enough need not be waited for: its reply is. The rest
    is redis-py's: connecting, the PING of an idle connection, a command that the kernel cannot take at once.
    """

    async def send_packed_command(self, command: Any, *args: Any, **kwargs: Any) -> None:
        connection = cast(Any, self)
        if isinstance(command, list) and sum(map(len, command)) <= SMALL_BYTES and self._is_clear():
            connection._writer.writelines(command)
            return
        task = asyncio.current_task()
        before = task.cancelling() if task else 0
        await super().send_packed_command(command, *args, **kwargs)  # type: ignore[misc]
        if task and task.cancelling() > before:
            await connection.disconnect(nowait=True)  # the reply will not be read
            raise asyncio.CancelledError

    def _is_clear(self) -> bool:
        """Whether the connection is up, in use of late, and has nothing left to send."""
        connection = cast(Any, self)
        if not connection.is_connected or asyncio.get_running_loop().time() > connection.next_health_check:
            return False
        transport = connection._writer.transport
        return not transport.is_closing() and transport.get_write_buffer_size() == 0


class _NoticesItsEnd:
    """A connection that knows, when it comes out of its pool, that it ended there; the pool connects it anew then.

    redis-py does not see a reset, and with RESP3 takes the end of the stream for a message. What is written then is
    lost, and uvloop's error of that is none of a connection's: a worker would end.
    """

    async def can_read(self) -> bool:
        self._check()
        return await super().can_read()  # type: ignore[misc,no-any-return]

    async def can_read_destructive(self) -> bool:  # what a pool asks before redis-py 8
        self._check()
        return await super().can_read_destructive()  # type: ignore[misc,no-any-return]

    def _check(self) -> None:
        connection = cast(Any, self)
        if connection._writer.transport.is_closing() or connection._reader.at_eof():
            raise ConnectionError("the connection was lost in the pool")


class _Connection(_PacksInC, _ClosesWhenDemoted, _NoticesItsEnd, SendsAtOnce, redis.asyncio.Connection):
    pass


class _TLSConnection(_PacksInC, _ClosesWhenDemoted, _NoticesItsEnd, SendsAtOnce, redis.asyncio.SSLConnection):
    pass


class _SocketConnection(
    _PacksInC, _ClosesWhenDemoted, _NoticesItsEnd, SendsAtOnce, redis.asyncio.UnixDomainSocketConnection
):
    pass


class _ClosesWhenDemotedSync:
    """The same for a connection that blocks its thread."""

    def read_response(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().read_response(*args, **kwargs)  # type: ignore[misc]
        except ReadOnlyError as error:
            self.disconnect()  # type: ignore[attr-defined]
            raise PrimaryDemoted(f"READONLY {error}") from error
        except ResponseError as error:
            raise told_apart(error) from None


class _SyncConnection(_ClosesWhenDemotedSync, redis.Connection):
    pass


class _SyncTLSConnection(_ClosesWhenDemotedSync, redis.SSLConnection):
    pass


class _SyncSocketConnection(_ClosesWhenDemotedSync, redis.UnixDomainSocketConnection):
    pass
