"""The governor: how many batch requests a worker may run beside chat, found by what chat sees.

Users state what chat shall see (`ttft_p95`, `itl_p95`); the worker measures it (`chat_signal.py`), and this module
moves a limit. Data in, decision out: one step takes the operating point and what was seen since the last one, and
returns the next operating point. It touches neither network nor clock, so it can be run over an hour of recorded
traffic in a second.

The limit is on all that is in flight: batch may have what chat in flight leaves of it. So batch makes room the moment
that chat comes, before anybody was slow, and has it back when chat goes. How the limit moves, and why:

- *It begins with a search.* Nothing is known yet: batch has a small share of the slots beside the chat that there is on
  average, and half as much again after each run of requests in which it had its share and at most one was slow. The
  second slow one ends the search, and so does an engine that is full. While chat is here, batch has no more than its
  share, however little chat it is.
- *Every request counts, once.* From then on a request within the objective moves the limit up by a little, a slow one
  down by 39 times as much: it comes to rest where one request in 40 is slow, half of what a p95 allows. No window has
  to fill first, so sparse traffic is as good as dense, only slower.
- *Down in proportion, up by steps.* What a slow request costs is a share of the limit, so that one that is far too
  high falls fast; many slow ones at once, more than luck explains, halve it.
- *Whole requests where only one is left.* Beside the chat that there is on average, less than two of batch are one or
  none. There a slow request takes a whole one off the limit, so that batch is out, and 32 good ones bring it back (19
  where one fills the engine): they count without batch too, as long as it is the limit that keeps batch out.
- *A limit is judged by what it allows.* While more batch runs, because a cut has yet to take effect or chat has just
  come back, slow requests say nothing about it, and do not lower it. A limit that nobody reaches is not raised, but
  where the engine is full: batch has all that it needs there, and good requests pay back what slow ones took.
- *No chat, no limit.* After a while without chat all slots but the reserve are batch's; the limit holds again from the
  first chat request on.
- *Chat that is slow without batch moves nothing.* It is chat's own, and the state says so.
- *Waste is bounded.* Where chat finds no free slot it preempts; what that throws away counts against the limit too,
  but not what chat's coming back throws away.
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
AIM = 0.025

#: A slow request takes this share off the limit; smaller is steadier, and slower to find the place.
DROP = 0.04

#: Where the limit leaves batch less than LOW beside chat's average, a slow request takes LOW_DROP off: a whole one. One
#: of batch takes no slots that bursts need, so the limit rests nearer to what a p95 allows there, at LOW_AIM; and where
#: one fills the engine, so that no more than one can come of it, at all of SLOW_SHARE. It goes down to LEAST: many slow
#: requests that come together keep batch out for no longer than two.
LOW = 2.0
LOW_DROP = 1.0
LOW_AIM = 0.03
LEAST = -1.0

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

#: So long after its last request batch is no cause of what chat sees.
CLEARED_S = 2.0

#: What runs over the limit for longer than this is not what a cut left to end, but what may not be preempted.
PROTECTED_S = 10.0

#: Over so long the chat in flight is averaged.
LEVEL_S = 10.0

#: Of the batch tokens made lately, the share that preemption may throw away, and by how much the limit gives way, once
#: in so long. What is thrown away sooner after chat came back is a consequence of that.
WASTE_SHARE = 0.04
WASTE_PAUSE_S = 2.0
WASTE_DROP = 0.1


class State(StrEnum):
    """What the governor is doing, for `status`."""

    FIXED = "fixed"  # no objective, or nothing to measure: the reserve alone
    IDLE = "idle"  # no chat: batch has all slots but the reserve
    SEARCH = "search"  # nothing is known yet: batch has a share beside chat, and more of it after each good run
    HOLDS = "holds"  # the objective holds, or a slow request has just moved the limit
    CUT = "cut"  # the objective was broken, and batch that runs over the limit is preempted
    WASTE = "waste"  # chat preempts too much: the limit leaves it more free slots
    OWN_LOAD = "own_load"  # chat is slow without batch


@dataclass(frozen=True, slots=True)
class Seen:
    """What a worker sees at one moment.

    `fresh` is the evidence since the last step, `recent` that of requests that came since the operating point's
    `since`. `batch` and `chat` are how many requests run, `most` how many of batch may without an objective (slots less
    the reserve). `chat_idle_s` is how long no interactive request was here (None: there never was one), `wasted` the
    share of the batch tokens made lately that preemption threw away, the last of them at `wasted_at`, `enough` how many
    of batch fill the engine (None: not known).
    """

    at: float
    fresh: Evidence
    recent: Evidence
    batch: int
    chat: int
    most: int
    chat_idle_s: float | None
    wasted: float = 0.0
    wasted_at: float = -math.inf
    enough: int | None = None

    @property
    def load(self) -> int:
        """How much is in flight."""
        return self.batch + self.chat

    @property
    def full(self) -> bool:
        """Whether batch has all that it may, not for chat but because more would make no more."""
        return self.enough is not None and self.batch >= self.enough


@dataclass(frozen=True, slots=True)
class Search:
    """The beginning: batch has `beside` requests beside chat's average; of `seen` requests so far `slow` were slow.

    `reached` is whether as many have run meanwhile.
    """

    beside: float
    seen: int = 0
    slow: int = 0
    reached: bool = False

    def counted(self, seen: Seen) -> Search:
        """Return it with what was seen since the last step."""
        return replace(
            self,
            seen=self.seen + seen.fresh.seen,
            slow=self.slow + seen.fresh.slow,
            reached=self.reached or seen.batch >= math.floor(self.beside),
        )

    def grown(self, most: int) -> Search:
        """Return the next run of the search: with more, where batch had what it might."""
        return Search(min(self.beside * GROWTH, max(1.0, most)) if self.reached else self.beside)


@dataclass(frozen=True, slots=True)
class Operating:
    """The operating point: the limit, and what is known about it.

    Since `since` at most `most_load` requests were in flight, and lately `chat` of chat on average (counted from
    `chat_from` on); at `batch_at` the last of batch ran. `search` is the beginning, while it lasts. At
    `slow_at` a request was slow or the limit gave way, at `back_at` chat came back or batch was cut for that, for the
    last time; `over` is whether batch has run over the limit since.
    """

    limit: float
    at: float
    since: float
    slow_at: float = -math.inf
    back_at: float = -math.inf
    over: bool = False
    search: Search | None = None
    most_load: int = 0
    chat: float = 0.0
    chat_from: float = 0.0
    batch_at: float = -math.inf
    state: State = State.IDLE

    @classmethod
    def start(cls, at: float, most: int, tuned: float | None = None) -> Operating:
        """Return the first operating point.

        `tuned` is how many requests in flight held when somebody measured it (`llmq tune`; 0: not even one of batch);
        without it the search begins.
        """
        if tuned is not None:
            return cls(limit=tuned or LEAST, at=at, since=at, chat_from=at)
        beside = max(1.0, most * FIRST_SHARE)
        return cls(limit=1 + beside, at=at, since=at, search=Search(beside), chat_from=at)

    def batch_cap(self, chat: int, most: int) -> int:
        """Return the most batch requests to run now, beside so many of chat."""
        if self.state is State.IDLE and not chat:
            return most
        if self.search is not None:
            most = min(most, math.ceil(self.search.beside))
        return min(most, max(math.floor(self.limit + 1e-6) - chat, 0 if self.keeps_out else 1))

    @property
    def keeps_out(self) -> bool:
        """Whether the limit has no room for a batch request beside the chat that there is on average.

        Where it has, one stays through a moment of more chat.
        """
        return self.limit < self.chat + 1


def step(now: Operating, seen: Seen) -> Operating:
    """Return the next operating point."""
    now = replace(
        now,
        at=seen.at,
        most_load=max(now.most_load, seen.load),
        batch_at=seen.at if seen.batch else now.batch_at,
        chat=_average(now, seen),
    )
    away = seen.chat_idle_s is None or seen.chat_idle_s > IDLE_S
    cleared = seen.at - now.batch_at > CLEARED_S
    if away:
        return replace(now, state=State.IDLE, since=seen.at, most_load=seen.load, chat_from=seen.at)
    if now.state is State.IDLE:
        return replace(now, state=State.HOLDS, since=seen.at, most_load=seen.load, back_at=seen.at, over=True)
    if now.search is not None:
        now = replace(now, limit=now.chat + now.search.beside)
    if cleared:
        return _without_batch(now, seen)
    over = now.over and seen.batch > now.batch_cap(seen.chat, seen.most)
    if is_broken(seen.recent):
        return _cut(now, seen, chat_is_back=over and now.state is State.HOLDS)
    if over:
        return _over(now, seen)
    now = replace(now, over=False)
    wasteful = seen.wasted > WASTE_SHARE and seen.wasted_at > now.back_at + WASTE_PAUSE_S
    if wasteful and seen.at - now.slow_at > WASTE_PAUSE_S and seen.batch:
        limit = _lowered(now, WASTE_DROP)
        return replace(now, limit=limit, slow_at=seen.at, over=True, search=None, state=State.WASTE)
    if now.search is not None and not seen.full and now.search.slow + seen.fresh.slow <= LUCK:
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


def loosened(now: Operating) -> Operating:
    """Return the operating point after the objective became far easier to keep: a search, from where batch is."""
    search = Search(max(1.0, now.limit - now.chat))
    return replace(now, limit=now.chat + search.beside, search=search)


def _without_batch(now: Operating, seen: Seen) -> Operating:
    """Let good requests count, where the limit keeps batch out; slow ones are chat's own, and say nothing of batch."""
    said = State.HOLDS if now.search is None else State.SEARCH
    state = State.OWN_LOAD if seen.fresh.slow else said if seen.fresh.seen else now.state
    return replace(_paid_back(now, seen), since=seen.at, most_load=0, over=False, state=state)


