"""Saturation: how many batch requests fill the engine.

More requests at a time make more tokens a second, until the engine is full: a GPU with dozens or hundreds, llama.cpp on
one core with one or two. Beyond that, another request costs chat and gives batch nothing, however well the objective
holds. So what batch makes is measured with each number of requests that runs anyway, and beside chat no more run than
it takes to make nearly as much as with more.

Measured is the time between chat requests: beside chat batch makes less, and has fewer slots just then, so that fewer
would look worse than they are. Compared is what was measured within a minute: machines are faster now and slower then.
What was found is forgotten after five minutes: the lines, or the engine, may have become others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: A number of requests counts once it was measured for so long.
LEAST_S = 5.0

#: What was measured before as much again weighs half.
MOST_S = 20.0

#: What was measured longer ago is not compared.
RECENT_S = 60.0

#: What was found so long ago is forgotten.
FORGET_S = 300.0

#: A process that stood still has not looked: what ran in a longer time between two notes is not known.
STALL_S = 1.0

#: Numbers of requests that differ by less are measured together: each for itself would run too seldom.
LEVEL = 1.5

#: Compared are so many times as many requests. The noise of one more of twenty is larger than what it gives.
MORE = 1.4

#: They shall make at least this many times as much.
YIELD = 1.1


@dataclass(slots=True)
class _Made:
    """What about the same number of requests made lately; `requests` are request-seconds."""

    seconds: float = 0.0
    requests: float = 0.0
    tokens: float = 0.0
    at: float = -math.inf

    @property
    def count(self) -> float:
        """How many requests that were, on average."""
        return self.requests / self.seconds

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    def counts(self, now: float) -> bool:
        """Whether it was measured for long enough, and lately."""
        return self.seconds >= LEAST_S and now - self.at <= RECENT_S

    def add(self, at: float, seconds: float, requests: int, tokens: int) -> None:
        kept = 0.0 if at - self.at > RECENT_S else 0.5 if self.seconds > MOST_S else 1.0
        self.seconds = self.seconds * kept + seconds
        self.requests = self.requests * kept + seconds * requests
        self.tokens = self.tokens * kept + tokens
        self.at = at


@dataclass(frozen=True, slots=True)
class _Noted:
    """What ran since some moment, and how many tokens batch had made before."""

    at: float
    batch: int
    chat: int
    made: int


class Saturation:
    """Measures what batch makes; `enough` requests fill the engine (None: not known, or not yet)."""

    def __init__(self) -> None:
        self.enough: int | None = None
        self._found_at = 0.0
        self._made: dict[int, _Made] = {}
        self._noted: _Noted | None = None

    def note(self, now: float, batch: int, chat: int, made: int) -> None:
        """So many requests run from now on, and batch has made so many tokens: at each change, and in between."""
        ran = self._noted
        if ran is not None and ran.batch and not ran.chat and now - ran.at < STALL_S:
            level = round(math.log(ran.batch, LEVEL))
            self._made.setdefault(level, _Made()).add(now, now - ran.at, ran.batch, made - ran.made)
        self._noted = _Noted(now, batch, chat, made)

    def look(self, now: float) -> None:
        """Find out what is enough. To be called some times a second."""
        if now - self._found_at > FORGET_S:
            self.enough = None
        known = [made for _, made in sorted(self._made.items()) if made.counts(now)]
        for made in known:
            more = [other.rate for other in known if other.count >= MORE * made.count]
            if more and max(more) < made.rate * YIELD:
                # One that is found to be enough keeps more from running: only fewer may take its place.
                if self.enough is None or made.count < self.enough:
                    self.enough, self._found_at = math.ceil(made.count - 0.1), now
                return
