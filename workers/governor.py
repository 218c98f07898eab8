"""The governor: how many batch requests a worker may run beside chat, found by what chat sees.

Users state what chat shall see (`ttft_p95`, `itl_p95`); the worker measures it (`chat_signal.py`), and this module
moves a limit. Data in, decision out: one step takes the operating point and what was seen since the last one, and
returns the next operating point. It touches neither network nor clock, so it can be run over an hour of recorded
traffic in a second.

The limit is on all that is in flight: batch may have what chat in flight leaves of it. So batch makes room the moment
that chat comes, before anybody was slow, and has it back when chat goes. How the limit moves, and why:

- *It begins with a search.* Nothing is known yet: batch has a small share of the slots beside the chat that there is on
  average, and half as much again after each run of requests in which it had its share and at most one was slow. The
  second slow one ends the search. While chat is here, batch has no more than its share, however little chat that is.
- *Every request counts, once.* From then on a request within the objective moves the limit up by a little, a slow one
  down by 66 times as much: it comes to rest where three requests in 200 are slow; or a little above what chat has
  without batch, where that has been seen and is more. No window has to fill first, so sparse traffic is as good as
  dense, only slower.
- *Down in proportion, up by steps.* What a slow request costs is a share of the limit, so that one that is far too
  high falls fast; many slow ones at once, more than luck explains, halve it.
- *A cut counts when it has taken effect.* While more batch runs than a cut allows, what chat sees says nothing about
  the limit, and does not move it. A limit that nobody reaches is not raised.
- *No chat, no limit.* After a while without chat all slots but the reserve are batch's; the limit holds again from the
  first chat request on.
- *Chat that is slow without batch moves nothing.* The limit stays, and the state says so. What chat sees while no batch
  runs says nothing about batch: after a good run one request is tried again; after twice as long a run each time, where
  even that one was too much.
- *Waste is bounded.* Where chat finds no free slot it preempts; what that throws away counts against the limit too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from llmq.workers.chat_signal import Evidence

#: The share of requests that may be slow: the objective is a p95.
SLOW_SHARE = 0.05

#: The limit comes to rest where this share is slow. Bursts push the share over it, and where slots run out the slowest
#: requests are far slower than the others: aiming at all 5 % would miss the p95.
AIM = 0.015

#: Where chat without batch has slow requests of its own: so much more than that, and never more than MOST_AIM. Else
#: batch would have to leave for what it is no cause of. After ALONE_HALF requests without batch older ones count half;
#: ALONE_DOUBT good ones are added to them, so that a few say little.
AIM_BESIDE = 0.01
MOST_AIM = 0.04
ALONE_HALF = 200
ALONE_DOUBT = 60

#: A slow request takes this share off the limit; smaller is steadier, and slower to find the place.
DROP = 0.05

#: More slow requests at once than luck explains in one of 500 looks halve the limit.
DOUBT = 0.002

#: Steps are no smaller than with this limit: from 0 it has to come up again.
LEAST_SCALE = 2.0

#: After so long without chat batch may have all slots.
IDLE_S = 20.0

#: So many requests make a run, and a good one where at most so many of them were slow: chat alone has slow ones too,
#: and with none allowed luck decides. Two runs in three are good where one request in 25 is slow.
RUN = 30
LUCK = 1

#: The search: what batch has beside chat in the beginning, as a share of what it may have (at least one request), and
#: how much it grows with each good run.
FIRST_SHARE = 1 / 8
GROWTH = 1.5

#: So long after its last request batch is no cause of what chat sees; and with how much it is tried again.
CLEARED_S = 2.0
PROBE = 1.2

#: Where even one batch request was too much, each trial waits for twice as many good requests, up to MOST_PATIENCE.
#: Where `llmq tune` has found one to be too much, the first trial waits for TUNED_PATIENCE.
MOST_PATIENCE = 16 * RUN
TUNED_PATIENCE = 4 * RUN

#: Over so long the chat in flight is averaged.
LEVEL_S = 10.0

#: Of the batch tokens made lately, the share that preemption may throw away, and by how much the limit gives way.
WASTE_SHARE = 0.04
WASTE_PAUSE_S = 2.0
WASTE_DROP = 0.1


class State(StrEnum):
    """What the governor is doing, for `status`."""

    FIXED = "fixed"  # no objective, or nothing to measure: the reserve alone
    IDLE = "idle"  # no chat: batch has all slots but the reserve
    SEARCH = "search"  # nothing is known yet: batch has a share beside chat, and more of it after each good run
    HOLDS = "holds"  # the objective holds, or a slow request has just moved the limit
    CUT = "cut"  # the objective was broken; the limit was halved, or the cut has yet to take effect
    WASTE = "waste"  # chat preempts too much: the limit leaves it more free slots
    OWN_LOAD = "own_load"  # chat is slow without batch


@dataclass(frozen=True, slots=True)
class Seen:
    """What a worker sees at one moment.

    `fresh` is the evidence since the last step, `recent` that of requests that came since the operating point's
    `since`. `batch` and `chat` are how many requests run, `most` how many of batch may without an objective (slots less
    the reserve). `chat_idle_s` is how long no interactive request was here (None: there never was one), `wasted` the
    share of the batch tokens made lately that preemption threw away.
    """

    at: float
    fresh: Evidence
    recent: Evidence
    batch: int
    chat: int
    most: int
    chat_idle_s: float | None
    wasted: float = 0.0

    @property
    def load(self) -> int:
        """How much is in flight."""
        return self.batch + self.chat


#: A run that has just begun.
NOTHING = Evidence()


@dataclass(frozen=True, slots=True)
class Search:
    """The beginning: batch has `beside` requests beside chat's average; of `seen` requests so far `slow` were slow.

    `reached` says whether it had as many meanwhile.
    """

    beside: float
    seen: int = 0
    slow: int = 0
    reached: bool = False


@dataclass(frozen=True, slots=True)
class Operating:
    """The operating point: the limit, and what is known about it.

    Since `since` at most `most_load` requests were in flight, and lately `chat` of chat on average (counted from
    `chat_from` on); at `batch_at` the last of batch ran. After a good run of `patience` requests one batch request is
    tried, where the limit has room for none. `search` is the beginning, while it lasts.
    Of chat without batch `alone_slow` of `alone_seen` requests were slow, those of long ago counted less.
    """

    limit: float
    at: float
    since: float
    slow_at: float = -math.inf
    run: Evidence = NOTHING
    alone_seen: float = 0.0
    alone_slow: float = 0.0
    patience: int = RUN
    search: Search | None = None
    most_load: int = 0
    chat: float = 0.0
    chat_from: float = 0.0
    batch_at: float = -math.inf
    state: State = State.IDLE

    @property
    def aim(self) -> float:
        """The share of slow requests at which the limit rests: above what chat has without batch, where it is known."""
        own = self.alone_slow / (self.alone_seen + ALONE_DOUBT)
        return min(max(AIM, own + AIM_BESIDE), MOST_AIM)

    @classmethod
    def start(cls, at: float, most: int, tuned: float | None = None) -> Operating:
        """Return the first operating point.

        `tuned` is how many requests in flight held when somebody measured it (`llmq tune`; 0: not even one of batch);
        without it the search begins.
        """
        if tuned is not None:
            patience = RUN if tuned else TUNED_PATIENCE
            return cls(limit=tuned, at=at, since=at, patience=patience, chat_from=at)
        beside = max(1.0, most * FIRST_SHARE)
        return cls(limit=1 + beside, at=at, since=at, search=Search(beside), chat_from=at)

    def batch_cap(self, chat: int, most: int) -> int:
        """Return the most batch requests to run now, beside so many of chat."""
        if self.state is State.IDLE and not chat:
            return most
        if self.search is not None:
            most = min(most, math.ceil(self.search.beside))
        return max(0, min(most, math.floor(self.limit + 1e-6) - chat))


def step(now: Operating, seen: Seen) -> Operating:
    """Return the next operating point."""
    now = replace(
        now,
        at=seen.at,
        most_load=max(now.most_load, seen.load),
        batch_at=seen.at if seen.batch else now.batch_at,
        chat=_average(now, seen),
    )
    if seen.chat_idle_s is None or seen.chat_idle_s > IDLE_S:
        return replace(now, state=State.IDLE, since=seen.at, most_load=seen.load, chat_from=seen.at)
    if now.state is State.IDLE:
        return replace(now, state=State.HOLDS, since=seen.at, most_load=seen.load)
    if now.search is not None:
        now = replace(now, limit=now.chat + now.search.beside)
    if seen.at - now.batch_at > CLEARED_S:
        return _without_batch(now, seen)
    if is_broken(seen.recent):
        return _cut(now, seen)
    if now.state in (State.CUT, State.WASTE) and seen.batch > now.batch_cap(seen.chat, seen.most):
        return replace(now, since=seen.at)
    if seen.wasted > WASTE_SHARE and seen.at - now.slow_at > WASTE_PAUSE_S and seen.batch:
        limit = min(now.limit, now.most_load) * (1 - WASTE_DROP)
        return replace(now, limit=limit, slow_at=seen.at, search=None, state=State.WASTE)
    if now.search is not None and now.search.slow + seen.fresh.slow <= LUCK:
        return _search(now, now.search, seen)
    return _move(now, seen)


def is_broken(evidence: Evidence) -> bool:
    """Whether so many slow requests are more than luck: the binomial tail at SLOW_SHARE is below DOUBT."""
    if evidence.slow < 2 or evidence.slow <= evidence.seen * SLOW_SHARE:
        return False
    fewer, term = 0.0, (1.0 - SLOW_SHARE) ** evidence.seen
    for k in range(evidence.slow):
        fewer += term
        term *= (evidence.seen - k) / (k + 1) * SLOW_SHARE / (1.0 - SLOW_SHARE)
    return 1.0 - fewer < DOUBT


def _without_batch(now: Operating, seen: Seen) -> Operating:
    """Wait without batch, until chat has been well for a while; then leave room for one batch request at least.

    Beside the chat that is there on average: a moment of much chat that went well does not say that as much batch does.
    """
    faded = 0.5 ** (seen.fresh.seen / ALONE_HALF)
    now = replace(
        now,
        alone_seen=now.alone_seen * faded + seen.fresh.seen,
        alone_slow=now.alone_slow * faded + seen.fresh.slow,
    )
    needed = now.patience if now.limit < 1 else RUN
    run = _run(now, seen, needed)
    if run.seen < needed:
        state = State.OWN_LOAD if seen.fresh.slow else now.state
        return replace(now, run=run, since=seen.at, most_load=0, state=state)
    if now.limit < 1:
        now = replace(now, patience=min(2 * now.patience, MOST_PATIENCE))
    limit = max(now.limit, now.chat + min(PROBE, float(seen.most)))
    return replace(now, limit=limit, run=NOTHING, since=seen.at, most_load=0, state=State.HOLDS)


def _run(now: Operating, seen: Seen, needed: int) -> Evidence:
    """Return the run with what is new; of `needed` requests it may hold as large a share of slow ones as a search."""
    run = now.run + seen.fresh
    return NOTHING if run.slow * RUN > LUCK * needed else run


def _cut(now: Operating, seen: Seen) -> Operating:
    """Halve the limit, or what was really in flight where that is less."""
    return replace(
        now,
        limit=min(now.limit, now.most_load) / 2,
        since=seen.at,
        slow_at=seen.at,
        run=NOTHING,
        search=None,
        most_load=seen.load,
        state=State.CUT,
    )


def _average(now: Operating, seen: Seen) -> float:
    """Return how many chat requests were in flight on average over LEVEL_S, or since they were counted."""
    span = min(LEVEL_S, seen.at - now.chat_from)
    return seen.chat if span <= 0 else now.chat + (seen.chat - now.chat) * min(1.0, (seen.at - now.at) / span)


def _search(now: Operating, search: Search, seen: Seen) -> Operating:
    """Count what was seen into the run; at its end batch may have more, if it had what it might."""
    search = Search(
        search.beside,
        search.seen + seen.fresh.seen,
        search.slow + seen.fresh.slow,
        search.reached or seen.batch >= math.floor(search.beside),
    )
    if search.seen >= RUN:
        search = Search(min(search.beside * (GROWTH if search.reached else 1), max(1.0, seen.most)))
    return replace(now, search=search, slow_at=seen.at if seen.fresh.slow else now.slow_at, state=State.SEARCH)


def _move(now: Operating, seen: Seen) -> Operating:
    """Move the limit by each request that was seen; the slow one that ends a search brings what it had let pass."""
    good, slow = seen.fresh.seen - seen.fresh.slow, seen.fresh.slow
    let_pass = now.search.slow if now.search is not None else 0
    step_down = DROP * max(LEAST_SCALE, now.limit)
    limit = now.limit - (slow + let_pass) * step_down
    run = _run(now, seen, RUN)
    # A limit that is not reached says nothing about what would be if it were.
    if seen.load >= math.floor(now.limit):
        limit += good * step_down * now.aim / (1 - now.aim)
    return replace(
        now,
        limit=min(max(limit, 0.0), float(max(seen.most, seen.load))),
        slow_at=seen.at if slow else now.slow_at,
        run=run if run.seen < RUN else NOTHING,
        patience=RUN if run.seen >= RUN else now.patience,
        search=None,
        state=State.HOLDS,
    )
