"""Clients of a cluster: each command goes to the node that holds its key, over connections like those to one server.

redis-py has cluster clients; these are in their place because they send commands again on their own (a second job),
give ASKING and the command that it is for to different connections, cannot do MULTI before redis-py 6, and use
connections that swallow cancellations. Here a node is an ordinary client of `connection.py`, and only what a node says
that it has *not run* (MOVED, ASK, TRYAGAIN) is sent again. An error of a connection is the caller's, as on one server;
it makes the map doubtful (`cluster_map.py`), so that the next command follows a failover.

The keys of a pipeline belong to one queue, hence to one node. Replicas are never read: they lag.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import redis
import redis.asyncio
from redis import exceptions
from redis.asyncio.client import Pipeline

from llmq.scheduler.cluster_map import DOUBTFUL, NOT_RUN, Address, Attempt, ClusterMap, key_of

T = TypeVar("T")

#: A command as pipelines of redis-py hold it.
Command = tuple[tuple[Any, ...], dict[str, Any]]


class Cluster(redis.asyncio.Redis):
    """A client of a cluster; `open_node` makes the client of one node."""

    def __init__(self, seeds: Iterable[Address], open_node: Callable[[Address], redis.asyncio.Redis]) -> None:
        self._map = ClusterMap(seeds)
        self._open_node = open_node
        self._nodes: dict[Address, redis.asyncio.Redis] = {}
        self._refreshing = asyncio.Lock()
        # What commands need to know of a connection (encoding, shapes of replies) is the same for all nodes.
        super().__init__(connection_pool=self._node(self._map.to_ask()[0]).connection_pool)

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Run one command on the node that holds its key; one without a key on any primary."""

        async def send(node: redis.asyncio.Redis, asking: bool) -> Any:
            if not asking:
                return await node.execute_command(*args, **options)  # type: ignore[no-untyped-call]
            (reply,) = await _send_all(node, [(args, options)], asking=True)
            if isinstance(reply, Exception):
                raise reply
            return reply

        return await self._routed(key_of(args), send)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        """Return a pipeline for keys of one queue."""
        return _ClusterPipeline(self, transaction, shard_hint)

    async def primaries(self) -> list[redis.asyncio.Redis]:
        """Return the clients of all primaries."""
        await self._refresh()
        return [self._node(address) for address in self._map.primaries]

    async def node_of(self, key: str) -> redis.asyncio.Redis:
        """Return the client of the node that holds a key."""
        await self._refresh()
        return self._node(self._map.owner(key.encode()))

    async def run_all(self, commands: Sequence[Command]) -> list[Any]:
        """Run several commands in one trip; a reply may be an exception. What was not run is run on its own."""

        async def send(node: redis.asyncio.Redis, asking: bool) -> list[Any]:
            replies = await _send_all(node, commands, asking=asking)
            if all(isinstance(reply, NOT_RUN) for reply in replies):
                raise replies[0]
            return replies

        replies = await self._routed(_key_of_all(commands), send)
        for place, ((args, options), reply) in enumerate(zip(commands, replies, strict=True)):
            if isinstance(reply, NOT_RUN):
                try:
                    replies[place] = await self.execute_command(*args, **options)
                except exceptions.ResponseError as error:
                    replies[place] = error
        return replies

    async def transact(self, commands: Sequence[Command]) -> list[Any]:
        """Run several commands as one transaction; a reply may be an exception."""

        async def send(node: redis.asyncio.Redis, asking: bool) -> list[Any]:
            whole: list[Command] = [(("MULTI",), {}), *((args, {}) for args, _ in commands), (("EXEC",), {})]
            started, *queued, done = await _send_all(node, whole, asking=asking)
            if isinstance(done, Exception):  # the first refusal says why, EXEC only that there was one
                raise next((reply for reply in (started, *queued) if isinstance(reply, Exception)), done)
            return [
                reply if isinstance(reply, Exception) else self._shaped(command, reply)
                for command, reply in zip(commands, done, strict=True)
            ]

        return await self._routed(_key_of_all(commands), send)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        """Close all connections to all nodes."""
        nodes, self._nodes = self._nodes, {}
        for node in nodes.values():
            await node.aclose()

    async def _routed(self, key: bytes | None, send: Callable[[redis.asyncio.Redis, bool], Awaitable[T]]) -> T:
        attempt = Attempt(self._map, key)
        while True:
            if self._map.doubtful:
                await self._refresh()
            address = attempt.address
            try:
                return await send(self._node(address), attempt.asking)
            except NOT_RUN as error:
                pause = attempt.refused(error, address)
            except DOUBTFUL:
                self._map.doubt(address)
                raise
            await asyncio.sleep(pause)

    async def _refresh(self) -> None:
        """Ask for the map, if nobody else has just done so; raises what the last node answered where none tells."""
        async with self._refreshing:
            failure: Exception | None = None
            for address in self._map.to_ask() if self._map.doubtful else ():
                try:
                    reply = await self._node(address).execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]
                except DOUBTFUL as error:
                    failure = error
                    continue
                self._map.read(reply, address)
                await self._close_unknown()
                return
            if failure is not None:
                raise failure

    async def _close_unknown(self) -> None:
        for address in self._nodes.keys() - self._map.known:
            await self._nodes.pop(address).aclose()

    def _node(self, address: Address) -> redis.asyncio.Redis:
        if (node := self._nodes.get(address)) is None:
            node = self._nodes[address] = self._open_node(address)
        return node

    def _shaped(self, command: Command, reply: Any) -> Any:
        """Return a reply within a transaction in the shape that it has outside."""
        args, options = command
        options = {name: value for name, value in options.items() if name != "keys"}
        callback = self.response_callbacks.get(args[0])
        return callback(reply, **options) if callback else reply


