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
from collections.abc import Callable
from typing import Any, Protocol

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from llmq.scheduler import scripts
from llmq.scheduler.calling import ScriptCalls
from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.lease import Abandoned, Ended, ErrorCode, Fence, HandedBack, Lease, Outcome, Reason
from llmq.workers.allowance import Allowance
from llmq.workers.contact import Contact
from llmq.workers.held import Held
from llmq.workers.journal import note_outcome
from llmq.workers.keeper import LeaseKeeper
from llmq.workers.reach import OUT_OF_REACH
from llmq.workers.twins import Meeting, meet

#: Jobs that one trip settles at most, so that it claims for no more slots than these. Requests that began together end
#: together: settled in one trip, all slots would stand idle until the last is written, and begin together again. In two
#: parts, one runs while the other is written, and from then on they take turns. Smaller parts cost more trips.
AT_ONCE = 32

#: Requests that end sooner after their claim take about as long as a trip. Nothing would run beside it: all go in one.
BRIEF_S = 0.02

#: With nothing else to wake it, a worker looks again after about this long.
LOOK_AGAIN_S = 1.0

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0

#: What the claim's and the sweep's verdicts on a job mean for its end.
VERDICTS = {
    "expired": Ended(ErrorCode.TIMEOUT, "the job waited in the queue longer than it may"),
    "cancelled": Ended(ErrorCode.CANCELLED, "the job was cancelled"),
    "interrupted": Ended(ErrorCode.INTERRUPTED, "the worker died after the answer had begun"),
    "dead": Ended(ErrorCode.WORKER_LOST, "in flight at 3 deaths of its worker or engine", dead=True),
}

_Settled = tuple[Lease, Outcome]


class Claimant(Protocol):
    """Whom the desk claims for: the slots of the worker, which know what runs and what may."""

    def allowance(self) -> Allowance:
        """What may be claimed now, the leases at the desk included."""
        ...

    def youngest(self) -> Fence | None:
        """The batch line that would be preempted first."""
        ...

    def protect(self, fence: Fence) -> None:
        """Never preempt this line: its start counts for the deadline."""

    def make_way(self) -> None:
        """Preempt what has to make way for what has just been claimed."""

    def may_start(self, lease: Lease) -> bool:
        """Whether a lease at the desk may run beside those that are held."""
        ...

    def lose(self, fence: Fence) -> None:
        """Abort a request whose lease belongs to another delivery."""

    def is_lost(self, fence: Fence) -> bool:
        """Whether a request is being aborted because its lease was lost."""
        ...

    def settling(self, lease: Lease, outcome: Outcome) -> None:
        """Count an outcome that was left at the desk."""

    def refused(self, outcomes: int) -> None:
        """Count outcomes that their fences have refused."""


