"""The governor: how much a worker may take, and whom it preempts. Pure values in and out."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmq.workers.allowance import NOTHING, Allowance, Candidate, Snapshot, allow, default_reserve, victims

SNAPSHOTS = st.builds(
    Snapshot,
    concurrency=st.integers(1, 64),
    running_interactive=st.integers(0, 64),
    running_batch=st.integers(0, 64),
    preemptable=st.integers(0, 64),
    suspects=st.integers(0, 3),
    reserve=st.integers(0, 8),
    preempt=st.booleans(),
    batch_cap=st.none() | st.integers(0, 64),
    refusing=st.booleans(),
    taking=st.booleans(),
).filter(lambda now: now.preemptable <= now.running_batch)


def snapshot(**changes: int | bool | None) -> Snapshot:
    """Return a worker of 8 slots in which nothing runs, with changes."""
    idle = {"concurrency": 8, "running_interactive": 0, "running_batch": 0, "preemptable": 0, "suspects": 0}
    return Snapshot(**{**idle, "reserve": 1, "preempt": True, **changes})  # type: ignore[arg-type]


def test_an_idle_worker_has_room_for_all_its_slots() -> None:
    """Room and free slots are the concurrency; the reserve is passed on."""
    assert Allowance(8, 8, 1, 0) == allow(snapshot())


def test_a_full_worker_has_room_for_chat_where_batch_can_be_preempted() -> None:
    """G9: no slot is free, but chat may take those of unprotected batch requests."""
    assert Allowance(3, 0, 1, 0) == allow(snapshot(running_interactive=2, running_batch=6, preemptable=3))


def test_without_preemption_a_full_worker_has_no_room() -> None:
    """With `preempt off` only free slots count."""
    assert Allowance(0, 0, 1, 0) == allow(snapshot(running_batch=8, preemptable=8, preempt=False))


def test_a_batch_cap_is_a_higher_reserve() -> None:
    """With 2 of at most 3 batch requests running, one more may start of 6 free slots."""
    now = allow(snapshot(running_batch=2, batch_cap=3))
    assert (6, 5) == (now.free, now.reserve)


def test_a_cap_of_zero_stops_batch_and_leaves_chat_alone() -> None:
    """Overload: no batch starts, chat has the same room."""
    now = allow(snapshot(batch_cap=0))
    assert (8, 8, 8) == (now.room, now.free, now.reserve)


def test_an_engine_that_refuses_gets_no_batch_by_the_deadline_either() -> None:
    """G10 heeds no reserve, so there is none to give; chat has the same room."""
    assert Allowance(8, 8, None, 0) == allow(snapshot(refusing=True, batch_cap=0))
    assert Allowance(5, 5, None, 1) == allow(snapshot(refusing=True)).without(3, 1)


def test_more_than_the_slots_is_held_while_a_request_is_being_preempted() -> None:
    """Until the preempted request has ended nothing is free, and never less than nothing."""
    assert 0 == allow(snapshot(running_batch=8, running_interactive=1)).free


def test_a_worker_that_takes_nothing_says_so() -> None:
    """Draining, or its engine is gone."""
    assert NOTHING == allow(snapshot(taking=False))


@given(SNAPSHOTS)
def test_no_allowance_lets_a_worker_hold_too_much(now: Snapshot) -> None:
    """Room is never more than free slots and preemptable requests; batch starts stay under cap and reserve."""
    given_ = allow(now)
    running = now.running_interactive + now.running_batch
    assert 0 <= given_.free <= max(0, now.concurrency - running)
    assert given_.free <= given_.room <= given_.free + now.preemptable
    starts = 0 if given_.reserve is None else max(0, given_.free - given_.reserve)
    assert starts <= max(0, given_.free - now.reserve)
    if now.batch_cap is not None and starts:
        assert now.running_batch + starts <= now.batch_cap


def test_the_default_reserve_is_a_tenth_and_at_least_one() -> None:
    """None of a single slot; else the larger of 1 and 10 %, rounded up."""
    assert [0, 1, 1, 1, 2, 4] == [default_reserve(slots) for slots in (1, 2, 8, 10, 11, 32)]


def test_the_youngest_unprotected_requests_are_preempted() -> None:
    """The least waste: youngest first, protected ones never."""
    requests = [
        Candidate("old", 1.0, protected=False),
        Candidate("young", 3.0, protected=False),
        Candidate("younger but protected", 4.0, protected=True),
        Candidate("middle", 2.0, protected=False),
    ]
    assert ["young", "middle"] == victims(requests, 2)
    assert ["young", "middle", "old"] == victims(requests, 9)
    assert [] == victims(requests, 0)
    assert [] == victims(requests, -1)


def test_slots_that_are_not_to_be_filled_now_are_left_out() -> None:
    """Of room and of free slots, and never below none; the reserve stays."""
    assert Allowance(5, 2, 1, 0) == Allowance(8, 5, 1, 0).without(3)
    assert Allowance(0, 0, 1, 0) == Allowance(2, 1, 1, 0).without(3)
