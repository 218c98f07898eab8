"""The limit: how fast batch may start in the whole fleet, and how much it may save up. The bucket's settings.

A value, and the form in which the claim script reads it (`rate`, `burst`, `unit` of the config, or of a plan's step).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from llmq.scheduler.errors import UsageError
from llmq.scheduler.units import Rate, format_rate


@dataclass(frozen=True, slots=True)
class Limit:
    """A rate, and the burst: the most starts (or LLM tokens) that may follow at once after a pause."""

    rate: Rate
    burst: float

    @classmethod
    def of(cls, rate: Rate, burst: float | None = None) -> Limit:
        """Return the limit for a rate; a burst of None is one second's worth, at least 1. Raises UsageError."""
        if burst is None:
            burst = max(1.0, rate.per_second)
        # A bucket that never holds 1 lets nothing start.
        if not (math.isfinite(burst) and burst >= 1):
            raise UsageError(f"expected a burst of at least 1, got {burst:g}; a slower start is a lower rate")
        return cls(rate, burst)

    @classmethod
    def stored(cls, rate: str, burst: str, unit: str) -> Limit | None:
        """Read what `fields` wrote, as the scripts do; None for anything else, which is no limit."""
        try:
            per_second = float(rate)
            most = float(burst) if burst else max(1.0, per_second)
        except ValueError:
            return None
        if not (0 < per_second < math.inf):  # also refuses NaN
            return None
        if not math.isfinite(most):
            most = max(1.0, per_second)
        return cls(Rate(per_second, "tok" if unit == "tok" else "job"), most)

    def fields(self) -> Mapping[str, str]:
        """Return the stored form."""
        return {"rate": _number(self.rate.per_second), "burst": _number(self.burst), "unit": self.rate.unit}

    def __str__(self) -> str:
        return f"{format_rate(self.rate)}, burst {_number(self.burst)}"


def _number(value: float) -> str:
    """Write a number so that reading it gives the same value (5 a minute is 0.08333333333333333 a second)."""
    return str(int(value)) if value.is_integer() else repr(value)
