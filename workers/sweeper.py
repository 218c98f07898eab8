"""The sweeper: gives away what gone workers held, and ends what has to end.

Every worker has one; one at a time sweeps. It reclaims jobs whose lease ran out, ends lines of batches that were
cancelled or are over their window, and keeps house (dead letters older than 30 days, consumers of gone workers, the
plan of day and night rates). It never sweeps before one full lease of unbroken contact with the same server (G4).
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Set
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from llmq.scheduler import scripts
from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.lease import Lease, Outcome, batch_of
from llmq.scheduler.logs import Event, note
from llmq.scheduler.queue import Queue
from llmq.scheduler.server_check import run_id_of
from llmq.scheduler.stored_number import whole
from llmq.workers.contact import Contact
from llmq.workers.desk import VERDICTS
from llmq.workers.fleet_watch import FleetWatch
from llmq.workers.keeper import HEARTBEAT_TTL_S
from llmq.workers.reach import OUT_OF_REACH

#: A step that Redis comes to later than this does nothing: the server may have hung since contact was judged.
LATE_MS = 1000

#: Up to this many lanes are all visited in every sweep; more only while a worker is missing, and once a minute.
FEW_LANES = 100
FULL_SWEEP_S = 60.0

#: The self-check of the counts is one script over all lanes: about 2 us each, and Lua passes no more than 8,000 values.
MOST_LANES_COUNTED = 5000

#: However long the lease, cancelled batches are ended this soon.
LONGEST_INTERVAL_S = 2.5

#: Records of batches read in one trip.
BATCHES_AT_ONCE = 500

DEAD_LETTERS_KEPT_MS = 30 * 24 * 3600 * 1000

#: While the leases of a missing worker run out, and for a little longer, sweeps come this often.
HURRY_S = 1.0
HURRY_UNTIL_S = 5.0

#: Steps of one reap before other lanes get their turn: about 20 x 3 ms of Redis' time.
REAP_STEPS = 20


class Sweeper:
    """Sweeps one queue for the worker `consumer`; `keep` and `settle` end the jobs that only it can end."""

    def __init__(
        self,
        redis: Redis,
        keys: QueueKeys,
        consumer: str,
        contact: Contact,
        lease_s: Callable[[], float],
        end: Callable[[Lease, Outcome], None],
        on_reclaimed: Callable[[int], None] = lambda jobs: None,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._consumer = consumer
        self._contact = contact
        self._lease_s = lease_s
        self._end = end
        self._on_reclaimed = on_reclaimed
        self._fleet_watch = FleetWatch(redis, keys)
        self._full_sweep_at = 0.0
        self._led_at = (0, 0.0)
        self._hurry = False

    async def sweeps(self) -> None:
        """Sweep until cancelled, each quarter of a lease."""
        while True:
            interval = self._interval_s() * (0.9 + random.random() / 10)
            # The jobs of a lone worker that was killed wait for the contact of the one that was started after it.
            await asyncio.sleep(min(interval, self._contact.wanting() or interval))
            try:
                await self.sweep()
            except OUT_OF_REACH:
                self._contact.lost()

    async def sweep(self) -> bool:
        """Sweep once, if contact allows it and nobody else does; return whether it was done."""
        if not self._contact.long_enough():
            return False
        silent_s = await self._silent_workers()
        missing = {name for name, silent in silent_s.items() if silent > 2 * self._longest_interval_s()}
        self._hurry = any(silent_s[name] < self._lease_s() + HURRY_UNTIL_S for name in missing)
        # The lock goes a little before the next sweep is due, or a lone worker would find its own.
        interval_ms = round(self._interval_s() * 800)
        asked_at = time.monotonic()
        lead = await scripts.run(self._redis, scripts.lead(self._keys, self._consumer, interval_ms=interval_ms))
        if not lead.leads:
            return False
        self._led_at = (lead.now_ms, time.monotonic())
        self._contact.redis_time(lead.now_ms / 1000, asked_at)
        note(Event.SWEEPER_LED, lanes=len(lead.lanes), missing_workers=len(missing))
        await self._fleet_watch.look(lead.now_ms)
        self._contact.server(await run_id_of(self._redis, self._keys.config))
        few = len(lead.lanes) <= FEW_LANES
        full = time.monotonic() >= self._full_sweep_at
        whole = True
        if full or missing or few:
            for lane in lead.lanes:
                whole = await self._reclaim(lane) and whole
        overdue = [lane for lane, known in lead.lanes.items() if _over(known, lead.now_ms)]
        for lane in dict.fromkeys([*lead.ending, *overdue]):
            await self._reap(lane)
        if full and whole:
            await self._keep_house(lead, silent_s.keys() - missing)
            self._full_sweep_at = time.monotonic() + FULL_SWEEP_S
        return True

    def _redis_now_ms(self) -> int:
        redis_ms, here_s = self._led_at
        return redis_ms + round((time.monotonic() - here_s) * 1000)

    def _interval_s(self) -> float:
        return min(self._longest_interval_s(), HURRY_S if self._hurry else LONGEST_INTERVAL_S)

    def _longest_interval_s(self) -> float:
        return min(self._lease_s() / 4, LONGEST_INTERVAL_S)

    async def _silent_workers(self) -> dict[str, float]:
        """Return for how many seconds each worker has been silent when the last one was heard of."""
        rows = cast(list[tuple[bytes, float]], await self._redis.zrange(self._keys.workers, 0, -1, withscores=True))
        rows = [(name, at) for name, at in rows if math.isfinite(at)]
        newest = max((at for _, at in rows), default=0.0)
        return {name.decode(errors="replace"): (newest - at) / 1000 for name, at in rows}

    async def _reclaim(self, lane: str) -> bool:
        """Reclaim what has lapsed in a lane; return whether contact allowed it to the end."""
        cursor = "0-0"
        lease_ms = round(self._lease_s() * 1000)
        # Asked again for each step: a sweep of many lanes takes a while, and Redis may go away in it and come back.
        while self._contact.long_enough():
            swept = await scripts.run(
                self._redis,
                scripts.sweep(
                    self._keys,
                    self._consumer,
                    lane=lane,
                    lease_ms=lease_ms,
                    cursor=cursor,
                    not_after_ms=self._redis_now_ms() + LATE_MS,
                ),
            )
            self._on_reclaimed(swept.reclaimed + len(swept.doomed))
            if swept.reclaimed:
                note(Event.RECLAIMED, lane=lane, jobs=swept.reclaimed)
            if swept.deleted:
                await scripts.run(self._redis, scripts.lose(self._keys, lane=lane, entries=swept.deleted))
            for doomed in swept.doomed:
                self._end(doomed.lease, VERDICTS[doomed.verdict])
            cursor = swept.cursor
            if cursor == "0-0":
                return True
        return False

    async def _reap(self, lane: str) -> None:
        batch_id = batch_of(lane)
        if batch_id is None:
            return
        cursor = "0-0"
        for _ in range(REAP_STEPS):
            cursor, _ended = await scripts.run(
                self._redis, scripts.reap(self._keys, batch_id, lane=lane, cursor=cursor)
            )
            if cursor == "0-0":
                return

    async def _keep_house(self, lead: scripts.Lead, live: Set[str]) -> None:
        await self._redis.xtrim(self._keys.dead, minid=lead.now_ms - DEAD_LETTERS_KEPT_MS, approximate=False)
        for lane in lead.lanes:
            try:
                consumers: list[dict[str, Any]] = await self._redis.xinfo_consumers(self._keys.lane(lane), "workers")
            except ResponseError:  # an open batch without lines has no stream yet; a lane may just have ended
                continue
            for consumer in consumers:
                if consumer["pending"] == 0 and (name := consumer["name"].decode(errors="replace")) not in live:
                    await scripts.run(self._redis, scripts.forget(self._keys, name, lane=lane))
        await Queue(self._redis, self._keys.queue).refresh_plan()
        await self._recount_results()
        if len(lead.lanes) <= MOST_LANES_COUNTED:
            await scripts.run(self._redis, scripts.recount(self._keys, lanes=list(lead.lanes)))
        buried = lead.now_ms - 2 * HEARTBEAT_TTL_S * 1000
        await self._redis.zremrangebyscore(self._keys.workers, "-inf", buried)

    async def _recount_results(self) -> None:
        """Set the bytes of results held right: those of batches whose TTL is over went without a word."""
        names = cast(list[bytes], await self._redis.zrange(self._keys.batches, 0, -1))
        ids = [name.decode(errors="replace") for name in names]
        before, total, gone = 0, 0, []
        for first in range(0, max(1, len(ids)), BATCHES_AT_ONCE):
            some = ids[first : first + BATCHES_AT_ONCE]
            # In one step with the sum: what is finished between the two would be counted twice.
            pipe: Any = self._redis.pipeline(transaction=True)
            pipe.get(self._keys.held)
            for batch_id in some:
                pipe.hmget(self._keys.batch(batch_id), "id", "bytes")
            held, *rows = await pipe.execute()
            before = before if first else whole(held)
            if held is not None and not held.isdigit():  # somebody wrote what is no number: counting begins anew
                await self._redis.delete(self._keys.held)
            for batch_id, (known, size) in zip(some, rows, strict=True):
                total += whole(size)
                if known is None:
                    gone.append(batch_id)
        if gone:
            await self._redis.zrem(self._keys.batches, *gone)
        if total != before and await self._redis.exists(self._keys.held):
            await self._redis.incrby(self._keys.held, total - before)  # what was finished meanwhile is counted already


def _over(known: str, now_ms: int) -> bool:
    """Whether what is known of a lane (`state class|tenant|due`) says that its window is over."""
    due = int(known.rpartition("|")[2])
    return 0 < due <= now_ms