def _cut(now: Operating, seen: Seen, *, chat_is_back: bool) -> Operating:
    """Halve the limit; where what runs over it since chat came back may be why, have that preempted, and no more."""
    cut = replace(now, since=seen.at, slow_at=seen.at, over=True, most_load=seen.load, state=State.CUT)
    if chat_is_back:
        return replace(cut, back_at=seen.at)
    return replace(cut, limit=_lowered(now, 0.5), search=None)


def _over(now: Operating, seen: Seen) -> Operating:
    """Wait until batch is back within the limit: what is slow meanwhile says nothing of it.

    What may not be preempted can keep batch over a limit that keeps it out, one after the other: after a while good
    requests count there too. Evidence begins anew after a cut; where chat has come back, it is gathered.
    """
    if seen.at - max(now.slow_at, now.back_at) > PROTECTED_S:
        now = _paid_back(now, seen)
    return now if now.state is State.HOLDS else replace(now, since=seen.at)


def _lowered(now: Operating, share: float) -> float:
    """Return what is left of the limit, or of what was really in flight, less a share; one below zero stays."""
    limit = min(now.limit, now.most_load)
    return limit - share * max(0.0, limit)


def _average(now: Operating, seen: Seen) -> float:
    """Return how many chat requests were in flight on average over LEVEL_S, or since they were counted."""
    span = min(LEVEL_S, seen.at - now.chat_from)
    return seen.chat if span <= 0 else now.chat + (seen.chat - now.chat) * min(1.0, (seen.at - now.at) / span)


