"""The chat signal: how long chat waits at this worker, as the governor reads it.

It remembers when each interactive request was submitted and when its first token came, and how steadily the others
followed, for a minute at most. It holds no opinion: what is slow is asked with limits, and what follows from it is
decided in `governor.py`. A request that still waits for its first token counts as soon as it is over the limit: a
burst is seen while it lasts, not when its answers come.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

#: Samples older than this say nothing about now.
REMEMBERED_S = 60.0

#: And no more of them: a second of them is evidence enough.
MOST_SAMPLES = 4096

#: The gaps between the tokens of one stream make one sample for each so many of them; it is slow where more than one
#: gap was. One sample a gap would let a single long stream outvote all first tokens.
GAPS_A_SAMPLE = 20

#: An objective is far looser with so many times the limit.
FAR = 1.25

#: So many answers without a first token, and none with one: this engine's chat cannot be measured. Chat that fails, or
#: that its client gives up, says nothing of that: the governor would forget all that it has found when an engine dies.
BLIND_AFTER = 5


@dataclass(frozen=True, slots=True)
class Objective:
    """What chat shall see, in seconds; None where nothing is asked."""

    ttft_p95_s: float | None = None
    itl_p95_s: float | None = None

    @property
    def stated(self) -> bool:
        """Whether anything is asked."""
        return bool(self.limits_s)

    @property
    def limits_s(self) -> tuple[float, ...]:
        """What is asked, in seconds."""
        return tuple(limit for limit in (self.ttft_p95_s, self.itl_p95_s) if limit is not None)

    def far_looser_than(self, other: Objective) -> bool:
        """Whether this is far easier to keep, and in nothing harder."""
        pairs = [
            (math.inf if mine is None else mine, math.inf if its is None else its)
            for mine, its in ((self.ttft_p95_s, other.ttft_p95_s), (self.itl_p95_s, other.itl_p95_s))
        ]
        return all(mine >= its for mine, its in pairs) and any(mine >= FAR * its and mine > its for mine, its in pairs)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Of `seen` samples, how many were over their limit (`slow`)."""

    seen: int = 0
    slow: int = 0

    def __add__(self, other: Evidence) -> Evidence:
        return Evidence(self.seen + other.seen, self.slow + other.slow)


@dataclass(slots=True)
class Stream:
    """An answer under way: when its last token came, and how the gaps since the last sample were."""

    last_at: float
    gaps: int = 0
    slow: int = 0


@dataclass(slots=True)
class _Samples:
    """Samples of one kind: (when, seconds, slow)."""

    kept: deque[tuple[float, float, bool]] = field(default_factory=lambda: deque(maxlen=MOST_SAMPLES))
    fresh: Evidence = Evidence()

    def add(self, at: float, seconds: float, slow: bool) -> None:
        self.kept.append((at, seconds, slow))
        self.fresh += Evidence(1, int(slow))

    def since(self, since: float) -> Evidence:
        """Return the evidence of what began after `since`."""
        seen = slow = 0
        for at, seconds, was_slow in reversed(self.kept):
            if at <= since:
                break
            if at - seconds >= since:
                seen += 1
                slow += was_slow
        return Evidence(seen, slow)

    def p95(self, since: float) -> float | None:
        values = []
        for at, seconds, _ in reversed(self.kept):
            if at <= since:
                break
            values.append(seconds)
        values.sort()
        return values[min(len(values) - 1, int(len(values) * 0.95))] if values else None


