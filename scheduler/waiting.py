"""Waiting: how a client learns that its jobs have ended, and gets their deltas on the way.

A `Listener` is the one ear of a client in one queue, however many jobs it waits for. It reads the client's inbox with
one blocking connection, from before the first job is sent, so that nothing is said before it listens. When the inbox
rings for a job, or has been silent for long, the job's record is read (`lookout.py`). Whatever happens, a wait ends
(G13): with the record of a job that ended, or as lost. While Redis is away a wait goes on; how long, the caller says.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import weakref
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any

from redis.asyncio import Redis

from llmq.scheduler.calling import KeptConnections, as_map
from llmq.scheduler.cipher import deltas_of
from llmq.scheduler.errors import EncodingError, KeyMissing, LLMQError
from llmq.scheduler.inbox import decode_deltas
from llmq.scheduler.job_record import JobRecord
from llmq.scheduler.lookout import AWAY, OVERDUE_GRACE_S, Lookout
from llmq.scheduler.outage import Pause
from llmq.scheduler.queue import Queue
from llmq.scheduler.tasks import end_tasks
from llmq.scheduler.watch import Watch

#: How long one read of the inbox blocks. A connection that died in silence is noticed within about twice this.
BLOCK_S = 2.0

#: Entries of the inbox taken at once.
READ_COUNT = 1000

#: How long closing waits for a Redis that may be away.
CLOSE_S = 1.0


class Listener:
    """The ear of one client in one queue. `reader` is a connection of its own, for the read that blocks.

    Both connections belong to the caller, who closes the listener before them.
    """

    def __init__(self, queue: Queue, reader: Redis, client_id: str) -> None:
        self.queue = queue
        self._connections = KeptConnections(reader)
        self._inbox = queue.keys.inbox(client_id)
        self._deltas_of = deltas_of(client_id)
        self._watches: weakref.WeakValueDictionary[str, Watch] = weakref.WeakValueDictionary()
        self._lookout = Lookout(queue, self._watches)
        self._tasks: list[asyncio.Task[None]] = []
        self.deaf_since: float | None = None
        """Since when nothing can be heard, on the monotonic clock: Redis is away; None: it is there."""

    def watch(self, job_id: str, *, foreign: bool, ttl: float | None = None, anew: bool = False) -> Watch:
        """Listen for a job from now on: before it is sent, or (`foreign`) one that somebody else has sent.

        `ttl` is its longest time in the queue in seconds where that is known. Nobody listens for a watch that nobody
        holds any more. Once it listens, other threads may call this, too, for jobs of their own. `anew`: a job of the
        same id that has ended is not the one that is meant.
        """
        if (known := self._watches.get(job_id)) is not None and not (anew and known.over):
            return known
        self.listen()
        overdue_at = time.monotonic() + ttl + OVERDUE_GRACE_S if ttl else math.inf
        watch = self._watches[job_id] = Watch(job_id, foreign=foreign, overdue_at=overdue_at)
        return watch

    def listen(self) -> None:
        """Begin to listen, if that is not done yet."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._guard(part)) for part in (self._reads(), self._lookout.looks())]

    async def broken(self) -> None:
        """Wait until it can listen no more, by a fault; raises what that was. Nothing but `close` ends it otherwise."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    @contextlib.contextmanager
    def waiting(self, watch: Watch) -> Iterator[None]:
        """Return the context in which the record of a job is looked at, because somebody waits for it."""
        watch.waiters += 1
        self._lookout.begin(watch)
        try:
            yield
        finally:
            watch.waiters -= 1

    async def wait(self, watch: Watch) -> JobRecord | None:
        """Wait until a job has ended, for ever if need be; return its record, None for one that is lost."""
        with self.waiting(watch):
            return await watch.ended()

    async def close(self) -> None:
        """Stop listening, and take the inbox away; waits that are left end with an LLMQError."""
        await end_tasks(*self._tasks)
        for watch in self._left():
            watch.end(None, LLMQError(f"the client was closed while job {watch.job_id} was waited for"))
        if self._tasks:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self.queue.redis.delete(self._inbox)
            except AWAY:
                pass  # it has a TTL

    async def _guard(self, part: Coroutine[Any, Any, None]) -> None:
        """Run a loop; what ends it ends every wait, instead of leaving them without an ear (F-046)."""
        try:
            await part
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            for watch in self._left():
                watch.end(None, error)
            raise

    async def _reads(self) -> None:
        last, pause, broken = b"0-0", Pause(), False
        while True:
            try:
                if broken:
                    last = await self._resume_from(last)
                    self._lookout.look_at_all()
                    broken = False
                    pause.reset()
                entries = await self._read_from(last)
            except AWAY:
                broken = True
                self.deaf_since = self.deaf_since or time.monotonic()
                await pause()
                continue
            self.deaf_since = None
            told: set[Watch] = set()
            for entry, fields in entries:
                last = entry
                self._hear(fields, told)
            # What came together is told together; ends have told themselves.
            for watch in told:
                watch.tell()
            self._lookout.heard(told)

    async def _read_from(self, last: bytes) -> list[tuple[bytes, Mapping[bytes, bytes]]]:
        """Return the entries after `last`; none where none came in a while."""
        block = round(BLOCK_S * 1000)
        (reply,) = await self._connections.run(
            ("XREAD", "COUNT", READ_COUNT, "BLOCK", block, "STREAMS", self._inbox, last)
        )
        if not reply:
            return []
        # The one stream: a pair in a list, or with RESP3 in a map.
        entries = next(iter(reply.values())) if isinstance(reply, dict) else reply[0][1]
        return [(entry, as_map(fields)) for entry, fields in entries]

    async def _resume_from(self, last: bytes) -> bytes:
        """After a break: a Redis that came back empty, or another one, may count from an earlier time."""
        # On the connection that is kept: the reader has no other.
        (newest,) = await self._connections.run(("XREVRANGE", self._inbox, "+", "-", "COUNT", 1))
        return last if newest and _order(newest[0][0]) >= _order(last) else b"0-0"

    def _hear(self, fields: Mapping[bytes, bytes], told: set[Watch]) -> None:
        """Take one entry in; add to `told` who has deltas to be told of."""
        if fields.get(b"t") == b"e":
            self._hear_end(fields.get(b"j", b"").decode(errors="replace"))
            return
        try:
            arrived = decode_deltas(self.queue.cipher.decrypt(fields.get(b"d", b""), self._deltas_of))
        except (EncodingError, KeyMissing):
            return  # of a newer llmq, or with another key; the end brings the whole answer, or says what is wrong
        for delta in arrived:
            if (watch := self._watches.get(delta.job_id)) is not None:
                watch.order.add(delta)
                told.add(watch)

    def _hear_end(self, job_id: str) -> None:
        watch = self._watches.get(job_id)
        if watch is not None and not watch.over:
            watch.rung = True
            if watch.waiters:
                self._lookout.ring(watch)

    def _left(self) -> list[Watch]:
        # References, and not values: a thread that submits may add one in between.
        watches = [ref() for ref in self._watches.valuerefs()]
        return [watch for watch in watches if watch is not None and not watch.over]


def _order(entry: bytes) -> tuple[int, int]:
    milliseconds, _, number = entry.partition(b"-")
    return int(milliseconds), int(number)
