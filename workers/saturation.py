"""Saturation: how many batch requests fill the engine beside chat.

More requests at a time make more tokens a second, until the engine is full: a GPU with dozens or hundreds, llama.cpp on
one core with one or two. Beyond that, another request costs chat and gives batch nothing, however well the objective
holds. So what batch makes is measured with each number of requests that runs anyway, and no more run than it takes
to make nearly as much as with more. What was measured long ago is forgotten, and so tried again.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Over so long the requests that run are averaged, and their tokens counted.
WINDOW_S = 1.0

#: A number of requests counts once it was measured for so long.
LEAST_S = 10.0

#: What was measured before as much again weighs half.
MOST_S = 30.0

#: What was not measured for so long is forgotten.
FORGET_S = 300.0

#: Compared are so many times as many requests. The noise of one more of twenty is larger than what it gives.
MORE = 1.5

#: They shall make at least this many times as much.
YIELD = 1.1


@dataclass(slots=True)
class _Made:
    """What some number of requests made lately."""

    seconds: float = 0.0
    tokens: float = 0.0
    at: float = 0.0

    def add(self, at: float, seconds: float, tokens: int) -> None:
        if self.seconds > MOST_S:
            self.seconds, self.tokens = self.seconds / 2, self.tokens / 2
        self.seconds, self.tokens, self.at = self.seconds + seconds, self.tokens + tokens, at


class Saturation:
    """Measures what batch makes beside chat; `enough` requests fill the engine (None: not known, or not yet)."""

    def __init__(self) -> None:
        self.enough: int | None = None
        self._made: dict[int, _Made] = {}
        self._began: tuple[float, int] | None = None
        self._seen: list[int] = []

    def note(self, now: float, batch: int, made: int) -> None:
        """So many batch requests run, and batch has made so many tokens in all. To be called some times a second."""
        self._seen.append(batch)
        if self._began is None:
            self._began = now, made
        since, before = self._began
        if now - since < WINDOW_S:
            return
        # A process that stood still has not looked: a long window would outweigh all others.
        if (ran := round(sum(self._seen) / len(self._seen))) and now - since < 2 * WINDOW_S:
            self._made.setdefault(ran, _Made()).add(now, now - since, made - before)
        self._began, self._seen = (now, made), []
        self.enough = self._filling(now)

    def pause(self) -> None:
        """There is no chat, or no objective: what batch makes without chat says nothing of beside it."""
        self._began, self._seen = None, []

    def _filling(self, now: float) -> int | None:
        """Return the least number of requests of which more make hardly more."""
        self._made = {count: made for count, made in self._made.items() if now - made.at <= FORGET_S}
        rates = {count: made.tokens / made.seconds for count, made in self._made.items() if made.seconds >= LEAST_S}
        for count in sorted(rates):
            more = [other for other in rates if other >= MORE * count]
            if more and max(rates[other] for other in more) < rates[count] * YIELD:
                return count
        return None
