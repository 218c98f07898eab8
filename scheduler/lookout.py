"""The lookout: reads the records of jobs that are waited for, when the inbox rings and every few seconds in any case.

A job's record is the truth about its end; the inbox only says when to look. So a ring that was lost costs seconds and
never an answer (F-120). A job that nobody took in time is ended from here, since no worker may live to do it (G13).
What is read is one trip for many jobs, so that 10,000 waits cost Redis about a thousand small reads a second.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
import weakref
from collections.abc import Iterable, Iterator

from redis.exceptions import RedisClusterException, RedisError

from llmq.scheduler.calling import KeptConnections, as_map
from llmq.scheduler.job_record import NEVER_MS, expires_at_ms, record_of, submitted_at_ms
from llmq.scheduler.outage import Pause
from llmq.scheduler.queue import Queue
from llmq.scheduler.state import JobState
from llmq.scheduler.watch import Watch

#: Between two looks at a record while nothing rings; and so many records a second, that many waits stay cheap.
LOOK_AGAIN_S = 2.0
LOOKS_PER_SECOND = 1000

#: A look may overtake what the inbox still has to tell of a job: its last deltas, and its end. So long they may take.
CATCH_UP_S = 0.25

#: The inbox does not ring for a job that another client submitted: its record is looked at sooner, then less often.
FOREIGN_LOOK_S = 0.1

#: Looks at the record of a job that may wait for ever, after which it is made sure that its entry is there: half a
#: minute, since to see an entry is to read the whole job.
LOOKS_UNTIL_SOUGHT = 16

#: A moment for workers to end a job whose time is over, before the one who waits does.
OVERDUE_GRACE_S = 0.5

#: Records read in one trip: their answers may be large, their states are not.
RECORDS_AT_ONCE = 64
STATES_AT_ONCE = 500

#: The shortest pause between two scans of all waits.
TICK_S = 0.1

#: What says that Redis is away, or cannot be used now. (A TimeoutError is an OSError.)
AWAY = (RedisError, RedisClusterException, OSError)


class Lookout:
    """Looks at the records of `watches` (job id -> watch), those that somebody waits for."""

    def __init__(self, queue: Queue, watches: weakref.WeakValueDictionary[str, Watch]) -> None:
        self._queue = queue
        # A client of many queues has one lookout for each: connections of their own would use up its pool.
        self._connections = queue.calls.connections if queue.calls else KeptConnections(queue.redis)
        self._watches = watches
        self._rung: list[Watch] = []
        self._wake = asyncio.Event()
        self._scan_at = math.inf

    def begin(self, watch: Watch) -> None:
        """Somebody waits for the job from now on: look at its record when it is due, or now if the inbox has rung."""
        if watch.over:
            return
        if watch.rung:
            self.ring(watch)
            return
        pause = 0.0 if watch.foreign else self._pause(watch)
        watch.look_at = min(time.monotonic() + pause, watch.overdue_at)
        self._scan_no_later_than(watch.look_at)

    def ring(self, watch: Watch) -> None:
        """Look at a record now: the job has ended."""
        self._rung.append(watch)
        self._wake.set()

    def heard(self, watches: Iterable[Watch]) -> None:
        """Put a look off: the inbox has just told of these jobs, so that they run, and are this client's own."""
        later = time.monotonic() + LOOK_AGAIN_S
        for watch in watches:
            watch.foreign = False
            if watch.look_at < later:
                watch.look_at = later

    def look_at_all(self) -> None:
        """Look at all records now: what rang may not have been heard."""
        for watch in self._waited_for():
            watch.look_at = 0.0
        self._scan_no_later_than(0.0)

    async def looks(self) -> None:
        """Look until cancelled. While Redis is away it is tried again and again."""
        pause = Pause()
        while True:
            self._wake.clear()
            try:
                await self._look()
            except AWAY:
                await pause()
                continue
            pause.reset()
            try:
                async with asyncio.timeout(max(0.0, self._scan_at - time.monotonic())):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def _look(self) -> None:
        rung, self._rung = self._rung, []
        try:
            if time.monotonic() >= self._scan_at:
                rung += await self._scan()
            await self._read(rung)
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
            return await self._ended(due)
        finally:
            next_look = min((watch.look_at for watch in self._waited_for()), default=math.inf)
            self._scan_no_later_than(max(next_look, time.monotonic() + TICK_S))

    async def _ended(self, watches: list[Watch]) -> list[Watch]:
        """Return the jobs that have ended, or are lost; those that nobody else will end are ended here."""
        ended: list[Watch] = []
        for some in _chunks(watches, STATES_AT_ONCE):
            fields = "entry", "state", "submitted_at", "expires_at"
            looks = [("HMGET", self._queue.keys.job(watch.job_id), *fields) for watch in some]
            found = await self._connections.run(*looks)
            for watch, (entry, state, submitted, expires) in zip(some, found, strict=True):
                over = entry is None or state is not None
                if over or await self._end(watch, submitted_at_ms(entry, submitted), expires_at_ms(expires)):
                    if entry is None or watch.foreign or watch.seen_ended:
                        ended.append(watch)
                    else:
                        watch.seen_ended, watch.look_at = True, time.monotonic() + CATCH_UP_S
        return ended

    async def _end(self, watch: Watch, submitted_ms: float, expires_ms: float) -> bool:
        """Whether a job waited longer than it may, or is lost, and was ended for it. Redis' clock decides, not ours."""
        if expires_ms >= NEVER_MS:
            return watch.looks % LOOKS_UNTIL_SOUGHT == 0 and await self._queue.end_lost(watch.job_id)
        if watch.overdue_at == math.inf:
            # Until when, by our clock: at the latest its whole time from now on.
            left_s = min(expires_ms - submitted_ms, expires_ms - time.time() * 1000) / 1000
            watch.overdue_at = time.monotonic() + max(0.0, left_s) + OVERDUE_GRACE_S
            watch.look_at = min(watch.look_at, watch.overdue_at)
        if time.monotonic() < watch.overdue_at:
            return False
        # It runs, or our clock is ahead: there is time to look again.
        watch.overdue_at = time.monotonic() + LOOK_AGAIN_S
        return await self._queue.end_overdue(watch.job_id)

    async def _read(self, watches: list[Watch]) -> None:
        """Read the records of jobs that have ended, and end the waits for them."""
        for some in _chunks(list(dict.fromkeys(watches)), RECORDS_AT_ONCE):
            found = await self._connections.run(*(("HGETALL", self._queue.keys.job(watch.job_id)) for watch in some))
            for watch, fields in zip(some, map(as_map, found), strict=True):
                watch.rung = False
                if not fields.get(b"entry"):
                    watch.end(None)
                elif fields.get(b"state"):
                    record = record_of(watch.job_id, fields, cipher=self._queue.cipher)
                    watch.end(None if record.state is JobState.LOST else record)
                # else: it rang for a delivery that ended nothing; the record is looked at again

    def _waited_for(self) -> Iterator[Watch]:
        # References, and not values: a thread that submits may add one in between.
        watches = [ref() for ref in self._watches.valuerefs()]
        return (watch for watch in watches if watch is not None and watch.waiters and not watch.over)

    def _pause(self, watch: Watch) -> float:
        """Return how long to wait before the next look at a record."""
        watch.looks += 1
        longest = max(LOOK_AGAIN_S, len(self._watches) / LOOKS_PER_SECOND)
        # Bounded before it is raised to: a wait of an hour would be a number that no float holds.
        pause = min(longest, FOREIGN_LOOK_S * 1.5 ** min(watch.looks, 50)) if watch.foreign else longest
        return pause * (0.9 + random.random() / 5)  # so that not all of them are due at once

    def _scan_no_later_than(self, moment: float) -> None:
        if moment < self._scan_at:
            self._scan_at = moment
            self._wake.set()


def _chunks(watches: list[Watch], size: int) -> Iterable[list[Watch]]:
    return (watches[first : first + size] for first in range(0, len(watches), size))
