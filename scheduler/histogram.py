"""A histogram of durations in little space: counts in buckets that grow by a constant factor.

Histograms of many workers add up to one of the fleet, which averages of percentiles would not; a quantile is off by at
most 5 %. The text form is what a heartbeat carries.
"""

from __future__ import annotations

import math

#: Buckets a doubling: each is 9 % wider than the one before, so that its middle is within 5 % of all in it.
PER_DOUBLING = 8

#: Shorter is 0 to anybody who waits; longer than 11 days is one bucket.
SHORTEST_S = 0.001
LAST_BUCKET = PER_DOUBLING * 30

#: Above any count, and any sum of seconds: a text that says more is none of ours.
_MOST = 10**15


class Histogram:
    """Counts of durations; `total_s` is their exact sum."""

    __slots__ = ("_counts", "total_s")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.total_s = 0.0

    def record(self, seconds: float) -> None:
        """Count one duration; a negative one (clocks differ) counts as 0."""
        seconds = max(0.0, seconds)
        bucket = _bucket(seconds)
        self._counts[bucket] = self._counts.get(bucket, 0) + 1
        self.total_s += seconds

    def add(self, other: Histogram) -> None:
        """Take in all that another one has counted."""
        for bucket, count in other._counts.items():
            self._counts[bucket] = self._counts.get(bucket, 0) + count
        self.total_s += other.total_s

    @property
    def count(self) -> int:
        """How many durations were counted."""
        return sum(self._counts.values())

    @property
    def mean(self) -> float | None:
        """The average; None where nothing was counted."""
        count = self.count
        return self.total_s / count if count else None

    def quantile(self, share: float) -> float | None:
        """Return the duration that `share` (0 to 1) of all are within, in seconds; None where nothing was counted."""
        count = self.count
        if not count:
            return None
        rank = max(1, math.ceil(share * count))
        seen = 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= rank:
                return _middle(bucket)
        raise AssertionError("a share is at most 1")

    def to_text(self) -> str:
        """Write it as "total bucket:count ...", nothing counted being ""."""
        if not self._counts:
            return ""
        pairs = " ".join(f"{bucket}:{count}" for bucket, count in sorted(self._counts.items()))
        return f"{self.total_s:.6f} {pairs}"

    @classmethod
    def from_text(cls, text: str) -> Histogram:
        """Read what `to_text` wrote. Raises ValueError for anything else."""
        histogram = cls()
        if text:
            total, *pairs = text.split(" ")
            histogram.total_s = float(total)
            if not 0 <= histogram.total_s <= _MOST:
                raise ValueError("expected seconds")
            for pair in pairs:
                bucket, _, count = pair.partition(":")
                if not 0 <= (counted := int(count)) <= _MOST:
                    raise ValueError("expected a count")
                histogram._counts[min(LAST_BUCKET, max(0, int(bucket)))] = counted
        return histogram


def _bucket(seconds: float) -> int:
    if seconds <= SHORTEST_S:
        return 0
    return min(LAST_BUCKET, 1 + math.floor(PER_DOUBLING * math.log2(seconds / SHORTEST_S)))


def _middle(bucket: int) -> float:
    """Return the geometric middle of a bucket: what lies in it is within the same factor of it on both sides."""
    return 0.0 if bucket == 0 else float(SHORTEST_S * 2 ** ((bucket - 0.5) / PER_DOUBLING))
