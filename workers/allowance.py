"""Allowance: how much a worker may claim, and which request is preempted.

Data in, decision out: nothing here touches a network or a clock. The rule is a reserve of free slots for chat, whatever
cap others give batch (the governor, the gate), and preemption of the youngest unprotected batch request when chat finds
none. What is decided here becomes the arguments of the claim script; which job then runs is decided there alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

Name = TypeVar("Name")

#: Of a worker's slots, the share that is kept free for chat when nobody says otherwise.
DEFAULT_RESERVE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A worker at one moment. `batch_cap` is the most batch requests it may run; None is no limit of its own.

    `refusing` says that its engine has just refused work, or that a line which was claimed may not start yet: then not
    even the deadline starts batch there.
    """

    concurrency: int
    running_interactive: int
    running_batch: int
    preemptable: int
    suspects: int
    reserve: int
    preempt: bool
    batch_cap: int | None = None
    refusing: bool = False
    taking: bool = True


@dataclass(frozen=True, slots=True)
class Allowance:
    """What the claim script may give: in all (`room`), into free slots, keeping `reserve` of those free of batch.

    A `reserve` of None is all of them: no batch, not even by the deadline, which heeds no other.
    """

    room: int
    free: int
    reserve: int | None
    suspects: int

    def without(self, slots: int, suspects: int = 0) -> Allowance:
        """Return what is left when so many of the free slots are not to be filled now, and so many suspects ended."""
        if not slots and not suspects:
            return self
        room, free = max(0, self.room - slots), max(0, self.free - slots)
        return replace(self, room=room, free=free, suspects=self.suspects + suspects)


NOTHING = Allowance(0, 0, 0, 0)


def default_reserve(concurrency: int) -> int:
    """Return the slots kept free for chat: none of a single slot, else the larger of 1 and 10 %, rounded up."""
    return 0 if concurrency <= 1 else max(1, math.ceil(concurrency * DEFAULT_RESERVE_SHARE))


def allow(now: Snapshot) -> Allowance:
    """Decide what a worker may take now."""
    if not now.taking:
        return NOTHING
    free = max(0, now.concurrency - now.running_interactive - now.running_batch)
    room = free + (now.preemptable if now.preempt else 0)
    if now.refusing:
        return Allowance(room, free, None, now.suspects)
    reserve = now.reserve
    if now.batch_cap is not None:
        # The claim gives batch what is free above the reserve, so a lower cap is a higher reserve.
        reserve = max(reserve, free - max(0, now.batch_cap - now.running_batch))
    return Allowance(room, free, reserve, now.suspects)


@dataclass(frozen=True, slots=True)
class Candidate(Generic[Name]):
    """A running batch request, as a choice of whom to preempt sees it: who it is, since when, protected or not."""

    name: Name
    started_at: float
    protected: bool


def victims(requests: Iterable[Candidate[Name]], count: int) -> list[Name]:
    """Choose `count` requests to preempt: the youngest of those that are not protected, for the least waste."""
    open_to_it = [request for request in requests if not request.protected]
    open_to_it.sort(key=lambda request: request.started_at, reverse=True)
    return [request.name for request in open_to_it[: max(0, count)]]