def _search(now: Operating, search: Search, seen: Seen) -> Operating:
    """Count what was seen into the run; at its end batch may have more, if it had what it might."""
    search = search.counted(seen)
    return replace(
        now,
        search=search if search.seen < RUN else search.grown(seen.most),
        slow_at=seen.at if seen.fresh.slow else now.slow_at,
        state=State.SEARCH,
    )


def _move(now: Operating, seen: Seen) -> Operating:
    """Move the limit by each request that was seen; the slow one that ends a search brings what it had let pass."""
    good, slow = seen.fresh.seen - seen.fresh.slow, seen.fresh.slow
    let_pass = now.search.slow if now.search is not None else 0
    down, up = _steps(now, seen.enough)
    limit = now.limit - (slow + let_pass) * down
    # A limit that is not reached says nothing about what would be if it were.
    if now.keeps_out or seen.load >= math.floor(now.limit) or seen.full:
        limit += good * up
    return replace(
        now,
        limit=_bounded(limit, seen),
        slow_at=seen.at if slow else now.slow_at,
        search=None,
        state=State.HOLDS,
    )


def _paid_back(now: Operating, seen: Seen) -> Operating:
    """Let the good requests count alone, where the limit keeps batch out.

    From LEAST beside the chat that there is on average: more chat than before is no reason to be out for longer.
    """
    if now.search is not None or not now.keeps_out:
        return now
    _, up = _steps(now, seen.enough)
    limit = max(now.limit, now.chat + LEAST) + (seen.fresh.seen - seen.fresh.slow) * up
    return replace(now, limit=_bounded(limit, seen))


def _steps(now: Operating, enough: int | None) -> tuple[float, float]:
    """Return what a slow request takes off the limit, and what a good one adds."""
    if now.limit >= now.chat + LOW:
        down, aim = DROP * max(LEAST_SCALE, now.limit), AIM
    else:
        down, aim = LOW_DROP, SLOW_SHARE if enough == 1 else LOW_AIM
    return down, down * aim / (1 - aim)


def _bounded(limit: float, seen: Seen) -> float:
    """Return a limit that is no lower than LEAST, and no higher than what could be in flight."""
    return min(max(limit, LEAST), float(max(seen.most, seen.load)))
