"""The desk: where a worker meets the queue. It takes leases and settles outcomes, both in one trip to Redis.

Slots wait here for their next lease and leave the outcome of the last one. One coroutine makes the trips: each trip
writes all outcomes that have gathered and claims for all slots that are free, so a busy worker's trips grow with its
load and an idle one's are rare. An outcome stays at the desk until Redis has answered for it; the fence makes sending
it twice harmless.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from llmq.scheduler import scripts
from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.lease import Ended, ErrorCode, Fence, HandedBack, Lease, Outcome, Reason
from llmq.workers.contact import Contact
from llmq.workers.governor import NOTHING, Allowance
from llmq.workers.keeper import LeaseKeeper

#: With nothing else to wake it, a worker looks again after about this long.
LOOK_AGAIN_S = 1.0

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0

#: What the claim's and the sweep's verdicts on a job mean for its end.
VERDICTS = {
    "expired": Ended(ErrorCode.TIMEOUT, "the job waited in the queue longer than it may"),
    "cancelled": Ended(ErrorCode.CANCELLED, "the job was cancelled"),
    "interrupted": Ended(ErrorCode.INTERRUPTED, "the worker died after the answer had begun"),
    "dead": Ended(ErrorCode.WORKER_LOST, "in flight at 3 deaths of its worker or engine", dead=True),
}


class Desk:
    """Takes leases for the slots of one worker, and settles their outcomes.

    `allowance` says what may be claimed now, the leases at the desk included; `make_way` is called with the number of
    running batch requests to preempt for what has just been claimed.
    """

    def __init__(
        self,
        redis: Redis,
        keys: QueueKeys,
        consumer: str,
        host: str,
        keeper: LeaseKeeper,
        contact: Contact,
        allowance: Callable[[], Allowance],
        make_way: Callable[[], None],
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._consumer = consumer
        self._host = host
        self._keeper = keeper
        self._contact = contact
        self._allowance = allowance
        self._make_way = make_way
        self._leases: deque[Lease] = deque()
        self._held: dict[Fence, Lease] = {}
        self._takers: deque[asyncio.Future[Lease | None]] = deque()
        self._outbox: list[tuple[Lease, Outcome]] = []
        self._candidates: list[str] = []
        self._unsure: set[str] = set()
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self._closed = False
        self.claiming = True
        self.claimed_at = 0.0
        self.reason = ""

    @property
    def held(self) -> Collection[Lease]:
        """The leases of this worker's slots, from their claim to their outcome; a slot may not have taken one yet."""
        return self._held.values()

    async def take(self) -> Lease | None:
        """Return the next lease; None when the desk is closed."""
        if self._leases:
            return self._leases.popleft()
        if self._closed:
            return None
        taker: asyncio.Future[Lease | None] = asyncio.get_running_loop().create_future()
        self._takers.append(taker)
        return await taker

    def settle(self, lease: Lease, outcome: Outcome) -> None:
        """Leave the outcome of a lease; it is written with the next trip."""
        self._held.pop(lease.fence, None)
        self._outbox.append((lease, outcome))
        self._settled.clear()
        self._wake.set()

    def look(self) -> None:
        """Claim with the next trip, at once: a bell has rung, or there is more room."""
        self._wake.set()

    def return_unstarted(self) -> None:
        """Hand back the leases that no slot has taken (shutdown)."""
        while self._leases:
            self.settle(self._leases.popleft(), HandedBack(Reason.SHUTDOWN))

    def close(self) -> None:
        """Send the slots home."""
        self._closed = True
        while self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(None)

    async def settled(self) -> None:
        """Wait until every outcome has been answered for."""
        await self._settled.wait()

    async def trips(self) -> None:
        """Make trips until cancelled."""
        pause, wait = FIRST_PAUSE_S, 0.0
        while True:
            await self._woken_within(wait)
            try:
                wait = await self._trip()
                pause = FIRST_PAUSE_S
            except (RedisError, OSError):
                self._contact.lost()
                await asyncio.sleep(pause * (1 + random.random() / 2))
                pause, wait = min(LONGEST_PAUSE_S, pause * 2), 0.0

    async def _woken_within(self, seconds: float) -> None:
        if not self._wake.is_set() and seconds > 0:
            try:
                async with asyncio.timeout(seconds):
                    await self._wake.wait()
            except TimeoutError:
                pass
        self._wake.clear()

    async def _trip(self) -> float:
        """Make one trip; return the seconds after which to look again."""
        if self._unsure:
            await self._return_unknown()
        outbox, self._outbox = self._outbox, []
        allowance = self._allowance() if self.claiming else NOTHING
        calls = scripts.settle(self._keys, self._consumer, self._host, outbox)
        settling = len(calls)
        if allowance.room > 0:
            calls.append(self._claim(allowance))
        if not calls:
            self._note_settled(outbox)
            return LOOK_AGAIN_S
        try:
            replies = await scripts.run_all(self._redis, calls)
        except (RedisError, OSError):
            self._outbox = outbox + self._outbox
            if len(calls) > settling:
                self._unsure.update(self._candidates)
            raise
        failed = next((reply for reply in replies[:settling] if isinstance(reply, Exception)), None)
        if failed is not None:  # all of them again: what was written is refused by its fence the second time
            self._outbox = outbox + self._outbox
        else:
            self._note_settled(outbox)
        wait = LOOK_AGAIN_S
        if len(replies) > settling:
            if isinstance(replies[-1], scripts.Claimed):
                wait = self._deal(replies[-1])
            else:
                failed = replies[-1]
                self._unsure.update(self._candidates)
        if failed is not None:
            raise failed if isinstance(failed, RedisError) else ResponseError(str(failed))
        return wait

    def _claim(self, allowance: Allowance) -> scripts.Call[Any]:
        return scripts.claim(
            self._keys,
            self._consumer,
            room=allowance.room,
            free=allowance.free,
            reserve=allowance.reserve,
            suspects=allowance.suspects,
            candidates=self._candidates,
        )

    def _note_settled(self, outbox: list[tuple[Lease, Outcome]]) -> None:
        for lease, _ in outbox:
            self._keeper.drop(lease.fence)
        if not self._outbox:
            self._settled.set()

    def _deal(self, claimed: scripts.Claimed) -> float:
        """Hand claimed leases to slots; return the seconds after which to look again."""
        self.claimed_at = time.time()
        self.reason = claimed.reason
        for lease in claimed.leases:
            self._keeper.keep(lease.fence)
            self._held[lease.fence] = lease
            self._leases.append(lease)
        for doomed in claimed.doomed:
            self._keeper.keep(doomed.lease.fence)
            self.settle(doomed.lease, VERDICTS[doomed.verdict])
        if claimed.leases:
            self._make_way()
            self._hand_out()
        if claimed.candidates is not None:
            self._candidates = claimed.candidates
            self._wake.set()
        return min(claimed.wait, LOOK_AGAIN_S) * (1 + random.random() / 10)

    def _hand_out(self) -> None:
        while self._leases and self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(self._leases.popleft())

    async def _return_unknown(self) -> None:
        """Hand back what a claim may have taken whose reply never came: nobody renews it, and it is no suspect."""
        for lane in list(self._unsure):
            try:
                rows: list[dict[str, Any]] = await self._redis.xpending_range(
                    self._keys.lane(lane), "workers", "-", "+", 1000, consumername=self._consumer
                )
            except ResponseError:  # the lane is gone
                rows = []
            found = [Fence(lane, row["message_id"].decode(), int(row["times_delivered"])) for row in rows]
            known = {(lease.fence.lane, lease.fence.entry) for lease, _ in self._outbox}
            unknown = [f for f in found if not self._keeper.holds(f) and (f.lane, f.entry) not in known]
            if unknown:
                back = [(fence, HandedBack(Reason.SHUTDOWN)) for fence in unknown]
                await scripts.run(self._redis, scripts.hand_back(self._keys, self._consumer, back))
            self._unsure.discard(lane)
