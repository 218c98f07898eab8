"""The gate: what a worker may ask of its engine while that is overloaded or away.

Overload (HTTP 429, 503, ...) stops new batch for a while, doubling from 0.5 to 30 s, and halves the batch cap; each
quiet second lets the cap grow again. A job that is refused again and again while others are answered is no overload:
it waits alone. An engine that is gone stops everything until a probe finds it healthy. The gate holds this state and
answers questions about it; it sends nothing, and takes its time from the caller.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0

#: Bounds of a `Retry-After`: a daily quota is asked about again each hour, and a worker is not stopped for years.
LEAST_ASKED_S, LONGEST_ASKED_S = 0.1, 3600.0

#: After this long without a refusal the cap grows by one: slow enough to find the limit, not to hit it each second.
GROWTH_INTERVAL_S = 1.0

#: Refused this often, with answers to others each time in between, it is the job that the engine refuses.
STUBBORN = 3

#: Refused jobs that are remembered; of more at once, each is one of very many, and an overload.
REMEMBERED = 1000


@dataclass(slots=True)
class _Refused:
    """How often a job was refused, and how many answers others had had by the last time."""

    times: int
    answers: int


class Gate:
    """Whether, and how much, a worker of `concurrency` slots may ask of its engine."""

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency
        self._pause_s = 0.0
        self._closed_until = 0.0
        self._refused_at = -math.inf
        self._cap: int | None = None
        self._grown_at = 0.0
        self._gone = False
        #: The queue is encrypted with a key that is not here: nothing is claimed until it is another one again.
        self.locked = False
        self._answers = 0
        self._refused: dict[Hashable, _Refused] = {}

    @property
    def gone(self) -> bool:
        """Whether the engine is away: nothing is claimed until `back`."""
        return self._gone

    def paused(self, now: float) -> bool:
        """Whether batch waits because the engine refused."""
        return now < self._closed_until

    def refuses(self, now: float) -> bool:
        """Whether batch waits even past its deadline; for 30 s after a refusal at most, whatever `Retry-After` says."""
        return now < min(self._closed_until, self._refused_at + LONGEST_PAUSE_S)

    def answered(self, job: Hashable) -> None:
        """Note that the engine answered a job."""
        self._answers += 1
        self._refused.pop(job, None)

    def overloaded(self, now: float, running_batch: int, retry_after: float | None, job: Hashable) -> float:
        """Note a refusal of `job`; return for how many seconds it, or all batch, pauses.

        A `Retry-After` wins over the doubling pause; one of 0 says nothing, and obeyed would be a storm of requests.
        """
        times = self._count_refusal(job)
        asked = min(LONGEST_ASKED_S, max(LEAST_ASKED_S, retry_after)) if retry_after else None
        if times > STUBBORN:
            return asked if asked is not None else min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(times, 10))
        self._refused_at = now
        if now >= self._closed_until:  # refusals that come together are one overload
            self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2 or FIRST_PAUSE_S)
            current = self._concurrency if self._cap is None else self._cap
            self._cap = max(1, min(current, running_batch + 1) // 2)
        pause = asked if asked is not None else self._pause_s
        self._closed_until = max(self._closed_until, now + pause)
        self._grown_at = self._closed_until
        return pause

    def _count_refusal(self, job: Hashable) -> int:
        """Return how often the engine has refused a job while it answered others in between."""
        known = self._refused.setdefault(job, _Refused(0, -1))
        if self._answers > known.answers:
            known.times += 1
            known.answers = self._answers
        if len(self._refused) > REMEMBERED:
            del self._refused[next(iter(self._refused))]
        return known.times

    def lost(self) -> None:
        """Note that the engine is gone."""
        self._gone = True

    def back(self) -> None:
        """Note that a probe found the engine healthy."""
        self._gone = False

    def batch_cap(self, now: float) -> int | None:
        """Return the most batch requests to run now; None is no limit."""
        if now < self._closed_until:
            return 0
        if self._cap is None:
            return None
        grown = int((now - self._grown_at) / GROWTH_INTERVAL_S)
        if grown > 0:
            self._cap += grown
            self._grown_at = now
            if self._cap >= self._concurrency:
                self._cap, self._pause_s = None, 0.0
        return self._cap
