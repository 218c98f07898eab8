"""The totals: what workers have counted since they began, and, added up in Redis, what the queue has seen.

`measures.py` remembers five minutes, for people; totals only grow, for a monitoring system that takes differences
itself. One table names them all. A worker's heartbeat carries its totals in the fields `t.*`, and the script that
writes it adds what is new to the queue's own (`beat.lua`): so they outlive workers, and need no label for each of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product

from llmq.scheduler.job import TrafficClass
from llmq.scheduler.lease import Reason
from llmq.scheduler.stored_number import whole

#: What the fields of a heartbeat begin with.
PREFIX = "t."

#: Between the parts of a field's name.
_JOINT = "|"

_SUM = "sum"
_MICROSECONDS = 1_000_000

_CLASSES = tuple(cls.value for cls in TrafficClass)


@dataclass(frozen=True, slots=True)
class Counter:
    """One total, or one for each combination of its labels' values."""

    name: str
    meaning: str
    labels: Mapping[str, tuple[str, ...]]

    def series(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield (values of the labels, name of the field) of each total."""
        for values in product(*self.labels.values()):
            yield values, self.field(*values)

    def field(self, *values: str) -> str:
        """Return the name of the field that counts these values."""
        return _JOINT.join((self.name, *values))


@dataclass(frozen=True, slots=True)
class Buckets:
    """A distribution of durations: how many were at most each of `bounds` (seconds), and their sum."""

    name: str
    meaning: str
    bounds: tuple[float, ...]

    def bucket(self, seconds: float) -> str:
        """Return the name of the field that counts a duration: that of the first bound which holds it."""
        return self._field(self.label(seconds))

    def label(self, seconds: float) -> str:
        """Return the first bound which holds a duration, as it stands in a field's name."""
        at = bisect_left(self.bounds, seconds)
        return _label(self.bounds[at]) if at < len(self.bounds) else "inf"

    def read(self, totals: Mapping[str, int]) -> tuple[list[tuple[str, int]], float]:
        """Return pairs of a bound ("+Inf" is the last) and how many were within it, and the sum in seconds."""
        pairs, within = [], 0
        for bound in self.bounds:
            within += totals.get(self._field(_label(bound)), 0)
            pairs.append((f"{bound:g}" if bound % 1 else f"{bound:.1f}", within))
        pairs.append(("+Inf", within + totals.get(self._field("inf"), 0)))
        return pairs, totals.get(self.sum_field, 0) / _MICROSECONDS

    @property
    def sum_field(self) -> str:
        """The name of the field that holds the sum, in microseconds: Redis adds whole numbers without an error."""
        return self._field(_SUM)

    def _field(self, part: str) -> str:
        return _JOINT.join((self.name, part))


@cache
def _label(bound: float) -> str:
    return f"{bound:g}"


#: People notice 100 ms; a chat job waits a minute at most by default.
_CHAT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

#: Batch waits from seconds to days.
_BATCH_BOUNDS = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 24 * 3600.0, 7 * 24 * 3600.0)

OUTCOMES = ("completed", "failed", "expired", "cancelled", "interrupted")
ENGINE_ERRORS = ("refused", "overloaded", "gone", "unclear", "too_large")

JOBS_ENDED = Counter(
    "jobs_ended",
    "Jobs that workers have ended; failed ones were refused by the engine, or have used up their attempts.",
    {"class": _CLASSES, "outcome": OUTCOMES},
)
DEAD = Counter("dead", "Jobs that became dead letters.", {"class": _CLASSES})
RETRIES = Counter("retries", "Attempts that failed and were followed by another.", {"class": _CLASSES})
HANDED_BACK = Counter(
    "handed_back",
    "Jobs that went back to the queue unfinished, without an attempt spent; preempted ones made way for chat.",
    {"class": _CLASSES, "reason": tuple(reason.value for reason in Reason)},
)
LEASES_LOST = Counter("leases_lost", "Requests aborted because their lease belonged to another worker by then.", {})
STALE = Counter(
    "stale_outcomes",
    "Outcomes that the fence refused: the lease was another's by then, or a first try had been written.",
    {},
)
RECLAIMED = Counter("reclaimed", "Jobs whose lease ran out, taken from workers that were gone.", {})
ENGINE_FAULTS = Counter(
    "engine_errors",
    "Requests that the engine did not answer well: refused (4xx), overloaded, gone, unclear, or an answer too large.",
    {"kind": ENGINE_ERRORS},
)
TOKENS = Counter(
    "tokens", "LLM tokens that engines counted in answers.", {"class": _CLASSES, "kind": ("prompt", "completion")}
)
CUT_OFF = Counter(
    "preempted_tokens",
    "LLM tokens that preempted batch requests had made: kept, to be gone on from, or wasted.",
    {"fate": ("kept", "wasted")},
)
COUNTERS = (JOBS_ENDED, DEAD, RETRIES, HANDED_BACK, LEASES_LOST, STALE, RECLAIMED, ENGINE_FAULTS, TOKENS, CUT_OFF)

CHAT_WAIT = Buckets("interactive_queue_wait_seconds", "From submit to start of interactive jobs.", _CHAT_BOUNDS)
CHAT_FIRST = Buckets(
    "interactive_first_token_seconds", "From submit to the first token of interactive jobs.", _CHAT_BOUNDS
)
CHAT_TOTAL = Buckets("interactive_total_seconds", "From submit to the end of interactive jobs.", _CHAT_BOUNDS)
BATCH_WAIT = Buckets("batch_queue_wait_seconds", "From queued to start of batch jobs.", _BATCH_BOUNDS)
HISTOGRAMS = (CHAT_WAIT, CHAT_FIRST, CHAT_TOTAL, BATCH_WAIT)


class Totals:
    """Counts, and never takes back. The parts of a field's name are joined when it is read: counted far more often."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, ...], int] = {}

    def count(self, counter: Counter, *values: str, by: int = 1) -> None:
        """Count `by` more of a counter, with these values of its labels."""
        self._add((counter.name, *values), by)

    def observe(self, histogram: Buckets, seconds: float) -> None:
        """Count one duration; a negative one (clocks differ) counts as 0."""
        seconds = max(0.0, seconds)
        self._add((histogram.name, histogram.label(seconds)), 1)
        self._add((histogram.name, _SUM), round(seconds * _MICROSECONDS))

    def read(self) -> dict[str, int]:
        """Return all totals that are not 0, by the names of their fields."""
        return {_JOINT.join(parts): count for parts, count in self._counts.items()}

    def _add(self, field: tuple[str, ...], by: int) -> None:
        if by > 0:
            self._counts[field] = self._counts.get(field, 0) + by


def read_totals(stored: Mapping[bytes, bytes]) -> dict[str, int]:
    """Return the queue's totals, as Redis holds them; what is no number counts as nothing."""
    return {name.decode(errors="replace"): whole(value) for name, value in stored.items() if value.isdigit()}


def sums(totals: Mapping[str, int]) -> dict[str, int]:
    """Return each counter as one number, over all values of its labels."""
    return {counter.name: sum(totals.get(field, 0) for _, field in counter.series()) for counter in COUNTERS}