class Desk:
    """Takes leases for the slots of one worker, and settles their outcomes; `on_trip` is called after each trip."""

    def __init__(
        self,
        redis: Redis,
        keys: QueueKeys,
        consumer: str,
        host: str,
        keeper: LeaseKeeper,
        contact: Contact,
        claimant: Claimant,
        on_trip: Callable[[], None] = lambda: None,
    ) -> None:
        self._redis = redis
        self._calls = ScriptCalls(redis)
        self._keys = keys
        self._consumer = consumer
        self._host = host
        self._keeper = keeper
        self._contact = contact
        self._claimant = claimant
        self._on_trip = on_trip
        self._leases: deque[Lease] = deque()
        self.held = Held()
        """The leases of this worker, from their claim to their outcome, in that order; some wait for their slot."""
        self._disowned: list[Lease] = []
        self._takers: deque[asyncio.Future[None]] = deque()
        self._outbox: list[_Settled] = []
        self._dealt_at = 0.0
        self._one_by_one = False
        self._candidates: list[str] = []
        self._unsure: set[str] = set()
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self.closed = False
        self.claimed_at = 0.0

    @property
    def clear(self) -> bool:
        """Whether Redis has answered for everything that was ever claimed here."""
        return not (self.held or self._outbox or self._unsure)

    async def take(self) -> Lease | None:
        """Return the next lease that may start; None when the desk is closed."""
        while (lease := next(filter(self._claimant.may_start, self._leases), None)) is None:
            if self.closed:
                return None
            taker: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._takers.append(taker)
            await taker
        # Taken only by the slot that runs it next: until then the lease can be withdrawn.
        self._leases.remove(lease)
        return lease

    def settle(self, lease: Lease, outcome: Outcome) -> None:
        """Leave the outcome of a lease; it is written with the next trip."""
        if self._disowned and any(one is lease for one in self._disowned):
            self._disowned = [one for one in self._disowned if one is not lease]
            outcome = Abandoned()  # its entry is another job's by now
        note_outcome(lease, outcome)
        self._claimant.settling(lease, outcome)
        self.held.drop(lease)
        self._outbox.append((lease, outcome))
        self._settled.clear()
        self._wake.set()

    def end(self, lease: Lease, outcome: Outcome) -> None:
        """Settle a lease that was claimed only to be ended."""
        self._keeper.keep(lease.fence)
        self._claimant.lose(lease.fence)  # where it still runs, by a claim that Redis has forgotten
        self.settle(lease, outcome)

    def withdraw(self, fence: Fence, outcome: Outcome) -> bool:
        """Settle a lease that no slot has taken yet; False where there is none."""
        for lease in self._leases:
            if lease.fence == fence:
                self._leases.remove(lease)
                self.settle(lease, outcome)
                return True
        return False

    def look(self) -> None:
        """Claim with the next trip, at once: a bell has rung, or there is more room."""
        self._wake.set()

    def close(self) -> None:
        """Claim nothing more, hand back what no slot has taken, and send the slots home."""
        self.closed = True
        while self._leases:
            self.settle(self._leases.popleft(), HandedBack(Reason.SHUTDOWN))
        self._wake_takers(len(self._takers))

    async def settled(self) -> None:
        """Wait until every outcome, and a claim that is under way, has been answered for."""
        while not self._settled.is_set():
            await self._settled.wait()

    async def trips(self) -> None:
        """Make trips until cancelled."""
        pause, wait = FIRST_PAUSE_S, 0.0
        while True:
            await self._woken_within(wait)
            self._settled.clear()
            began = time.monotonic()
            try:
                wait = await self._trip()
                pause = FIRST_PAUSE_S
                self._contact.seen(began)
            except OUT_OF_REACH:
                self._contact.lost()
                await asyncio.sleep(pause * (1 + random.random() / 2))
                pause, wait = min(LONGEST_PAUSE_S, pause * 2), 0.0
            if not self._outbox and not self._unsure:
                self._settled.set()
            self._on_trip()

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
        most = AT_ONCE if time.monotonic() - self._dealt_at > BRIEF_S else len(self._outbox)
        outbox, self._outbox = self._outbox[:most], self._outbox[most:]
        if self._outbox:
            self._wake.set()
        parcels = [[settled] for settled in outbox] if self._one_by_one else [outbox]
        calls, parcel_of = [], []
        for parcel in parcels:
            for call in scripts.settle(self._keys, self._consumer, self._host, parcel):
                calls.append(call)
                parcel_of.append(parcel)
        # Slots whose outcome goes with a later trip are claimed for by that one. So is a suspect that follows another:
        # a server that has forgotten a script may run this claim before it knows that the other one has ended (G7).
        settling = sum(lease.suspect for lease, _ in (*outbox, *self._outbox))
        if settling:
            self._wake.set()
        allowance, youngest = self._claimant.allowance().without(len(self._outbox), settling), self._claimant.youngest()
        claims = [self._claim(allowance, youngest)] if allowance.room > 0 else []
        try:
            replies = await self._calls.run_all(calls + claims) if calls or claims else []
        except BaseException:
            self._outbox = outbox + self._outbox
            self._unsure.update(self._candidates if claims else ())
            raise
        failed = {
            id(parcel): reply for parcel, reply in zip(parcel_of, replies, strict=False) if isinstance(reply, Exception)
        }
        self._claimant.refused(sum(map(_refused, replies[: len(calls)])))
        self._note_settled(parcels, failed)
        wait = self._deal(replies[-1], youngest) if claims else LOOK_AGAIN_S
        if failed and len(failed) == len(parcels):
            raise next(iter(failed.values()))
        return wait

    def _claim(self, allowance: Allowance, youngest: Fence | None) -> scripts.Call[Any]:
        return scripts.claim(
            self._keys,
            self._consumer,
            room=allowance.room,
            free=allowance.free,
            reserve=allowance.reserve,
            suspects=allowance.suspects,
            candidates=self._candidates,
            youngest=youngest,
        )

    def _note_settled(self, parcels: list[list[_Settled]], failed: dict[int, Exception]) -> None:
        """Forget what was written; keep what was refused, each on its own from now on: one may not hold up others."""
        again: list[_Settled] = []
        for parcel in parcels:
            if id(parcel) in failed:  # what was written of it is refused by its fence the second time
                again += parcel
                continue
            for lease, _ in parcel:
                self._keeper.drop(lease.fence)
        self._one_by_one = bool(failed)
        self._outbox = again + self._outbox

    def _deal(self, claimed: scripts.Claimed | Exception, youngest: Fence | None) -> float:
        """Hand claimed leases to slots; return the seconds after which to look again."""
        if isinstance(claimed, Exception):
            self._unsure.update(self._candidates)
            raise claimed
        self.claimed_at = time.time()
        if claimed.protects and youngest is not None:
            self._claimant.protect(youngest)
        left = {settled[0].fence: settled for settled in self._outbox}
        for lease in claimed.leases:
            self._keeper.keep(lease.fence)
            if self.closed:
                self.settle(lease, HandedBack(Reason.SHUTDOWN))
            elif self._is_new(lease, left.get(lease.fence)):
                self.held.add(lease)
                self._leases.append(lease)
        for doomed in claimed.doomed:
            self.end(doomed.lease, VERDICTS[doomed.verdict])
        if self._leases:
            self._dealt_at = time.monotonic()
            self._claimant.make_way()
            self._wake_takers(len(self._leases))
        if claimed.candidates is not None:
            self._candidates = claimed.candidates
            self._wake.set()
        return min(claimed.wait, LOOK_AGAIN_S) * (1 + random.random() / 10)

    def _is_new(self, lease: Lease, left: _Settled | None) -> bool:
        """Whether a claimed lease is to be run; `left` is what was left here under the same fence.

        One whose fence is known was claimed before, by a Redis that has forgotten it.
        """
        held = self.held.get(lease.fence)
        if held is not None:
            old, outcome = held, None
        elif left is not None:
            old, outcome = left
        else:
            return True
        runs = held is not None and all(one is not held for one in self._leases)
        match meet(lease, old, outcome=outcome, runs=runs, lost=self._claimant.is_lost(lease.fence)):
            case Meeting.JOIN:
                if lease.protected():
                    self._claimant.protect(lease.fence)
                return False
            case Meeting.REPLACE:
                self._leases = deque(one for one in self._leases if one is not held)
                self._outbox = [settled for settled in self._outbox if settled is not left]
                return True
            case Meeting.PART:
                self._disowned.append(old)
                self._claimant.lose(lease.fence)
                self.settle(lease, HandedBack(Reason.SHUTDOWN))
                return False

    def _wake_takers(self, count: int) -> None:
        while count > 0 and self._takers:
            taker = self._takers.popleft()
            if not taker.done():
                taker.set_result(None)
                count -= 1

    async def _return_unknown(self) -> None:
        """Hand back what a claim may have taken whose reply never came: nobody renews it, and it is no suspect."""
        for lane in list(self._unsure):
            try:
                rows: list[dict[str, Any]] = await self._redis.xpending_range(
                    self._keys.lane(lane), "workers", "-", "+", 1000, consumername=self._consumer
                )
            except ResponseError as error:
                if "NOGROUP" not in str(error):
                    raise
                rows = []  # the lane is gone
            found = [Fence(lane, row["message_id"].decode(), int(row["times_delivered"])) for row in rows]
            ours = {lease.fence for lease, _ in self._outbox} | {lease.fence for lease in self.held}
            unknown = [fence for fence in found if fence not in ours and not self._keeper.holds(fence)]
            if unknown:
                back = [(fence, HandedBack(Reason.SHUTDOWN)) for fence in unknown]
                await scripts.run(self._redis, scripts.hand_back(self._keys, self._consumer, back))
            self._unsure.discard(lane)


def _refused(reply: object) -> int:
    """Return how many fences a reply names (finish, hand back), or whether one was refused (retry)."""
    return len(reply) if isinstance(reply, list) else int(reply is False)