class ChatSignal:
    """Collects what one worker's interactive requests see; times are seconds of one monotonic clock.

    `objective` says what is slow; it may be changed at any time, and holds for what comes from then on.
    """

    def __init__(self, objective: Objective = Objective()) -> None:
        self.objective = objective
        self._firsts = _Samples()
        self._gaps = _Samples()
        self._waiting: dict[Hashable, float] = {}
        self._streaming: dict[Hashable, Stream] = {}
        self._without = 0
        self.last_at: float | None = None

    @property
    def present(self) -> bool:
        """Whether any interactive request waits or runs here now."""
        return bool(self._waiting or self._streaming)

    @property
    def in_flight(self) -> int:
        """How many requests are here."""
        return len(self._waiting) + len(self._streaming)

    @property
    def waiting(self) -> int:
        """How many requests wait for their first token."""
        return len(self._waiting)

    @property
    def blind(self) -> bool:
        """Whether requests end without a first token ever being seen: nothing can be measured."""
        return self._without >= BLIND_AFTER

    def idle_s(self, now: float) -> float | None:
        """Return how long no interactive request was here; None: there never was one."""
        if self.present:
            return 0.0
        return None if self.last_at is None else now - self.last_at

    def taken(self, name: Hashable, now: float, waited_s: float) -> None:
        """A request that had waited `waited_s` seconds for its start is here."""
        self._waiting[name] = now - waited_s
        self.last_at = now

    def begun(self, name: Hashable, now: float) -> Stream:
        """The first token of a request came; return what `token` is told of its others."""
        stream = Stream(now)
        if (submitted := self._waiting.pop(name, None)) is not None:
            limit = self.objective.ttft_p95_s
            self._firsts.add(now, now - submitted, limit is not None and now - submitted > limit)
            self._streaming[name] = stream
            self._without = 0
        return stream

    def token(self, stream: Stream, now: float) -> None:
        """Another token came."""
        gap, stream.last_at = now - stream.last_at, now
        stream.gaps += 1
        if (limit := self.objective.itl_p95_s) is not None and gap > limit:
            stream.slow += 1
        if stream.gaps == GAPS_A_SAMPLE:
            self._gaps.add(now, gap, stream.slow > 1)
            stream.gaps = stream.slow = 0

    def ended(self, name: Hashable, now: float, answered: bool = True, given_up: bool = False) -> None:
        """A request is over, with an answer or without; `given_up` is whether who asked would wait no longer.

        What was given up after more than the objective was slow; what failed says nothing of that.
        """
        if (came := self._waiting.pop(name, None)) is not None:
            self._without += answered
            limit = self.objective.ttft_p95_s
            if given_up and limit is not None and now - came > limit:
                self._firsts.add(now, now - came, True)
        elif self._streaming.pop(name, None) is None:
            return
        self.last_at = now

    def fresh(self) -> Evidence:
        """Return the evidence of what came since this was asked last."""
        found = self._evidence(self._firsts.fresh, self._gaps.fresh)
        self._firsts.fresh = self._gaps.fresh = Evidence()
        return found

    def since(self, since: float, now: float) -> Evidence:
        """Return the evidence of what began after `since`, with what is over its limit now and has not come yet."""
        since = max(since, now - REMEMBERED_S)
        return self._evidence(self._firsts.since(since), self._gaps.since(since)) + self._overdue(since, now)

    def over(self, limit_s: float, since: float, now: float) -> Evidence:
        """Return how many first tokens since then, and waits that last, were over another limit than the objective."""
        found = [seconds > limit_s for at, seconds, _ in self._firsts.kept if at > since]
        late = sum(1 for came in self._waiting.values() if now - came > limit_s)
        return Evidence(len(found) + late, sum(found) + late)

    def ttft_p95(self, now: float, window_s: float) -> float | None:
        """Return the p95 of times to first token in the window; None where nothing was seen."""
        return self._firsts.p95(now - window_s)

    def itl_p95(self, now: float, window_s: float) -> float | None:
        """Return the p95 of times between tokens in the window, of a sample; None where nothing was seen."""
        return self._gaps.p95(now - window_s)

    def _evidence(self, firsts: Evidence, gaps: Evidence) -> Evidence:
        asked = self.objective
        return (firsts if asked.ttft_p95_s is not None else Evidence()) + (
            gaps if asked.itl_p95_s is not None else Evidence()
        )

    def _overdue(self, since: float, now: float) -> Evidence:
        late, asked = 0, self.objective
        if asked.ttft_p95_s is not None:
            limit = asked.ttft_p95_s
            late += sum(1 for came in self._waiting.values() if came >= since and now - came > limit)
        if asked.itl_p95_s is not None:
            # A stream that only waits for its end looks silent too: a few gaps of that length, not one, are silence.
            limit = 3 * asked.itl_p95_s
            late += sum(1 for s in self._streaming.values() if s.last_at >= since and now - s.last_at > limit)
        return Evidence(late, late)
