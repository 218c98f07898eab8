"""Planted faults: with a guard of llmq turned off, something goes red.

The quick ones; all of them, and what notices each, by hand: `python -m tests.chaos.planted`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.guards import GUARDS
from tests.chaos.planted import CHECKS, Suite, plant

#: On a machine that is busy with other things a run takes much longer than its storms.
pytestmark = pytest.mark.timeout(300)

GUARANTEES = Path(__file__).parents[2] / "docs" / "guarantees.md"

#: A test with one server tells in seconds; the chaos runs need half a minute each.
QUICK = [guard for guard, check in CHECKS.items() if isinstance(check, Suite)]


@pytest.mark.parametrize("guard", QUICK)
def test_something_goes_red_without_a_guard(guard: str) -> None:
    """G2, G5, G7, G10, G12, G14, G16: the suite notices that a guard is off."""
    assert plant(guard).noticed


def test_every_guard_is_there_and_has_a_check() -> None:
    """A guard whose text has moved cannot be turned off, and its check would prove nothing."""
    assert set(GUARDS) == set(CHECKS)
    assert [] == [part for guard in GUARDS.values() for part in guard.parts if not part.there()]


def test_every_guard_stands_in_the_table() -> None:
    """docs/guarantees.md says for each guard what noticed that it was off."""
    table = GUARANTEES.read_text(encoding="utf-8")
    assert [] == [guard.name for guard in GUARDS.values() if f"| {guard.name} | {', '.join(guard.laws)} |" not in table]
