"""Twins: what becomes of two leases with one fence, for each state of the old one."""

from __future__ import annotations

import pytest

from llmq.scheduler.job import TrafficClass
from llmq.scheduler.lease import Abandoned, Answered, Fence, HandedBack, Lease, Outcome, Reason, Why
from llmq.workers.twins import Meeting, meet

ANSWERED = Answered(200, b"{}", "r")
BACK = HandedBack(Reason.PREEMPTED)


def lease(key: str = "job", data: bytes = b"body") -> Lease:
    """Return a lease of a chat job; all of them have one fence."""
    return Lease(Fence("i:team", "1-0", 1), TrafficClass.INTERACTIVE, Why.CHAT, "team", key, data, 1)


@pytest.mark.parametrize(
    ("expected", "outcome", "runs", "lost"),
    [
        (Meeting.JOIN, None, True, False),
        (Meeting.PART, None, True, True),
        (Meeting.REPLACE, None, False, False),
        (Meeting.JOIN, ANSWERED, False, False),
        (Meeting.JOIN, BACK, False, False),
        (Meeting.REPLACE, Abandoned(), False, False),
    ],
    ids=["runs", "is being aborted", "waits for its slot", "has answered", "is handed back", "was abandoned"],
)
def test_the_same_job(expected: Meeting, outcome: Outcome | None, runs: bool, lost: bool) -> None:
    """G3, G12: what ends by an outcome that will be written settles the new claim; nothing runs twice for it."""
    assert expected == meet(lease(), lease(), outcome=outcome, runs=runs, lost=lost)


@pytest.mark.parametrize("other", [lease("another"), lease(data=b"another")], ids=["id", "body"])
@pytest.mark.parametrize(
    ("expected", "outcome", "runs"),
    [(Meeting.PART, None, True), (Meeting.REPLACE, None, False), (Meeting.REPLACE, ANSWERED, False)],
    ids=["runs", "waits for its slot", "has answered"],
)
def test_another_job(expected: Meeting, outcome: Outcome | None, runs: bool, other: Lease) -> None:
    """G3: the outcome of one job never ends another, whichever of both was forgotten."""
    assert expected == meet(lease(), other, outcome=outcome, runs=runs, lost=False)
