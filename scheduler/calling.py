"""Calling over connections that are kept: the hot path of submit, bell, claim, deltas and ends.

redis-py takes a connection from its pool for each command, looks whether it can still be used, and gives it back, with
locks, timers and records of its own around it. That takes a producer as long as all else that it does for a submit, and
stands between a bell and the claim. Here connections stay in hand between calls, and several calls are one packet.
What is called is the same, with the same errors; nothing is sent twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import redis
import redis.asyncio
from redis.exceptions import NoScriptError, ResponseError

from llmq.scheduler import scripts
from llmq.scheduler.connection import SendsAtOnce
from llmq.scheduler.kept_connection import KeptConnection
from llmq.scheduler.routed import Routed
from llmq.scheduler.scripts import Call

T = TypeVar("T")

#: Connections that are kept of one pool; calls above so many at once take theirs from it as any command does.
MOST_KEPT = 4

#: Before 5.3 redis-py wanted to know for which command a connection is taken, and made no use of it.
_FOR: tuple[str, ...] = ("EVALSHA",) if redis.VERSION < (5, 3) else ()


class KeptConnections:
    """Connections of a client's pool that stay in hand between commands; they are closed with the client.

    Of several servers (Sentinel, Cluster) the right one is found for each command: there none is kept.
    """

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._kept: list[KeptConnection] = []
        ours = issubclass(client.connection_pool.connection_class, SendsAtOnce)
        self._left = MOST_KEPT if ours and not isinstance(client, Routed) else 0

    async def run(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Run plain commands in one trip, the client's own way where no connection is free; raises the first error.

        Replies come as the server sends them or as the client shapes them: read pairs with `as_map`.
        """
        if self.one_is_free:
            replies = await self.exchange(commands)
        elif len(commands) == 1:
            replies = [await self._client.execute_command(*commands[0])]  # type: ignore[no-untyped-call]
        else:
            pipe = self._client.pipeline(transaction=False)
            for command in commands:
                pipe.execute_command(*command)
            replies = await pipe.execute(raise_on_error=False)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    @property
    def one_is_free(self) -> bool:
        """Whether there is a connection for `exchange` now."""
        return bool(self._kept or self._left)

    async def exchange(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send commands together (one at least) and return their replies, errors of the server among them."""
        kept = await self._take()
        replies = await self._ask(kept, commands)
        self._kept.append(kept)
        return replies

    async def _ask(self, kept: KeptConnection, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        try:
            return await kept.exchange(commands)
        except BaseException:  # also a cancel: a reply that was not read may not be taken for the next one
            await self._give_back(kept)
            raise

    async def _take(self) -> KeptConnection:
        while self._kept and self._kept[-1].lost:
            await self._give_back(self._kept.pop())
        kept = self._kept.pop() if self._kept else await self._take_over()
        if kept.doubtful:
            await self._ask(kept, [("PING",)])
        return kept

    async def _take_over(self) -> KeptConnection:
        self._left -= 1
        try:
            return KeptConnection(
                await self._client.connection_pool.get_connection(*_FOR)  # type: ignore[no-untyped-call]
            )
        except BaseException:
            self._left += 1
            raise

    async def _give_back(self, kept: KeptConnection) -> None:
        """Let the pool have a connection that can be used no more."""
        try:
            await kept.connection.disconnect(nowait=True)
            await self._client.connection_pool.release(kept.connection)
        finally:
            self._left += 1  # only now: who comes meanwhile may not take its place


def as_map(reply: Any) -> dict[Any, Any]:
    """Return pairs as a map: a server tells them one after the other, in RESP3 and from a client as a map."""
    return reply if isinstance(reply, dict) else dict(zip(reply[::2], reply[1::2], strict=True))


class ScriptCalls:
    """Calls scripts for whoever holds it; make one for a client, not for a call: it keeps connections of its pool.

    Where none can be kept, every call goes the client's own way.
    """

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self.connections = KeptConnections(client)
        """The connections that it keeps, for others who call much over the same client."""

    async def run(self, call: Call[T]) -> T:
        """Make one call; as `scripts.run`."""
        if not self.connections.one_is_free:
            return await scripts.run(self._client, call)
        (reply,) = await self.connections.exchange([_command(call)])
        if isinstance(reply, NoScriptError):
            return await scripts.run(self._client, call)
        if isinstance(reply, Exception):
            raise reply
        return call.read(reply)

    async def run_all(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Make several calls in one trip; as `scripts.run_all`."""
        if len(calls) == 1:
            return [await self.run(calls[0])]
        if not self.connections.one_is_free:
            return await scripts.run_all(self._client, calls)
        replies = await self.connections.exchange([_command(call) for call in calls])
        for position, (call, reply) in enumerate(zip(calls, replies, strict=True)):
            if isinstance(reply, NoScriptError):  # it did not run: sending it again is safe
                replies[position] = await self._load(call)
            elif not isinstance(reply, Exception):
                replies[position] = call.read(reply)
        return replies

    async def _load(self, call: Call[Any]) -> Any:
        try:
            return await scripts.run(self._client, call)
        except ResponseError as error:
            return error


def _command(call: Call[Any]) -> tuple[Any, ...]:
    return "EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.argv
