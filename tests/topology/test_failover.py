"""Primaries that are replaced with work in flight: one way on Sentinel, another on a cluster, so that it stays quick.

The other ways, and more of the same: `pytest tests/topology/by_hand_failover.py`, and `python -m tests.chaos`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from llmq import AsyncClient
from tests.system.worker_process import worker_process
from tests.topology.conftest import SETS, OwnSet
from tests.topology.failing_over import ENGINE, KEY, a_worker_dies, through

#: A key of the test's own, on the node of the queue.
PROBE = f"{KEY}:heard-of"


@pytest.mark.parametrize(("name", "change"), [("sentinel", "killed"), ("cluster", "by hand")])
async def test_all_follow_the_primary(own_set: OwnSet, tmp_path: Path, name: str, change: str) -> None:
    """SIGKILL of the primary, and a failover by hand, which answers MOVED (G1, G12, F-072, F-087, F-088).

    A cluster's primary that is asked to go hands over all that it has: nothing is lost. One that is killed takes along
    what it had not passed on yet. A job whose answer had begun then ends as interrupted (G18).
    """
    tally = await through(own_set(name), tmp_path, change)
    assert change == "killed" or not tally.lost_at


async def test_jobs_of_a_killed_worker_run_elsewhere(own_set: OwnSet, tmp_path: Path) -> None:
    """SIGKILL of a worker: its jobs are reclaimed on a cluster, too (G5, F-044)."""
    await a_worker_dies(own_set("cluster").url, tmp_path / "runs")


@pytest.mark.parametrize("name", SETS)
async def test_a_client_that_waits_hears_of_the_end_after_a_failover(
    own_set: OwnSet, tmp_path: Path, name: str
) -> None:
    """The wait began at the old primary, the answer is at the new one, and nobody asks twice (G13)."""
    servers = own_set(name)
    old = servers.primary_of(KEY)
    async with AsyncClient(servers.url) as client:
        job = await client.submit({"messages": [{"role": "user", "content": "wait"}]}, timeout=0)
        waiting = asyncio.create_task(job.result(60))
        with old.client() as plain:
            # WAIT asks for the writes of its own connection: without one it waits for nothing.
            plain.set(PROBE, "x", ex=60)
            assert plain.wait(1, 5000)
        old.kill()
        await asyncio.to_thread(servers.await_promotion, old, KEY)
        with worker_process(servers.url, tmp_path / "runs", ENGINE):
            assert 200 == (await waiting).status_code
