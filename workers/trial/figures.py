"""The figures of a trial: what its phases saw, as numbers that can be compared. Pure; nothing here measures.

A request whose first token never came counts as slower than every other, so that an engine that drops chat cannot look
fast. What is compared is always a ratio to chat alone in the same run: machines differ, and from hour to hour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmq.scheduler.errors import EngineUnavailable
from llmq.workers.trial.phase import Phase

#: Windows over which chat is looked at, and how long a burst is one from its beginning.
WINDOW_S = 5.0

#: A window is within the objective where its p95 is within so many times the whole run's p95 alone.
WITHIN = 1.25

#: A burst begins where this many times the mean arrive in a window, and fewer than the mean did just before.
BURST = 1.5


@dataclass(frozen=True, slots=True)
class Row:
    """One phase, as the table shows it. Times in seconds; `ratio` and `burst_ratio` are to chat alone.

    `burst_ratio` compares the p95 in the first seconds of bursts with the p95 alone of the whole run; nan without any.
    """

    name: str
    requests: int
    p50_s: float
    p95_s: float
    p99_s: float
    ratio: float
    within: float
    burst_p95_s: float
    burst_ratio: float
    batch_tps: float
    wasted_share: float
    preempted: int
    kept_tokens: int
    objective_s: float | None

    def to_json(self) -> dict[str, Any]:
        """Return the row as JSON holds it: what is infinite, because no answer came, or not a number, is null."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {name: _finite(value) for name, value in values.items()}


def rows_of(phases: Sequence[Phase]) -> list[Row]:
    """Return the rows of a trial; the first phase is chat alone."""
    starts = bursts(sorted(at for at, _ in phases[0].firsts))
    base = _p95_of(phases[:1])
    return [_row(phase, base, starts) for phase in phases]


def p95_alone(phases: Sequence[Phase]) -> float:
    """Return the p95 of the times to first token that chat saw in all of these phases, in seconds.

    Raises EngineUnavailable where it is infinite: nothing can be compared with it.
    """
    p95_s = _p95_of(phases)
    if math.isinf(p95_s):
        raise EngineUnavailable("one in 20 of chat's requests alone got no token: make the engine answer all of them")
    return p95_s


def _p95_of(phases: Sequence[Phase]) -> float:
    return quantile([seconds for phase in phases for _, seconds in _seen(phase)], 0.95)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that this share of all are at most; nan of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(len(ordered) * share) - 1))]


def windows(firsts: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return (beginning, p95) of each window in which chat came."""
    found: dict[int, list[float]] = {}
    for at, seconds in firsts:
        found.setdefault(int(at / WINDOW_S), []).append(seconds)
    return [(number * WINDOW_S, quantile(values, 0.95)) for number, values in sorted(found.items())]


def bursts(arrivals: Sequence[float]) -> list[float]:
    """Return when bursts began: of arrivals in order, those with many behind and few before them."""
    if len(arrivals) < 2:
        return []
    mean = len(arrivals) / max(WINDOW_S, arrivals[-1] - arrivals[0]) * WINDOW_S
    found: list[float] = []
    for at in arrivals:
        if found and at < found[-1] + WINDOW_S:
            continue
        behind = sum(1 for other in arrivals if at <= other < at + WINDOW_S)
        before = sum(1 for other in arrivals if at - WINDOW_S <= other < at)
        if behind >= BURST * mean and before <= mean:
            found.append(at)
    return found


def _row(phase: Phase, base: float, starts: Sequence[float]) -> Row:
    seen = _seen(phase)
    values = [seconds for _, seconds in seen]
    p95s = [p95 for _, p95 in windows(seen)]
    early = [seconds for at, seconds in seen if any(start <= at < start + WINDOW_S for start in starts)]
    return Row(
        name=phase.name,
        requests=len(seen),
        p50_s=quantile(values, 0.5),
        p95_s=quantile(values, 0.95),
        p99_s=quantile(values, 0.99),
        ratio=quantile(values, 0.95) / base,
        within=sum(p95 <= WITHIN * base for p95 in p95s) / max(1, len(p95s)),
        burst_p95_s=quantile(early, 0.95),
        burst_ratio=quantile(early, 0.95) / base,
        batch_tps=phase.batch_tps,
        wasted_share=phase.wasted_share,
        preempted=phase.preempted,
        kept_tokens=phase.kept_tokens,
        objective_s=phase.objective_s,
    )


def _seen(phase: Phase) -> list[tuple[float, float]]:
    """Return what chat saw after the warm-up, in the order of its coming."""
    return sorted((at, math.inf if seconds is None else seconds) for at, seconds in phase.firsts if phase.counts(at))


def _finite(value: object) -> object:
    return (round(value, 5) if math.isfinite(value) else None) if isinstance(value, float) else value
