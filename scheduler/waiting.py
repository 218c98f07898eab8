"""Waiting: how a client learns that its jobs have ended, and gets their deltas on the way.

A `Listener` is the one ear of a client in one queue, however many jobs it waits for. It reads the client's inbox with
one blocking connection from before the first job is sent, so nothing is said before it listens. The inbox only rings:
a job's record is the truth, is read when the inbox says so, and is read every few seconds in any case, so that a ring
that was lost costs seconds and never an answer (F-120). Whatever happens, a wait ends (G13): with the record of a job
that ended, or as lost. A job that nobody takes in time is ended from here, since no worker may live to do it.

While Redis is away, a wait goes on; how long, the caller decides.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
import weakref
from collections.abc import Coroutine, Iterable, Iterator, Mapping
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import RedisClusterException, RedisError

from llmq.scheduler.deltas import DeltaOrder
from llmq.scheduler.errors import EncodingError, LLMQError
from llmq.scheduler.inbox import decode_deltas
from llmq.scheduler.job_record import NEVER_MS, JobRecord, record_of
from llmq.scheduler.queue import Queue
from llmq.scheduler.state import JobState

#: How long one read of the inbox blocks. A connection that died in silence is noticed within about twice this.
BLOCK_S = 2.0

#: Entries of the inbox taken at once.
READ_COUNT = 1000

#: Between two looks at a record while nothing rings; and so many records a second, that 10,000 waits stay cheap.
LOOK_AGAIN_S = 2.0
LOOKS_PER_SECOND = 1000

#: The inbox does not ring for a job that another client submitted: its record is looked at sooner, then less often.
FOREIGN_LOOK_S = 0.1

#: A moment for workers to end a job whose time is over, before the one who waits does.
OVERDUE_GRACE_S = 0.5

#: Records read in one trip: their answers may be large, their states are not.
RECORDS_AT_ONCE = 64
STATES_AT_ONCE = 500

#: Pauses while Redis is away.
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0

#: The shortest pause between two scans of all waits.
TICK_S = 0.1

#: What says that Redis is away, or cannot be used now.
AWAY = (RedisError, RedisClusterException, OSError)


class Watch:
    """One job that somebody may wait for; it lives as long as the handle that holds it."""

    __slots__ = (
        "__weakref__", "_ended", "failure", "foreign", "job_id", "look_at", "looks", "news", "order", "overdue_at",
        "record", "rung", "streams", "waiters",
    )  # fmt: skip

    def __init__(self, job_id: str, *, foreign: bool, overdue_at: float) -> None:
        self.job_id = job_id
        self.foreign = foreign
        self.overdue_at = overdue_at
        """When its time in the queue is over, on the monotonic clock; infinity where that is not known, or never."""
        self.look_at = 0.0
        self.looks = 0
        self.waiters = 0
        self.streams = 0
        self.rung = False
        self.record: JobRecord | None = None
        self.failure: BaseException | None = None
        self.order = DeltaOrder()
        self.news = asyncio.Event()
        self._ended = asyncio.Event()

    @property
    def over(self) -> bool:
        """Whether the wait is over."""
        return self._ended.is_set()

    def end(self, record: JobRecord | None, failure: BaseException | None = None) -> None:
        """End the wait: with the job's record (None: the job is lost), or with what ended the listener."""
        self.record, self.failure = record, failure
        self._ended.set()
        self.news.set()

    async def ended(self) -> JobRecord | None:
        """Wait for the end; return the record, None for a job that is lost."""
        await self._ended.wait()
        if self.failure is not None:
            raise self.failure
        return self.record


