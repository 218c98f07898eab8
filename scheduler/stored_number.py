"""Numbers as they are found in Redis, where whoever can write to it may have put anything in their place.

What a reader shows or adds up must not end it, so what is no number is the default; `queue.lua` has the same rule under
the same name.
"""

from __future__ import annotations

import math

#: More characters than any number of llmq has: int() and float() of very long texts are slow, or refuse.
_LONGEST = 40

#: Larger numbers are nobody's: `queue.lua` draws the line here.
_MOST = 1e300


def finite(stored: bytes | str | float | None, default: float) -> float:
    """Return a stored number; the default for what is missing, no number, NaN or infinite."""
    if stored is None or (isinstance(stored, bytes | str) and len(stored) > _LONGEST):
        return default
    try:
        number = float(stored)
    except ValueError:
        return default
    return number if math.isfinite(number) and abs(number) < _MOST else default


def whole(stored: bytes | str | None, default: int = 0) -> int:
    """Return a stored whole number of up to 18 digits; the default for anything else."""
    if stored is None or not 0 < len(stored) <= 18:
        return default
    try:
        return int(stored)
    except ValueError:
        return default
