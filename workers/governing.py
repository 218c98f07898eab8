"""Governing: the governor at work in one worker: it gathers what the governor sees, and keeps the operating point.

The executor reports every token, the slots every preemption; a small loop takes a step of the governor some times a
second and tells the slots when the cap has moved. What is decided is decided in `governor.py`; who is preempted, and
what is claimed, in `slots.py` with what stands here.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from llmq.scheduler.job import TrafficClass
from llmq.scheduler.lease import Lease
from llmq.scheduler.live import LiveSettings
from llmq.scheduler.tuned import Tuned
from llmq.workers.chat_signal import ChatSignal, Evidence, Objective
from llmq.workers.governor import WASTE_SHARE, Operating, Seen, State, loosened, step
from llmq.workers.reading import Reading, makes_way
from llmq.workers.saturation import Saturation

#: A step takes some 20 us; ten a second answer a burst by its third slow request.
STEP_S = 0.1

#: How far the evidence of a breach goes back, and so many times the objective at least: a request that came later
#: cannot be slow yet. What is older has moved the limit already.
RECENT_S = 5.0
RECENT_LIMITS = 2.0

#: Over so long what was thrown away is compared with what was made.
WASTE_WINDOW_S = 30.0

#: How often the reason is put into words.
REASON_S = 1.0

#: What the whole fleet's chat sees is compared with this many times the objective (`fleet_watch.py`).
FLEET_LIMIT = 2.0


#: What the states say of the cap, after the figures.
MEANING = {
    State.IDLE: "no chat: batch may have all slots but the reserve",
    State.SEARCH: "nothing is known yet: batch has more after each good run",
    State.HOLDS: "the limit feels its way",
    State.CUT: "too many were slow: batch over the limit is preempted",
    State.WASTE: "preemption threw too much away: the limit gives way",
    State.OWN_LOAD: "slow without batch: chat's own load",
}


@dataclass(frozen=True, slots=True)
class Load:
    """What a worker holds: batch requests, and the prompt tokens (`unread`) of those that have no token yet.

    `most` is how many batch requests may run without an objective.
    """

    batch: int
    unread: int
    most: int


class Governing:
    """Keeps one worker's batch cap at what chat can bear.

    `on_move` is called when more batch may start than before, and when some has to be preempted, `on_cut_off` with the
    tokens that preempted requests had made (kept, wasted). `tuned` tells what `llmq tune` found for this engine.
    """

    def __init__(
        self,
        settings: Callable[[], LiveSettings],
        load: Callable[[], Load],
        on_move: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        on_cut_off: Callable[[int, int], None] = lambda kept, wasted: None,
        tuned: Callable[[], Tuned | None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._load = load
        self._on_move = on_move
        self._clock = clock
        self._on_cut_off = on_cut_off
        self._tuned = tuned
        self.signal = ChatSignal()
        self._operating: Operating | None = None
        self._began_with: Tuned | None = None
        self._tokens = _Tokens()
        self._saturation = Saturation()
        self._batch = 0
        self._reading = Reading()
        self._allowed: int | None = None
        self.far_over = Evidence()
        self.reason = self._reason()
        self._reasoned_at = -math.inf

    @property
    def state(self) -> State:
        """What the governor does now, for the heartbeat."""
        return State.FIXED if self._operating is None else self._operating.state

    def ttft_p95(self) -> float | None:
        """Return the p95 of times to first token of the last ten seconds."""
        return self.signal.ttft_p95(self._clock(), 10.0)

    def itl_p95(self) -> float | None:
        """Return the p95 of times between tokens of the last ten seconds, about."""
        return self.signal.itl_p95(self._clock(), 10.0)

    def batch_cap(self, load: Load) -> int | None:
        """Return the most batch requests that may run now; None where only the reserve holds."""
        now = self._operating
        if now is None:
            return None
        cap = now.batch_cap(self.signal.in_flight, load.most)
        if self.signal.last_at is None:
            return cap  # nobody has ever chatted here
        if now.state is not State.IDLE and self._saturation.enough is not None:
            cap = min(cap, self._saturation.enough)
        may_read = self._reading.may_begin(self._clock(), load.unread, self.signal.waiting, self.signal.present)
        return min(cap, load.batch + may_read)

    def excess(self, load: Load) -> int:
        """Return how many batch requests are to be preempted for the objective, while little has been wasted.

        What is over the limit because chat came, or because it gave way by a little, is left to end: to abort requests
        and read their prompts again costs chat more than it gives. A cut, and more than twice of what is borne (chat
        has come back after a pause), do not wait.
        """
        now = self._operating
        if now is None or self._tokens.wasted_share() > WASTE_SHARE:
            return 0
        excess = load.batch - now.batch_cap(self.signal.in_flight, load.most)
        return excess if excess > (0 if now.state is State.CUT else max(1.0, now.limit)) else 0

    def interrupts(self, lease: Lease, shown: int) -> bool:
        """Whether chat that comes preempts a batch request that has shown so many tokens: its prompt is in the way.

        Only where first tokens have an objective: they are what waits for a prompt.
        """
        asked = self._operating is not None and self.signal.objective.ttft_p95_s is not None
        return asked and makes_way(prompt_tokens(lease), shown)

    def interrupted(self) -> None:
        """A batch request was preempted because its prompt was in the way."""
        self._reading.interrupted(self._clock())

    def _reason(self) -> str:
        """Say why the cap is what it is: the objective, what is seen of it, and what follows."""
        now, asked = self._operating, self.signal.objective
        if now is None:
            return "first tokens are not to be seen" if self.signal.blind and asked.stated else "no objective"
        wanted = ((self.ttft_p95(), asked.ttft_p95_s, "first token"), (self.itl_p95(), asked.itl_p95_s, "next token"))
        said = [f"{name} p95 {_ms(p95)} of {_ms(limit)}" for p95, limit, name in wanted if limit is not None]
        limit = f"{self.signal.in_flight} chat, at most {max(0.0, now.limit):.1f} in flight"
        # Where no chat is, it pays for nothing.
        enough = None if now.state is State.IDLE else self._saturation.enough
        full = () if enough is None else (f"full with {enough} of batch",)
        return ", ".join((*said, limit, *full, MEANING[now.state]))

    # --- what the executor and the slots report -----------------------------------------------------------------------

    def taken(self, lease: Lease, waited_s: float) -> None:
        """A slot has begun with a lease."""
        if lease.cls is TrafficClass.INTERACTIVE:
            self.signal.taken(lease.fence, self._clock(), waited_s)
            if self._operating is not None:
                self._look(self._load())
        else:
            self._batch += 1
            self._reading.begun(self._clock(), prompt_tokens(lease), self.signal.present)
        self._note()

    def begun(self, lease: Lease) -> Callable[[], None]:
        """The first token of an answer came; return what is called with each other one."""
        if lease.cls is TrafficClass.INTERACTIVE:
            signal, clock = self.signal, self._clock
            stream = signal.begun(lease.fence, clock())

            def token() -> None:
                signal.token(stream, clock())

        else:
            tokens = self._tokens
            tokens.made += 1

            def token() -> None:
                tokens.made += 1

        if self._operating is not None:
            self._look(self._load())
        return token

    def ended(self, lease: Lease, answered: bool = True, given_up: bool = False) -> None:
        """An attempt is over.

        `answered` is whether with an answer, and not an error or a preemption; `given_up` whether it was cancelled.
        """
        if lease.cls is TrafficClass.INTERACTIVE:
            self.signal.ended(lease.fence, self._clock(), answered, given_up)
        else:
            self._batch -= 1
        self._note()

    def cut_off(self, kept: int, wasted: int) -> None:
        """A preempted request had made so many tokens: kept for its next attempt, or thrown away."""
        self._tokens.wasted += wasted
        if wasted:
            self._tokens.wasted_at = self._clock()
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
        asked = Objective(settings.ttft_p95_s, settings.itl_p95_s)
        if self._operating is not None and asked.far_looser_than(self.signal.objective):
            self._operating = loosened(self._operating)
        self.signal.objective = asked
        now, load = self._clock(), self._load()
        limit = settings.ttft_p95_s
        # This and the reason are kept for the heartbeat, which another thread writes.
        self.far_over = Evidence() if limit is None else self.signal.over(limit * FLEET_LIMIT, now - RECENT_S, now)
        self._tokens.note(now)
        if now - self._reasoned_at >= REASON_S:
            self.reason, self._reasoned_at = self._reason(), now
        if not self.signal.objective.stated or self.signal.blind:
            if self._operating is not None:
                self._operating = self._allowed = None
                self._on_move()
            return
        tuned = self._tuned()
        self._reading.tokens_a_second = tuned.prefill_tps if tuned else 0.0
        if self._operating is None or (tuned is not None and tuned != self._began_with):
            self._operating = Operating.start(now, load.most, tuned.in_flight if tuned else None)
            self._began_with = tuned
        since = max(self._operating.since, now - max(RECENT_S, RECENT_LIMITS * max(asked.limits_s)))
        seen = Seen(
            at=now,
            fresh=self.signal.fresh(),
            recent=self.signal.since(since, now),
            batch=load.batch,
            chat=self.signal.in_flight,
            most=load.most,
            chat_idle_s=self.signal.idle_s(now),
            wasted=self._tokens.wasted_share(),
            wasted_at=self._tokens.wasted_at,
            enough=self._saturation.enough,
        )
        self._operating = step(self._operating, seen)
        self._note()
        if self._operating.state is not State.IDLE:
            self._saturation.look(now)
        self._look(load)

    def _note(self) -> None:
        """Tell what runs from now on, where anybody goes by it."""
        if self._operating is not None:
            self._saturation.note(self._clock(), self._batch, self.signal.in_flight, self._tokens.made)

    def _look(self, load: Load) -> None:
        """Say so where more may start than when this was asked last, or too much runs."""
        before, self._allowed = self._allowed, self.batch_cap(load)
        rose = before is not None and self._allowed is not None and self._allowed > before
        if rose or self.excess(load) > 0:
            self._on_move()


def prompt_tokens(lease: Lease) -> int:
    """Return about how many tokens the engine reads for a lease, with the beginning of its answer: four bytes each."""
    return (len(lease.data) + len(lease.kept)) // 4


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f} ms"


class _Tokens:
    """Batch tokens that were made, and thrown away, in all and lately."""

    def __init__(self) -> None:
        self.made = 0
        self.wasted = 0
        self.wasted_at = -math.inf
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
