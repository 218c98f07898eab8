"""The gate: what a worker may ask of its engine while that is overloaded or away.

Overload (HTTP 429, 503, ...) stops new batch for a while, doubling from 0.5 to 30 s, and halves the batch cap; each
quiet second lets the cap grow again. An engine that is gone stops everything until a probe finds it healthy. The gate
holds this state and answers questions about it; it sends nothing, and takes its time from the caller.
"""

from __future__ import annotations

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0

#: After this long without a refusal the cap grows by one: slow enough to find the limit, not to hit it each second.
GROWTH_INTERVAL_S = 1.0


class Gate:
    """Whether, and how much, a worker of `concurrency` slots may ask of its engine."""

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency
        self._pause_s = 0.0
        self._closed_until = 0.0
        self._cap: int | None = None
        self._grown_at = 0.0
        self._gone = False

    @property
    def gone(self) -> bool:
        """Whether the engine is away: nothing is claimed until `back`."""
        return self._gone

    def overloaded(self, now: float, running_batch: int, retry_after: float | None) -> float:
        """Note a refusal; return for how many seconds batch pauses. A `Retry-After` wins over the doubling pause."""
        if now >= self._closed_until:  # refusals that come together are one overload
            self._pause_s = min(LONGEST_PAUSE_S, self._pause_s * 2 or FIRST_PAUSE_S)
            current = self._concurrency if self._cap is None else self._cap
            self._cap = max(1, min(current, running_batch + 1) // 2)
        pause = retry_after if retry_after is not None else self._pause_s
        self._closed_until = max(self._closed_until, now + pause)
        self._grown_at = self._closed_until
        return pause

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
