"""How people write durations, rates, sizes and counts, and how llmq writes them back.

Used by the settings, by `llmq set`, by `llmq rate` and by every table of the command line, so that one text means one
value everywhere. Pure functions: nothing here knows which setting a value is for; the caller puts its name in front
of the message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NoReturn

from llmq.scheduler.errors import UsageError

DURATION_FORMS = "90, 90s, 15m, 4h, 7d or 500ms"
RATE_FORMS = "5/s, 300/m, 100/h, 2000tok/s or off"
SIZE_FORMS = "1048576, 64k, 1MiB, 1.5GiB or 200MB"

#: Longer than anybody means; keeps every duration in milliseconds an exact float and a small Redis integer.
MAX_DURATION = 100 * 365 * 86_400.0

#: A pebibyte: no file, no memory and no limit of ours is larger.
MAX_SIZE = 2**50

#: No fleet starts as many in any period; more is no limit at all.
MAX_RATE = 1e12

_SECONDS: Mapping[str, float] = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_WRITTEN_DURATIONS = ((86_400, "d"), (3600, "h"), (60, "m"))
_PERIODS: Mapping[str, float] = {"s": 1.0, "m": 60.0, "h": 3600.0}

# A letter alone is binary, as in most tools that take one; `MB` is decimal, as OpenAI's limits are.
_BYTES: Mapping[str, int] = {
    "": 1,
    "b": 1,
    **{letter: 1024**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
}
_WRITTEN_SIZES = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))

# ASCII digits only: `\d` also takes digits of other scripts.
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([a-z]*)\s*", re.IGNORECASE)
_RATE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*(tok)?\s*/\s*([smh])\s*", re.IGNORECASE)

#: Rates closer to a whole number than this are written as one (5 a minute is 0.08333... a second).
_WHOLE = 1e-9


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast batch may start: `per_second` jobs, or LLM tokens where `unit` is "tok"."""

    per_second: float
    unit: Literal["job", "tok"] = "job"


def parse_duration(text: str) -> float:
    """Return the seconds that `text` means: a bare number is seconds. Raises UsageError naming the accepted forms."""
    number, unit = _quantity(text, _SECONDS, "a duration", DURATION_FORMS)
    # Divided, not multiplied: 500 / 1000 is exact where 500 * 0.001 need not be.
    seconds = number / 1000 if unit == "ms" else number * _SECONDS[unit]
    if seconds > MAX_DURATION:
        raise UsageError(f"expected a duration of at most {format_duration(MAX_DURATION)}, got {text!r}")
    return seconds


def format_duration(seconds: float) -> str:
    """Write a duration in the largest unit that holds it exactly: 604800.0 is "7d", 90.0 is "90s", 0.5 is "500ms"."""
    if seconds and seconds % 60 == 0:
        size, unit = next((size, unit) for size, unit in _WRITTEN_DURATIONS if seconds % size == 0)
        return f"{int(seconds // size)}{unit}"
    if 0 < seconds < 1:
        return f"{_decimal(seconds * 1000, 3)}ms"
    return f"{_decimal(seconds, 6)}s"


def parse_rate(text: str) -> Rate | None:
    """Return the rate that `text` means, None for "off" (unlimited). Raises UsageError, also for 0: that is a pause."""
    if text.strip().lower() == "off":
        return None
    match = _RATE.fullmatch(text)
    if match is None:
        _refuse("a rate", RATE_FORMS, text)
    number, tokens, period = float(match[1]), match[2], match[3].lower()
    if number > MAX_RATE:
        raise UsageError(f"expected a rate of at most {MAX_RATE:,.0f}; for no limit use off, got {_short(text)}")
    if number == 0:
        raise UsageError(f"expected a rate above 0, got {text!r}; to stop batch, use pause: llmq pause batch")
    return Rate(number / _PERIODS[period], "tok" if tokens else "job")


def format_rate(rate: Rate | None) -> str:
    """Write a rate with the shortest period that makes it a whole number: "5/s", "1/m", "2000tok/s"; None is "off"."""
    if rate is None:
        return "off"
    unit = "tok" if rate.unit == "tok" else ""
    for period, seconds in _PERIODS.items():
        number = rate.per_second * seconds
        if round(number) and abs(number - round(number)) <= _WHOLE * number:
            return f"{round(number)}{unit}/{period}"
    period = "s" if rate.per_second >= 0.01 else "h"
    return f"{_decimal(rate.per_second * _PERIODS[period], 6)}{unit}/{period}"


def parse_size(text: str) -> int:
    """Return the bytes that `text` means: k and KiB are binary, kB is decimal, and so on. Raises UsageError."""
    number, unit = _quantity(text, _BYTES, "a size", SIZE_FORMS)
    size = number * _BYTES[unit]
    if size > MAX_SIZE:
        raise UsageError(f"expected a size of at most {format_size(MAX_SIZE)}, got {_short(text)}")
    return round(size)


def format_size(size: int) -> str:
    """Write bytes for people, in binary units: exact where the unit divides it ("1MiB"), else with one decimal."""
    for factor, unit in _WRITTEN_SIZES:
        if size >= factor:
            return f"{size // factor}{unit}" if size % factor == 0 else f"{size / factor:.1f}{unit}"
    return f"{size}B"


def format_count(count: int) -> str:
    """Write a count for a table: in full below 10,000, then three digits and a letter ("12.3k", "1.25M")."""
    if count < 10_000:
        return f"{count:,}"
    value = float(count)
    for letter in "kMG":
        value /= 1000
        if value < 999.5:
            return f"{value:.3g}{letter}"
    return f"{value / 1000:.3g}T"


def _quantity(text: str, units: Mapping[str, float], what: str, forms: str) -> tuple[float, str]:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2].lower() not in units:
        _refuse(what, forms, text)
    return float(match[1]), match[2].lower()


def _refuse(what: str, forms: str, text: str) -> NoReturn:
    raise UsageError(f"expected {what} like {forms}, got {_short(text)}")


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}...")


def _decimal(number: float, places: int) -> str:
    """Write a number without exponent and without zeros at the end."""
    text = f"{number:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
