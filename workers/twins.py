"""Twins: two leases of one worker with the same fence, because Redis has forgotten the claim of the first.

A fence (lane, entry, delivery) names one attempt as long as Redis remembers every claim. A replica that takes over, or
a server that comes back without its last second, may not have heard of one: the entry waits again, its next claim gets
the number of the forgotten one, and the worker that runs the job is the likeliest to be given it. Even another job may
stand there by now, where lines or submits were forgotten, too. What becomes of the two is decided here, from values;
the desk does it.
"""

from __future__ import annotations

from enum import StrEnum

from llmq.scheduler.lease import Abandoned, Lease, Outcome


class Meeting(StrEnum):
    """What a worker does with a lease whose fence it knows."""

    JOIN = "join"
    """The old attempt goes on: its outcome settles the new claim. The new lease is not run."""
    REPLACE = "replace"
    """Nothing of the old one runs: forget it, and run the new one."""
    PART = "part"
    """The old one runs and cannot settle the new claim: stop it, write nothing of it, hand the new one back."""


def meet(new: Lease, old: Lease, *, outcome: Outcome | None, runs: bool, lost: bool) -> Meeting:
    """Decide between two leases with one fence.

    `outcome` is what the old one ended with, where that is not written yet; `runs` says that it is in a slot, `lost`
    that it is being aborted there because its lease was lost.
    """
    same_job = new.key == old.key and new.data == old.data
    if same_job and not lost and (runs or (outcome is not None and not isinstance(outcome, Abandoned))):
        return Meeting.JOIN
    return Meeting.PART if runs else Meeting.REPLACE
