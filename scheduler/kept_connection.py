"""A connection that is kept: a command is written at once, and its reply is read where it comes.

redis-py opens the connection, with all that a URL asks for; then it is taken over, transport and all. Through its
own layers (a stream of bytes, a parser and three coroutines a reply, a task woken by each) a trip takes twice the CPU,
and the trips are what a request and a token cost. Closing it is redis-py's again.

What is promised is the same: nothing is sent twice, a reply is waited for as long as the client says, a primary
that became a replica is left, and an error of the connection is one of redis-py's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import hiredis
from redis import exceptions

from llmq.scheduler.connection import HEALTH_CHECK_S, PrimaryDemoted
from llmq.scheduler.route import told_apart

_MORE: Final = object()


class KeptConnection(asyncio.Protocol):
    """A connection of a client's pool that is up, and has nothing on its way. One exchange at a time."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self._lost = False
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport = connection._writer.transport
        self._before = self._transport.get_protocol()
        self._timeout: float | None = connection.socket_timeout
        self._reader = hiredis.Reader(
            protocolError=exceptions.InvalidResponse, replyError=connection._parser.parse_error, notEnoughData=_MORE
        )
        self._waiter: asyncio.Future[list[Any]] | None = None
        self._replies: list[Any] = []
        self._wanted = 0
        # It may have lain in the pool for long; redis-py knows when it was last of use.
        self._asked_at: float = connection.next_health_check - connection.health_check_interval
        self._timer: asyncio.TimerHandle | None = None
        self._transport.set_protocol(self)

    @property
    def lost(self) -> bool:
        """Whether it can be used no more; a transport that is being closed tells its protocol later."""
        return self._lost or self._transport.is_closing()

    @property
    def doubtful(self) -> bool:
        """Whether it has been idle for so long that it is to be tried with PING before a command is trusted to it."""
        return self._loop.time() - self._asked_at > HEALTH_CHECK_S

    def exchange(self, commands: Sequence[tuple[Any, ...]]) -> asyncio.Future[list[Any]]:
        """Send commands together; return what becomes their replies, errors of the server among them.

        It fails with an error of the connection, or of a server that is none to talk to; then, and where it is
        cancelled, the connection is `lost`.
        """
        pack = self.connection.pack_command
        parts = [part for command in commands for part in pack(*command)]
        waiter = self._waiter = self._loop.create_future()
        if self.lost:
            waiter.set_exception(exceptions.ConnectionError("the connection was lost"))
            return waiter
        self._replies, self._wanted, self._asked_at = [], len(commands), self._loop.time()
        if self._timer is None and self._timeout is not None:
            self._timer = self._loop.call_later(self._timeout, self._look)
        self._transport.writelines(parts)
        return waiter

    # --- what the loop calls ------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Bytes of replies have come."""
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not _MORE:
                # What a server says by itself in RESP3 is no reply; nobody here has asked for any of it.
                if not isinstance(reply, hiredis.PushNotification):
                    self._take(reply)
        except exceptions.InvalidResponse as error:
            self._fail(error)

    def resume_writing(self) -> None:
        """A large command has been sent: from now on its reply is waited for."""
        self._asked_at = self._loop.time()

    def eof_received(self) -> None:
        """The server has closed it."""
        self._fail(exceptions.ConnectionError("the server closed the connection"))

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone; redis-py waits for its own protocol to hear of that."""
        self._fail(exceptions.ConnectionError(str(exc) if exc else "the server closed the connection"))
        if self._timer is not None:
            self._timer.cancel()
        self._before.connection_lost(exc)

    # ------------------------------------------------------------------------------------------------------------------

    def _take(self, reply: Any) -> None:
        waiter = self._waiter
        if waiter is None or waiter.done():  # of a command that nobody waits for any more
            self._fail(exceptions.ConnectionError("a reply came that nobody waits for"))
            return
        if isinstance(reply, Exception):
            if isinstance(reply, exceptions.ReadOnlyError):
                self._fail(PrimaryDemoted(f"READONLY {reply}"))
                return
            if not isinstance(reply, exceptions.ResponseError):
                self._fail(reply)
                return
            reply = told_apart(reply)
        self._replies.append(reply)
        if len(self._replies) == self._wanted:
            self._waiter = None
            waiter.set_result(self._replies)

    def _fail(self, error: Exception) -> None:
        self._lost = True
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)
        self._transport.close()

    def _look(self) -> None:
        """Give up a reply that is overdue. One timer serves many exchanges, since few replies are."""
        self._timer = None
        if self._waiter is None or self._timeout is None:
            return
        left = self._asked_at + self._timeout - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self._fail(exceptions.TimeoutError(f"no reply came within {self._timeout:g} s"))
