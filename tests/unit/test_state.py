"""States: how they are derived, and that the table of transitions is whole."""

from __future__ import annotations

import pytest

from llmq.scheduler.scripts import NAMES
from llmq.scheduler.state import LIVING, TRANSITIONS, JobState, derive_state


@pytest.mark.parametrize(
    ("ended_as", "stored", "pending", "due_ms", "expected"),
    [
        ("", True, False, None, JobState.WAITING),
        ("", True, False, 3.0, JobState.WAITING),
        ("", True, False, 1000.0, JobState.WAITING),
        ("", True, False, 1001.0, JobState.DELAYED),
        ("", True, True, None, JobState.RUNNING),
        ("", True, True, 2000.0, JobState.RUNNING),
        ("", False, False, None, JobState.LOST),
        ("completed", False, False, None, JobState.COMPLETED),
        ("expired", True, True, None, JobState.EXPIRED),
        ("a word of a newer version", False, False, None, JobState.FAILED),
    ],
)
def test_a_state_is_what_the_keys_say(
    ended_as: str, stored: bool, pending: bool, due_ms: float | None, expected: JobState
) -> None:
    """What is written down as ended has ended; pending runs; a later due time is a delay."""
    assert expected is derive_state(ended_as=ended_as, stored=stored, pending=pending, due_ms=due_ms, now_ms=1000)


def test_every_state_can_be_reached_and_every_living_one_left() -> None:
    """And nothing leads out of an end."""
    assert set(JobState) == {transition.after for transition in TRANSITIONS}
    assert LIVING == {transition.before for transition in TRANSITIONS} - {None}
    assert all(state.ended == (state not in LIVING) for state in JobState)


def test_every_transition_is_made_by_a_script_or_the_clock() -> None:
    """Each names which, and none is listed twice."""
    assert {transition.by for transition in TRANSITIONS} <= {*NAMES, "clock"}
    assert len(TRANSITIONS) == len(set(TRANSITIONS))
