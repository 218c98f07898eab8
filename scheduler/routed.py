"""Clients of several servers: each command goes to the primary that holds its key, and follows when that changes.

For Sentinel and Cluster alike; who is primary, a map knows (`route.py`), and a *guide* is who tells it: a sentinel, or
any node of the cluster. A primary is an ordinary client of `connection.py`, so that all topologies share one kind of
connection. Only what a server says that it has *not run* (MOVED, ASK, TRYAGAIN) is sent again. An error of a connection
is the caller's, as on one server; it makes the map doubtful, and the next command asks the guides first.

redis-py has such clients; these are in their place because its cluster client sends commands again on its own (a second
job), gives ASKING and the command that it is for to different connections, cannot do MULTI before redis-py 6, and uses
connections that swallow cancellations; and because its Sentinel pool asks for the primary only when it connects.

The keys of a pipeline belong to one queue, hence to one primary. Replicas are never read: they lag.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import redis.asyncio
from redis import exceptions
from redis.asyncio.client import Pipeline

from llmq.scheduler.route import DOUBTFUL, NOT_RUN, Address, Attempt, Map, key_of
from llmq.scheduler.tasks import end_tasks

T = TypeVar("T")

#: A command as pipelines of redis-py hold it.
Command = tuple[tuple[Any, ...], dict[str, Any]]


class Routed(redis.asyncio.Redis):
    """A client of several servers; `open_node` makes the client of one, `open_guide` of one that tells the map."""

    def __init__(
        self,
        primaries: Map,
        open_node: Callable[[Address], redis.asyncio.Redis],
        open_guide: Callable[[Address], redis.asyncio.Redis] | None = None,
    ) -> None:
        self._map = primaries
        self._open_node = open_node
        self._nodes: dict[Address, redis.asyncio.Redis] = {}
        self._guides = {address: open_guide(address) for address in primaries.guides()} if open_guide else {}
        self._asking: asyncio.Task[None] | None = None
        # What commands need to know of a connection (encoding, shapes of replies) is the same for all nodes; this one
        # is never connected.
        super().__init__(connection_pool=open_node(primaries.guides()[0]).connection_pool)

    @property
    def is_cluster(self) -> bool:
        """Whether it is of a cluster."""
        return self._map.cluster

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
        return _RoutedPipeline(self, transaction, shard_hint)

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
        """Close all connections to all servers."""
        if self._asking is not None:
            await end_tasks(self._asking)
        nodes, self._nodes = self._nodes, {}
        for node in (*nodes.values(), *self._guides.values()):
            await node.aclose()

    async def _routed(self, key: bytes | None, send: Callable[[redis.asyncio.Redis, bool], Awaitable[T]]) -> T:
        attempt = Attempt(self._map, key)
        while True:
            if self._map.doubtful:
                await self._refresh()
            elif self._map.due:
                self._ask()  # beside the command: what fails shows when it is needed
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
        """Ask for the map if that is needed; raises what the last guide answered where none tells."""
        if self._map.doubtful:
            # Shielded: it is asked for everybody who waits, and they hear of one failure together.
            await asyncio.shield(self._ask())

    def _ask(self) -> asyncio.Task[None]:
        """Have the map asked for; several that want it share one."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._read_map())
            # Those that wait for it may have left by then: nobody need hear of its failure.
            self._asking.add_done_callback(lambda asking: asking.cancelled() or asking.exception())
        return self._asking

    async def _read_map(self) -> None:
        failure: Exception = exceptions.ConnectionError("nobody is there to ask which server is the primary")
        told: dict[Address, Any] = {}
        for guide in self._map.guides():
            asked = self._guides.get(guide) or self._node(guide)
            try:
                reply = await asked.execute_command(*self._map.question)  # type: ignore[no-untyped-call]
                self._map.read(reply, guide)
                if (named := self._map.named) is not None:
                    if named not in told:
                        told[named] = await self._role_of(named)
                    self._map.proved(told[named])
            except DOUBTFUL as error:
                self._map.doubt(guide)
                failure = error
                continue
            await self._close_unknown()
            return
        raise failure

    async def _role_of(self, named: Address) -> Any:
        """Return what a server says of its role; the error of one that does not answer, None where it may not say."""
        try:
            return await self._node(named).execute_command(*self._map.proof)  # type: ignore[no-untyped-call]
        except DOUBTFUL as error:
            self._map.doubt(named)
            return error
        except exceptions.ResponseError:
            return None

    async def _close_unknown(self) -> None:
        # Kept, with its connections closed: a command that is on its way to it may yet open one, which must end, too.
        for address in self._nodes.keys() - self._map.known:
            await self._nodes[address].connection_pool.disconnect()

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


class _RoutedPipeline(Pipeline):
    """Gathers commands as redis-py's pipeline does, and has them run where their keys are."""

    def __init__(self, client: Routed, transaction: bool, shard_hint: str | None) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction, shard_hint)
        self._client = client

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        commands: list[Command] = [(args, dict(options)) for args, options in self.command_stack]
        self.command_stack = []
        if not commands:
            return []
        run = self._client.transact if self.is_transaction else self._client.run_all
        replies = await run(commands)
        if raise_on_error:
            self.raise_first_error(list(commands), replies)
        return replies


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
