"""The ways of replacing a primary that take long, or that Redis pays for with writes: run by hand.

    pytest -n 0 -s tests/topology/by_hand_failover.py

The quick ones are in `test_failover.py`. Faults at random, one after the other: `python -m tests.chaos --topology
sentinel` (or `cluster`).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.topology.conftest import SETS, OwnSet
from tests.topology.failing_over import a_worker_dies, through


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("change", ["killed", "by hand"])
async def test_all_follow_the_primary_in_every_way(own_set: OwnSet, tmp_path: Path, name: str, change: str) -> None:
    """SIGKILL of the primary, and a failover by hand, which answers READONLY or MOVED (G1, G12, F-072, F-087, F-088).

    Sentinel promotes a replica beside the primary that is asked to go: what that one takes until everybody has followed
    is gone, and so is what one that is killed had not passed on yet.
    """
    await through(own_set(name), tmp_path, change)


@pytest.mark.parametrize("name", SETS)
async def test_a_primary_that_stood_still_comes_back_as_a_replica(own_set: OwnSet, tmp_path: Path, name: str) -> None:
    """It wakes up believing that it is the primary, and is told otherwise (F-087); what it took meanwhile is gone.

    A worker that claimed there is given the same jobs again by the new primary, which has not heard of it (G3, G12).
    """
    await through(own_set(name), tmp_path, "frozen")


async def test_jobs_of_a_killed_worker_run_elsewhere_with_sentinel(own_set: OwnSet, tmp_path: Path) -> None:
    """SIGKILL of a worker: its jobs are reclaimed (G5, F-044)."""
    await a_worker_dies(own_set("sentinel").url, tmp_path / "runs")