class Listener:
    """The ear of one client in one queue. `reader` is a connection of its own, for the read that blocks.

    Both clients belong to the caller, who closes the listener before them.
    """

    def __init__(self, queue: Queue, reader: Redis, client_id: str) -> None:
        self.queue = queue
        self.client_id = client_id
        self._reader = reader
        self._inbox = queue.keys.inbox(client_id)
        self._watches: weakref.WeakValueDictionary[str, Watch] = weakref.WeakValueDictionary()
        self._rung: list[Watch] = []
        self._wake = asyncio.Event()
        self._scan_at = math.inf
        self._tasks: list[asyncio.Task[None]] = []

    def watch(self, job_id: str, *, foreign: bool, ttl: float | None = None) -> Watch:
        """Listen for a job from now on: before it is sent, or (`foreign`) one that somebody else has sent.

        `ttl` is its longest time in the queue in seconds where that is known.
        """
        if (known := self._watches.get(job_id)) is not None:
            return known
        self._start()
        overdue_at = time.monotonic() + ttl + OVERDUE_GRACE_S if ttl else math.inf
        watch = self._watches[job_id] = Watch(job_id, foreign=foreign, overdue_at=overdue_at)
        return watch

    async def wait(self, watch: Watch) -> JobRecord | None:
        """Wait until a job has ended, for ever if need be; return its record, None for one that is lost."""
        with self.waiting(watch):
            return await watch.ended()

    def waiting(self, watch: Watch) -> _Waiting:
        """Return the context in which records of a job are looked at, because somebody waits for it."""
        return _Waiting(self, watch)

    async def close(self) -> None:
        """Stop listening, and take the inbox away; waits that are left end with an LLMQError."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for watch in list(self._watches.values()):
            if not watch.over:
                watch.end(None, LLMQError(f"the client was closed while job {watch.job_id} was waited for"))
        if self._tasks:
            try:
                async with asyncio.timeout(1):
                    await self.queue.redis.delete(self._inbox)
            except (*AWAY, TimeoutError):
                pass  # it has a TTL

    def begin(self, watch: Watch) -> None:
        """Somebody waits for the job: look at its record when it is due, or now where the inbox has rung already."""
        watch.waiters += 1
        if watch.over:
            return
        if watch.rung:
            self._ring(watch)
            return
        pause = 0.0 if watch.foreign else self._pause(watch)
        watch.look_at = min(time.monotonic() + pause, watch.overdue_at)
        self._scan_no_later_than(watch.look_at)

    def _start(self) -> None:
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._guard(part)) for part in (self._read(), self._look())]

    async def _guard(self, part: Coroutine[Any, Any, None]) -> None:
        """Run a loop; what ends it ends every wait, instead of leaving them without an ear (F-046)."""
        try:
            await part
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            for watch in list(self._watches.values()):
                if not watch.over:
                    watch.end(None, error)
            raise

    # --- the inbox --------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        last, pauses = b"0-0", _Pauses()
        while True:
            try:
                if pauses.count:
                    last = await self._resume_from(last)
                    self._look_at_all()
                    pauses.reset()
                reply = await cast(Any, self._reader).xread(
                    {self._inbox: last}, count=READ_COUNT, block=round(BLOCK_S * 1000)
                )
            except AWAY:
                await pauses.wait()
                continue
            for _, entries in reply or ():
                for entry, fields in entries:
                    last = entry
                    self._hear(fields)

    async def _resume_from(self, last: bytes) -> bytes:
        """After a break: a Redis that came back empty, or another one, may count from an earlier time."""
        newest = await cast(Any, self._reader).xrevrange(self._inbox, count=1)
        return last if newest and _entry_order(newest[0][0]) >= _entry_order(last) else b"0-0"

    def _hear(self, fields: Mapping[bytes, bytes]) -> None:
        if fields.get(b"t") == b"e":
            watch = self._watches.get(fields.get(b"j", b"").decode())
            if watch is not None and not watch.over:
                watch.rung = True
                if watch.waiters:
                    self._ring(watch)
            return
        try:
            deltas = decode_deltas(fields.get(b"d", b""))
        except EncodingError:
            return  # of a newer llmq; the end brings the whole answer
        for delta in deltas:
            if (watch := self._watches.get(delta.job_id)) is not None:
                watch.order.add(delta)
                watch.news.set()

    # --- the records ------------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        pauses = _Pauses()
        while True:
            self._wake.clear()
            try:
                await self._look_once()
            except AWAY:
                await pauses.wait()
                continue
            pauses.reset()
            try:
                async with asyncio.timeout(max(0.0, self._scan_at - time.monotonic())):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _look_once(self) -> None:
        rung, self._rung = self._rung, []
        try:
            if time.monotonic() >= self._scan_at:
                rung += await self._scan()
            await self._records(rung)
        except AWAY:
            self._rung += [watch for watch in rung if not watch.over]
            raise

    async def _scan(self) -> list[Watch]:
        """Look at the jobs that are due for it; return those whose record is to be read."""
        now = time.monotonic()
        due = [watch for watch in self._waited_for() if watch.look_at <= now]
        for watch in due:
            watch.look_at = min(now + self._pause(watch), max(now + TICK_S, watch.overdue_at))
        self._scan_at = math.inf
        try:
            return await self._states(due)
        finally:
            next_look = min((watch.look_at for watch in self._waited_for()), default=math.inf)
            self._scan_no_later_than(max(next_look, time.monotonic() + TICK_S))

    async def _states(self, watches: list[Watch]) -> list[Watch]:
        """Look whether jobs have ended; return those whose record is to be read."""
        ended: list[Watch] = []
        for some in _chunks(watches, STATES_AT_ONCE):
            pipe = self.queue.redis.pipeline(transaction=False)
            for watch in some:
                pipe.hmget(self.queue.keys.job(watch.job_id), "entry", "state", "submitted_at", "expires_at")
            for watch, (entry, state, submitted_at, expires_at) in zip(some, await pipe.execute(), strict=True):
                over = entry is None or state is not None
                if over or await self._is_overdue(watch, float(submitted_at), float(expires_at)):
                    ended.append(watch)
        return ended

    async def _is_overdue(self, watch: Watch, submitted_ms: float, expires_ms: float) -> bool:
        """Whether a job waited longer than it may, and was ended for it. Redis' clock decides, not ours."""
        if expires_ms >= NEVER_MS:
            return False
        if watch.overdue_at == math.inf:
            # Until when, by our clock: at the latest its whole time from now on.
            left_s = min(expires_ms - submitted_ms, expires_ms - time.time() * 1000) / 1000
            watch.overdue_at = time.monotonic() + max(0.0, left_s) + OVERDUE_GRACE_S
            watch.look_at = min(watch.look_at, watch.overdue_at)
        if time.monotonic() < watch.overdue_at:
            return False
        # It runs, or our clock is ahead: there is time to look again.
        watch.overdue_at = time.monotonic() + LOOK_AGAIN_S
        return await self.queue.end_overdue(watch.job_id)

    async def _records(self, watches: list[Watch]) -> None:
        """Read the records of jobs that have ended, and end the waits for them."""
        for some in _chunks(list(dict.fromkeys(watches)), RECORDS_AT_ONCE):
            pipe = self.queue.redis.pipeline(transaction=False)
            for watch in some:
                pipe.hgetall(self.queue.keys.job(watch.job_id))
            for watch, fields in zip(some, await pipe.execute(), strict=True):
                watch.rung = False
                if not fields.get(b"entry"):
                    watch.end(None)
                elif fields.get(b"state"):
                    record = record_of(watch.job_id, fields)
                    watch.end(None if record.state is JobState.LOST else record)
                # else: a ring of a delivery that ended nothing; the record is looked at again

    def _waited_for(self) -> Iterator[Watch]:
        return (watch for watch in list(self._watches.values()) if watch.waiters and not watch.over)

    def _pause(self, watch: Watch) -> float:
        """Return how long to wait before the next look at a record."""
        watch.looks += 1
        longest = max(LOOK_AGAIN_S, len(self._watches) / LOOKS_PER_SECOND)
        pause = min(longest, FOREIGN_LOOK_S * 1.5**watch.looks) if watch.foreign else longest
        return pause * (0.9 + random.random() / 5)  # so that not all of them are due at once

    def _ring(self, watch: Watch) -> None:
        self._rung.append(watch)
        self._wake.set()

    def _look_at_all(self) -> None:
        for watch in self._waited_for():
            watch.look_at = 0.0
        self._scan_no_later_than(0.0)

    def _scan_no_later_than(self, moment: float) -> None:
        if moment < self._scan_at:
            self._scan_at = moment
            self._wake.set()


class _Waiting:
    """Somebody waits for a job, within this context."""

    def __init__(self, listener: Listener, watch: Watch) -> None:
        self._listener = listener
        self._watch = watch

    def __enter__(self) -> None:
        self._listener.begin(self._watch)

    def __exit__(self, *error: object) -> None:
        self._watch.waiters -= 1


class _Pauses:
    """Pauses that double while something fails."""

    def __init__(self) -> None:
        self.count = 0

    async def wait(self) -> None:
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**self.count)
        self.count = min(self.count + 1, 16)
        await asyncio.sleep(pause * (1 + random.random() / 2))

    def reset(self) -> None:
        self.count = 0


def _chunks(watches: list[Watch], size: int) -> Iterable[list[Watch]]:
    return (watches[first : first + size] for first in range(0, len(watches), size))


def _entry_order(entry: bytes) -> tuple[int, int]:
    milliseconds, _, number = entry.partition(b"-")
    return int(milliseconds), int(number)
