"""Held: what a worker holds is counted as it comes and goes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq.scheduler.job import TrafficClass
from llmq.scheduler.lease import Fence, Lease, Why
from llmq.workers.held import Held

LEASES = st.builds(
    Lease,
    fence=st.builds(Fence, st.just("b:1"), st.sampled_from(["1-0", "2-0", "3-0"]), st.just(1)),
    cls=st.sampled_from(TrafficClass),
    why=st.just(Why.CHAT),
    tenant=st.just("t"),
    key=st.just("k"),
    data=st.just(b""),
    cost=st.just(1),
    crashes=st.integers(0, 3),
)


@given(st.lists(st.tuples(st.booleans(), LEASES)))
def test_what_is_counted_is_what_is_held(moves: list[tuple[bool, Lease]]) -> None:
    """Also where a lease takes the place of another one with its fence (a Redis that has forgotten gives it again)."""
    held, known = Held(), dict[Fence, Lease]()
    for comes, lease in moves:
        if comes:
            held.add(lease)
            known[lease.fence] = lease
        else:
            held.drop(lease)
            if known.get(lease.fence) is lease:
                del known[lease.fence]
    leases = list(known.values())
    assert leases == list(held)
    interactive = sum(lease.cls is TrafficClass.INTERACTIVE for lease in leases)
    assert (interactive, len(leases) - interactive) == (held.interactive, held.batch)
    assert sum(lease.crashes > 0 for lease in leases) == held.suspects
    assert sum(lease.crashes >= 2 for lease in leases) == held.in_last_attempt


@pytest.mark.parametrize("same", [True, False])
def test_only_the_very_lease_is_let_go(same: bool) -> None:
    """An attempt that was forgotten may not let go of the one that has its fence now."""
    held, fence = Held(), Fence("b:1", "1-0", 1)
    old, new = (Lease(fence, TrafficClass.BATCH, Why.BUCKET, "t", "k", b"", 1) for _ in range(2))
    held.add(old)
    if not same:
        held.add(new)
    held.drop(old)
    assert (new not in held and not len(held)) if same else (new in held and held.get(fence) is new)
