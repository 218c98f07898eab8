"""Governing: the governor at work in one worker: it gathers what the governor sees, and keeps the operating point.

The executor reports every token, the slots every preemption; a small loop takes a step of the governor some times a
second and tells the slots when the cap has moved. What is decided is decided in `governor.py`; who is preempted, and
what is claimed, in `slots.py` with what stands here.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from llmq.scheduler.job import TrafficClass
from llmq.scheduler.lease import Lease
from llmq.scheduler.live import LiveSettings
from llmq.workers.chat_signal import ChatSignal, Evidence, Objective
from llmq.workers.governor import WASTE_SHARE, Operating, Seen, State, step

#: A step takes some 20 us; ten a second answer a burst by its second slow request.
STEP_S = 0.1

#: How far the evidence of a breach goes back; what is older has moved the cap already.
RECENT_S = 5.0

#: Over so long what was thrown away is compared with what was made.
WASTE_WINDOW_S = 30.0

#: What the whole fleet's chat sees is compared with this many times the objective (`fleet_watch.py`).
FLEET_LIMIT = 2.0

#: A cap that gave way by one, or by this share, waits for requests to end: to abort one and read its prompt again would
#: cost chat more than it gives.
LEFT_TO_END = 0.1

#: While the objective holds, a batch start waits for chat that waits for its first token, but never longer than this.
YIELD_S = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker holds: batch requests, and those of them that have no token yet (`prefilling`).

    `most` is how many batch requests may run without an objective.
    """

    batch: int
    prefilling: int
    most: int


class Governing:
    """Keeps one worker's batch cap at what chat can bear.

    `on_move` is called when more batch may start than before, and when some has to be preempted, `on_cut_off` with the
    tokens that preempted requests had made (kept, wasted). `tuned` tells how many batch requests were measured to hold.
    """

    def __init__(
        self,
        settings: Callable[[], LiveSettings],
        load: Callable[[], Load],
        on_move: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        on_cut_off: Callable[[int, int], None] = lambda kept, wasted: None,
        tuned: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._load = load
        self._on_move = on_move
        self._clock = clock
        self._on_cut_off = on_cut_off
        self._tuned = tuned
        self.signal = ChatSignal()
        self._operating: Operating | None = None
        self._tokens = _Tokens()
        self._batch_started_at = 0.0
        self._allowed: int | None = None
        self.far_over = Evidence()

    @property
    def state(self) -> State:
        """What the governor does now, for the heartbeat."""
        return State.FIXED if self._operating is None else self._operating.state

    def ttft_p95(self) -> float | None:
        """Return the p95 of times to first token of the last ten seconds."""
        return self.signal.ttft_p95(self._clock(), 10.0)

    def batch_cap(self, load: Load) -> int | None:
        """Return the most batch requests that may run now; None where only the reserve holds.

        While an objective holds for chat, batch requests read their prompts one at a time, and none begins while chat
        waits for its first token: both read in the same step of the engine.
        """
        if self._operating is None:
            return None
        cap = self._operating.batch_cap
        if not self.signal.present:
            return cap
        yields = self.signal.waiting and self._clock() - self._batch_started_at < YIELD_S
        if load.prefilling or yields:
            return min(cap, load.batch)
        return min(cap, load.batch + 1)

    def excess(self, load: Load) -> int:
        """Return how many batch requests are to be preempted for the objective, while little has been wasted."""
        now = self._operating
        if now is None or now.state is State.IDLE or self._tokens.wasted_share() > WASTE_SHARE:
            return 0
        excess = load.batch - now.batch_cap
        return excess if excess > (0 if now.state is State.CUT else max(1.0, LEFT_TO_END * now.cap)) else 0

    # --- what the executor and the slots report -----------------------------------------------------------------------

    def taken(self, lease: Lease, waited_s: float) -> None:
        """A slot has begun with a lease."""
        if lease.cls is TrafficClass.INTERACTIVE:
            self.signal.taken(lease.fence, self._clock(), waited_s)
        else:
            self._batch_started_at = self._clock()

    def token(self, lease: Lease, *, first: bool) -> None:
        """A token of an answer came."""
        if lease.cls is TrafficClass.INTERACTIVE:
            self.signal.token(lease.fence, self._clock())
        else:
            self._tokens.made += 1
        if first and self._operating is not None:
            self._look(self._load())

    def ended(self, lease: Lease) -> None:
        """An attempt is over."""
        if lease.cls is TrafficClass.INTERACTIVE:
            self.signal.ended(lease.fence, self._clock())

    def cut_off(self, kept: int, wasted: int) -> None:
        """A preempted request had made so many tokens: kept for its next attempt, or thrown away."""
        self._tokens.wasted += wasted
        self._on_cut_off(kept, wasted)

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def govern(self) -> None:
        """Take steps until cancelled."""
        while True:
            self.step()
            await asyncio.sleep(STEP_S)

    def step(self) -> None:
        """Take one step."""
        settings = self._settings()
        self.signal.objective = Objective(settings.ttft_p95_s, settings.itl_p95_s)
        now, load = self._clock(), self._load()
        limit = settings.ttft_p95_s
        # Kept for the heartbeat, which another thread writes.
        self.far_over = Evidence() if limit is None else self.signal.over(limit * FLEET_LIMIT, now - RECENT_S, now)
        self._tokens.note(now)
        if not self.signal.objective.stated or self.signal.blind:
            if self._operating is not None:
                self._operating = self._allowed = None
                self._on_move()
            return
        before = self._operating or Operating.start(now, load.most, self._tuned())
        seen = Seen(
            at=now,
            fresh=self.signal.fresh(),
            recent=self.signal.since(max(before.since, now - RECENT_S), now),
            batch=load.batch,
            most=load.most,
            chat_idle_s=self.signal.idle_s(now),
            wasted=self._tokens.wasted_share(),
        )
        self._operating = step(before, seen)
        self._look(load)

    def _look(self, load: Load) -> None:
        """Say so where more may start than when this was asked last, or too much runs."""
        before, self._allowed = self._allowed, self.batch_cap(load)
        rose = before is not None and self._allowed is not None and self._allowed > before
        if rose or self.excess(load) > 0:
            self._on_move()


class _Tokens:
    """Batch tokens that were made, and thrown away, in all and lately."""

    def __init__(self) -> None:
        self.made = 0
        self.wasted = 0
        self._noted: deque[tuple[float, int, int]] = deque([(0.0, 0, 0)])

    def note(self, now: float) -> None:
        """Remember what stands now, and forget what is over."""
        self._noted.append((now, self.made, self.wasted))
        while now - self._noted[0][0] > WASTE_WINDOW_S:
            self._noted.popleft()

    def wasted_share(self) -> float:
        """Return the share of the tokens made lately that was thrown away."""
        _, made, wasted = self._noted[0]
        return (self.wasted - wasted) / (self.made - made) if self.made > made else 0.0