class _ClusterPipeline(Pipeline):
    """Gathers commands as redis-py's pipeline does, and has the cluster run them."""

    def __init__(self, cluster: Cluster, transaction: bool, shard_hint: str | None) -> None:
        super().__init__(cluster.connection_pool, cluster.response_callbacks, transaction, shard_hint)
        self._cluster = cluster

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands: list[Command] = [(args, dict(options)) for args, options in self.command_stack]
        self.command_stack = []
        if not commands:
            return []
        run = self._cluster.transact if self.is_transaction else self._cluster.run_all
        replies = await run(commands)
        if raise_on_error:
            self.raise_first_error(list(commands), replies)
        return replies


class SyncCluster(redis.Redis):
    """The same for what blocks its thread: single commands (the lease keeper's and the blocking client's scripts)."""

    def __init__(self, seeds: Iterable[Address], open_node: Callable[[Address], redis.Redis]) -> None:
        self._map = ClusterMap(seeds)
        self._open_node = open_node
        self._nodes: dict[Address, redis.Redis] = {}
        self._lock = threading.RLock()
        super().__init__(connection_pool=self._node(self._map.to_ask()[0]).connection_pool)

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Run one command on the node that holds its key; one without a key on any primary."""
        attempt = Attempt(self._map, key_of(args))
        while True:
            if self._map.doubtful:
                self._refresh()
            address = attempt.address
            node = self._node(address)
            try:
                if not attempt.asking:
                    return node.execute_command(*args, **options)  # type: ignore[no-untyped-call]
                pipe = node.pipeline(transaction=False)
                pipe.execute_command("ASKING")  # type: ignore[no-untyped-call]
                pipe.execute_command(*args, **options)  # type: ignore[no-untyped-call]
                return pipe.execute()[1]
            except NOT_RUN as error:
                pause = attempt.refused(error, address)
            except DOUBTFUL:
                self._map.doubt(address)
                raise
            time.sleep(pause)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Any:
        """Refuse: nothing of llmq that blocks its thread sends more than one command at once."""
        raise NotImplementedError("a cluster's client that blocks has no pipelines; use connect()")

    def close(self) -> None:
        """Close all connections to all nodes."""
        with self._lock:
            nodes, self._nodes = self._nodes, {}
        for node in nodes.values():
            node.close()

    def _refresh(self) -> None:
        with self._lock:
            failure: Exception | None = None
            for address in self._map.to_ask() if self._map.doubtful else ():
                try:
                    reply = self._node(address).execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]
                except DOUBTFUL as error:
                    failure = error
                    continue
                self._map.read(reply, address)
                for unknown in self._nodes.keys() - self._map.known:
                    self._nodes.pop(unknown).close()
                return
            if failure is not None:
                raise failure

    def _node(self, address: Address) -> redis.Redis:
        with self._lock:
            if (node := self._nodes.get(address)) is None:
                node = self._nodes[address] = self._open_node(address)
            return node


async def _send_all(node: redis.asyncio.Redis, commands: Sequence[Command], *, asking: bool) -> list[Any]:
    """Send commands in one trip. ASKING holds for the next command, or for the whole transaction that it begins."""
    pipe = node.pipeline(transaction=False)
    for args, options in commands:
        if asking and (args[0] == "MULTI" or commands[0][0][0] != "MULTI"):
            pipe.command_stack.append((("ASKING",), {}))
        pipe.command_stack.append((args, dict(options)))
    sent = [args[0] for args, _ in pipe.command_stack]
    replies = await pipe.execute(raise_on_error=False)
    return [reply for name, reply in zip(sent, replies, strict=True) if name != "ASKING"]


def _key_of_all(commands: Sequence[Command]) -> bytes | None:
    return next((key for args, _ in commands if (key := key_of(args)) is not None), None)
