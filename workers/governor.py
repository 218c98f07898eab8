"""The governor: how many batch requests a worker may run beside chat, found by what chat sees.

Users state what chat shall see (`ttft_p95`, `itl_p95`); the worker measures it (`chat_signal.py`), and this module
moves the batch cap. Data in, decision out: one step takes the operating point and what was seen since the last one,
and returns the next operating point. It touches neither network nor clock, so it can be run over an hour of recorded
traffic in a second.

How the cap moves, and why:

- *Every request counts, once.* A request within the objective moves the cap up by a little, a slow one down by 32
  times as much: the cap comes to rest where three requests in 100 are slow, a little under the five that a p95 allows.
  No window has to fill first, so sparse traffic is as good as dense, only slower.
- *Down in proportion, up by steps.* What a slow request costs is a share of the cap, so that a cap that is far too
  high falls fast; many slow ones at once, more than luck explains, halve it.
- *What is known comes back.* A burst that halved the cap may have been chat's own. After some requests in a row
  that were not slow, the cap returns near its mean of the last minute, and only from there feels its way.
- *A cut counts when it has taken effect.* While more batch runs than the cap allows, what chat sees says nothing about
  the cap, and does not move it.
- *No chat, no cap.* After a while without chat all slots but the reserve are batch's; when chat comes back, so does the
  cap that was known to hold.
- *A cut without batch is no cut.* Where chat is slow on its own, the cap stays, and the state says so. What chat sees
  while no batch runs says nothing about batch: after a run of requests that were not slow, one is tried again.
- *Waste is bounded.* Where chat finds no free slot it preempts; what that throws away counts against the cap too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from llmq.workers.chat_signal import Evidence

#: The share of requests that may be slow: the objective is a p95.
SLOW_SHARE = 0.05

#: The cap comes to rest where this share is slow. Bursts push the share over it for a while, and what comes back after
#: them does so again: aiming at all 5 % would miss the p95.
AIM = 0.03

#: A slow request takes this share off the cap; smaller is steadier, and slower to find the place.
DROP = 0.1

#: More slow requests at once than luck explains in one of 500 looks halve the cap.
DOUBT = 0.002

#: Steps are no smaller than with this cap: from 0 it has to come up again.
LEAST_SCALE = 2.0

#: After so long without chat batch may have all slots.
IDLE_S = 20.0

#: The cap's mean that is known to hold: over how long, how near it a cut cap comes back, and how fast.
KNOWN_S = 60.0
NEAR = 0.8
RECOVERY_S = 2.0

#: So many requests in a row that were not slow bring it back: one in seven runs of them where one in five is slow.
STREAK = 9

#: So long after its last request batch is no cause of what chat sees; and the cap at which it is tried again.
CLEARED_S = 2.0
PROBE = 1.2

#: What batch has beside the first chat, as a share of what it may have: nothing is known yet. From there each streak
#: doubles the cap, until the first slow request.
FIRST_SHARE = 1 / 8

#: Of the batch tokens made lately, the share that preemption may throw away, and by how much the cap gives way.
WASTE_SHARE = 0.04
WASTE_PAUSE_S = 2.0


class State(StrEnum):
    """What the governor is doing, for `status`."""

    FIXED = "fixed"  # no objective, or nothing to measure: the reserve alone
    IDLE = "idle"  # no chat: batch has all slots but the reserve
    HOLDS = "holds"  # the objective holds, or a slow request has just moved the cap
    CUT = "cut"  # the objective was broken; the cap was halved, or the cut has yet to take effect
    WASTE = "waste"  # chat preempts too much: the cap leaves it more free slots
    OWN_LOAD = "own_load"  # chat is slow without batch


@dataclass(frozen=True, slots=True)
class Seen:
    """What a worker sees at one moment.

    `fresh` is the evidence since the last step, `recent` that of requests that came since the operating point's
    `since`. `batch` is how many batch requests run, `most` how many may without an objective (slots less the
    reserve). `chat_idle_s` is how long no interactive request was here (None: there never was one), `wasted` the share
    of the batch tokens made lately that preemption threw away.
    """

    at: float
    fresh: Evidence
    recent: Evidence
    batch: int
    most: int
    chat_idle_s: float | None
    wasted: float = 0.0


@dataclass(frozen=True, slots=True)
class Operating:
    """The operating point: the batch cap, and what is known about it."""

    cap: float
    known: float
    at: float
    since: float
    slow_at: float = -math.inf
    streak: int = 0
    doubling: bool = True
    most_batch: int = 0
    batch_at: float = -math.inf
    state: State = State.IDLE

    @classmethod
    def start(cls, at: float, most: int, tuned: float | None = None) -> Operating:
        """Return the first operating point: without chat batch may have what is free; beside it what was measured.

        `tuned` is how many batch requests held beside chat when somebody measured it (`llmq tune`); without it a small
        share is the beginning.
        """
        if tuned is not None:
            return cls(cap=most, known=min(tuned, float(most)), at=at, since=at, doubling=False)
        return cls(cap=most, known=max(1.0, most * FIRST_SHARE), at=at, since=at)

    @property
    def batch_cap(self) -> int:
        """The most batch requests to run now."""
        return int(self.cap + 1e-6)


def step(now: Operating, seen: Seen) -> Operating:
    """Return the next operating point."""
    passed = max(0.0, seen.at - now.at)
    now = replace(
        now,
        at=seen.at,
        most_batch=max(now.most_batch, seen.batch),
        batch_at=seen.at if seen.batch else now.batch_at,
        cap=min(now.cap, seen.most),
    )
    if seen.chat_idle_s is None or seen.chat_idle_s > IDLE_S:
        return replace(now, cap=seen.most, state=State.IDLE, since=seen.at, most_batch=seen.batch)
    if now.state is State.IDLE:
        return replace(now, cap=min(now.known, seen.most), state=State.HOLDS, since=seen.at, most_batch=seen.batch)
    if now.cap < 1 and seen.at - now.batch_at > CLEARED_S:
        return _without_batch(now, seen)
    if now.most_batch == 0 and seen.fresh.slow:
        return replace(now, state=State.OWN_LOAD, since=seen.at)
    if is_broken(seen.recent):
        cap = min(now.cap, now.most_batch) / 2
        return replace(
            now,
            cap=cap,
            since=seen.at,
            slow_at=seen.at,
            streak=0,
            doubling=False,
            most_batch=seen.batch,
            state=State.CUT,
        )
    if seen.batch > now.batch_cap and now.state in (State.CUT, State.WASTE):
        return replace(now, since=seen.at)
    if seen.wasted > WASTE_SHARE and seen.at - now.slow_at > WASTE_PAUSE_S and seen.batch:
        cap = max(0.0, min(now.cap, now.most_batch) * (1 - DROP))
        return replace(now, cap=cap, known=min(now.known, cap), slow_at=seen.at, state=State.WASTE)
    return _move(now, seen, passed)


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
    """Wait at a cap of nothing, until chat has been well for a while."""
    good, slow = seen.fresh.seen - seen.fresh.slow, seen.fresh.slow
    streak = 0 if slow else now.streak + good
    if streak >= STREAK:
        return replace(now, cap=min(PROBE, float(seen.most)), streak=0, since=seen.at, most_batch=0, state=State.HOLDS)
    state = State.OWN_LOAD if slow else now.state
    return replace(now, streak=streak, since=seen.at, most_batch=0, state=state)


def _move(now: Operating, seen: Seen, passed: float) -> Operating:
    """Move the cap by each request that was seen."""
    good, slow = seen.fresh.seen - seen.fresh.slow, seen.fresh.slow
    scale, known = max(LEAST_SCALE, now.cap), now.known
    cap = now.cap - slow * DROP * scale
    slow_at = seen.at if slow else now.slow_at
    streak = 0 if slow else now.streak + good
    # A cap that batch does not reach says nothing about what would be if it did.
    if seen.batch >= now.batch_cap:
        cap += good * DROP * scale * AIM / (1 - AIM)
        if now.doubling and streak >= STREAK:
            cap, streak = cap * 2, 0
    if cap < NEAR * known and streak >= STREAK:
        cap = min(NEAR * known, cap + known * passed / RECOVERY_S)
        if cap >= NEAR * known:
            known = cap  # spent: what held once is not believed twice
    cap = min(max(cap, 0.0), float(seen.most))
    known += (cap - known) * min(1.0, passed / KNOWN_S)
    return replace(
        now, cap=cap, known=known, slow_at=slow_at, streak=streak, doubling=now.doubling and not slow, state=State.HOLDS
    )
