"""What workers measure, and what the fleet's figures are made of.

A worker counts into `Measures`, which remembers the last five minutes; its heartbeat carries a snapshot of it in the
fields `m.*`. `merge` makes one `Figures` of the snapshots of all workers, for `status`. Times are differences of one
clock, never of two hosts' clocks; nothing here reads a clock that was not given.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from llmq.scheduler.histogram import Histogram
from llmq.scheduler.stored_number import whole

WINDOW_S = 300.0

#: The window slides by this much; one slice holds what was measured in it.
SLICE_S = 10.0

#: What the fields of a heartbeat begin with.
PREFIX = "m."

QUANTILES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}

#: The counts of a slice, by the name that they have in a heartbeat.
_COUNTS = ("batch_done", "batch_failed", "preempted", "kept_tokens", "wasted_tokens")
_HISTOGRAMS = ("wait", "first", "total", "batch_wait")


@dataclass(slots=True)
class Figures:
    """What was measured in `window_s` seconds, by one worker or (summed) by all.

    `wait` is from submit to start of interactive jobs, `first` from submit to the first token, `total` from submit to
    the end; `batch_wait` from the moment a batch job was queued to its start. `kept_tokens` and `wasted_tokens` are
    what preempted requests had made, to be gone on from or made again.
    """

    window_s: float = 0.0
    wait: Histogram = field(default_factory=Histogram)
    first: Histogram = field(default_factory=Histogram)
    total: Histogram = field(default_factory=Histogram)
    batch_wait: Histogram = field(default_factory=Histogram)
    batch_done: int = 0
    batch_failed: int = 0
    preempted: int = 0
    kept_tokens: int = 0
    wasted_tokens: int = 0
    throughput_per_s: float | None = None

    def add(self, other: Figures) -> None:
        """Take in what another one has measured in the same time."""
        for name in _HISTOGRAMS:
            getattr(self, name).add(getattr(other, name))
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def latency(self) -> dict[str, Any]:
        """Return the `latency` of `status --json`: seconds, null where nothing was measured."""
        return {
            "queue_wait_s": quantiles(self.wait),
            "ttft_s": quantiles(self.first),
            "total_s": quantiles(self.total),
        }


class Measures:
    """Counts what one worker sees; `clock` is a monotonic clock in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._slices: deque[tuple[float, Figures]] = deque()

    def interactive_started(self, wait_s: float) -> None:
        """An interactive job was started `wait_s` seconds after its submit."""
        self._now().wait.record(wait_s)

    def first_token(self, seconds: float) -> None:
        """The first piece of an interactive answer came `seconds` after its submit."""
        self._now().first.record(seconds)

    def interactive_ended(self, total_s: float) -> None:
        """An interactive job has ended, `total_s` seconds after its submit."""
        self._now().total.record(total_s)

    def batch_started(self, wait_s: float) -> None:
        """A batch job was started `wait_s` seconds after it was queued."""
        self._now().batch_wait.record(wait_s)

    def batch_ended(self, *, ok: bool) -> None:
        """A batch job has ended."""
        figures = self._now()
        figures.batch_done += ok
        figures.batch_failed += not ok

    def preempted(self) -> None:
        """A batch request was aborted so that chat could run."""
        self._now().preempted += 1

    def cut_off(self, *, kept: int, wasted: int) -> None:
        """A preempted request had made so many tokens."""
        figures = self._now()
        figures.kept_tokens += kept
        figures.wasted_tokens += wasted

    def figures(self) -> Figures:
        """Return what was measured in the last five minutes."""
        now = self._clock()
        self._forget(now)
        whole = Figures(window_s=max(min(WINDOW_S, now - self._began), 0.001))
        for _, figures in self._slices:
            whole.add(figures)
        return whole

    def snapshot(self) -> dict[str, str]:
        """Return the fields of a heartbeat; `merge` reads them."""
        figures = self.figures()
        fields = {name: getattr(figures, name).to_text() for name in _HISTOGRAMS}
        fields |= {name: str(getattr(figures, name)) for name in _COUNTS}
        fields["window_s"] = f"{figures.window_s:.3f}"
        return {PREFIX + name: value for name, value in fields.items()}

    def _now(self) -> Figures:
        now = self._clock()
        if not self._slices or now - self._slices[-1][0] >= SLICE_S:
            self._forget(now)
            self._slices.append((now, Figures()))
        return self._slices[-1][1]

    def _forget(self, now: float) -> None:
        while self._slices and now - self._slices[0][0] >= WINDOW_S:
            self._slices.popleft()


def merge(snapshots: Iterable[Mapping[str, str]]) -> Figures:
    """Return the figures of a fleet from its workers' heartbeats; fields that cannot be read count as nothing.

    `throughput_per_s` (lines that were answered) is the sum of the workers' own: each has a window of its own.
    """
    whole = Figures()
    for fields in snapshots:
        figures = _read(fields)
        if figures is None:
            continue
        whole.add(figures)
        whole.window_s = max(whole.window_s, figures.window_s)
        whole.throughput_per_s = (whole.throughput_per_s or 0.0) + figures.batch_done / figures.window_s
    return whole


def quantiles(histogram: Histogram) -> dict[str, float | int | None]:
    """Return p50, p95 and p99 in seconds (None where nothing was measured), and how many were counted."""
    found: dict[str, float | int | None] = {}
    for name, share in QUANTILES.items():
        value = histogram.quantile(share)
        found[name] = None if value is None else round(value, 4)
    return found | {"count": histogram.count}


def _read(fields: Mapping[str, str]) -> Figures | None:
    try:
        figures = Figures(window_s=float(fields[PREFIX + "window_s"]))
        for name in _HISTOGRAMS:
            setattr(figures, name, Histogram.from_text(fields.get(PREFIX + name, "")))
        for name in _COUNTS:
            setattr(figures, name, whole(fields.get(PREFIX + name)))
    except (KeyError, ValueError):
        return None
    return figures if 0 < figures.window_s <= 2 * WINDOW_S else None
