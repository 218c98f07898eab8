"""Limits: what the bucket let start, and how long batch waited, computed from the ledger.

The claims' times are Redis' own, so there is no margin for clocks. A change of the rate begins a new account: what a
bucket of other terms let start is judged by those.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from tests.chaos.ledger import Claim, Ledger

NEVER = float("inf")

#: The ledger's and the script's clock may differ by the ms to which both are rounded.
ROUNDING_S = 0.002

#: How a batch claim ends that was left to finish; one that is open at the end counts as well.
LEFT_TO_FINISH = ("ended", "retried", "crashed", "open")


def bucket_excess(ledger: Ledger) -> Iterator[tuple[float, str]]:
    """Find times over which more was started than rate * t + burst, and more by the deadline than t / deadline + 1."""
    ends = [step for step, *_ in ledger.rates[1:]] + [NEVER]
    for (begins, rate, burst, by_tokens), over in zip(ledger.rates, ends, strict=True):
        if rate < NEVER:
            starts = _starts(ledger)
            paid = [claim for claim in starts if claim.why == "bucket" and begins <= claim.step < over]
            yield from _excess(paid, rate, burst, by_tokens=by_tokens)
    shortest = min((moment.value for moment in ledger.deadlines), default=30.0)
    # One that was not left to finish is followed by another at once: batch has still not started (G10).
    starts = [claim for claim in _starts(ledger) if claim.how in LEFT_TO_FINISH and not _was_cancelled(claim)]
    by_deadline = [claim for claim in starts if claim.why == "deadline"]
    for at, excess in _most_excess([(claim.at, 1.0) for claim in by_deadline], 1 / shortest, 1.0):
        yield at, f"{excess:.2f} starts by the deadline more than t / {shortest:g} + 1"


def deadline_gaps(ledger: Ledger) -> Iterator[tuple[float, float, float]]:
    """Iterate over the times in which batch waited without a start that was left to finish: from, to, deadline then."""
    starts = sorted(claim.at for claim in _starts(ledger) if claim.how in LEFT_TO_FINISH)
    moments = [*ledger.batch_waits]
    for now, then in pairwise(moments):
        if now.value:
            edges = [now.at, *(at for at in starts if now.at < at < then.at), then.at]
            for begins, ends in pairwise(edges):
                yield begins, ends, _longest_deadline(ledger, begins, ends)


def _longest_deadline(ledger: Ledger, begins: float, ends: float) -> float:
    """Return the longest deadline that was in force at any moment between two."""
    over = [moment.at for moment in ledger.deadlines[1:]] + [NEVER]
    held = zip(ledger.deadlines, over, strict=True)
    return max(moment.value for moment, then in held if moment.at <= ends and then > begins)


def _was_cancelled(claim: Claim) -> bool:
    return any(r.state == "cancelled" and r.delivery == claim.number for r in claim.entry.results)


def _starts(ledger: Ledger) -> list[Claim]:
    return [claim for claim in ledger.claims if claim.entry.cls == "b" and not claim.verdict]


def _excess(paid: list[Claim], rate: float, burst: float, *, by_tokens: bool) -> Iterator[tuple[float, str]]:
    amounts = [(claim.at, float(claim.entry.cost if by_tokens else 1)) for claim in paid]
    largest = max((amount for _, amount in amounts), default=0.0) if by_tokens else 0.0
    for at, excess in _most_excess(amounts, rate, burst + largest):
        yield at, f"{excess:.2f} started more than {rate:g}/s * t + {burst:g}"


def _most_excess(amounts: list[tuple[float, float]], rate: float, allowed: float) -> Iterator[tuple[float, float]]:
    """Find the ends of the times over which the sum exceeds rate * t + allowed, by one pass over all of them."""
    lowest, total = NEVER, 0.0
    for at, amount in amounts:
        # Of all times that end here, the one that begins where (sum before - rate * its beginning) was lowest.
        lowest = min(lowest, total - rate * at)
        total += amount
        excess = total - rate * at - lowest - allowed
        if excess > rate * ROUNDING_S + 1e-6:
            yield at, excess
