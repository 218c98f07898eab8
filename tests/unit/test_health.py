"""Which workers a health check calls well, by their heartbeats."""

from __future__ import annotations

import pytest

from llmq.scheduler.errors import WorkerUnhealthy
from llmq.scheduler.fleet import WorkerStatus, worker_of
from llmq.scheduler.health import judge_worker

NOW = 2_000_000_000_000

#: The worker's own clock, which need not be Redis'.
OWN = NOW + 3_600_000


def worker(name: str = "w1", *, silent_s: float = 0.5, unclaimed_s: float = 1.0, **fields: str) -> WorkerStatus:
    """Return a worker that has been silent and has not claimed for so long."""
    unclaimed_ms = round((unclaimed_s - silent_s) * 1000)
    about = {
        "id": name, "host": "gpu-7", "pid": "12", "state": "ready", "slots": "4", "busy_i": "1", "busy_b": "2",
        "started_at": str(OWN - 900_000), "seen_at": str(OWN), "claimed_at": str(OWN - unclaimed_ms),
    }  # fmt: skip
    return worker_of(about | fields, NOW - round(silent_s * 1000), NOW, lease_s=10.0)


@pytest.mark.parametrize("name", ["w1", "gpu-7"])
def test_one_that_claims_is_well(name: str) -> None:
    """By its id, or its host; other hosts do not matter."""
    other = worker("w2", unclaimed_s=500, host="gpu-8")
    assert ("w1",) == judge_worker([worker(unclaimed_s=59), other], name)


@pytest.mark.parametrize("name", ["w1", "gpu-7"])
def test_one_that_has_not_claimed_for_a_minute_is_not(name: str) -> None:
    """Its heart beats, in a thread of its own, and its work stands still."""
    with pytest.raises(WorkerUnhealthy, match="worker w1 is ready and has not claimed for 61 s"):
        judge_worker([worker("w0"), worker(unclaimed_s=61)], name)


def test_one_that_never_claimed_counts_from_its_start() -> None:
    """A start takes some seconds; a minute is too long."""
    assert judge_worker([worker(claimed_at="0", started_at=str(OWN - 20_000))], "w1")
    with pytest.raises(WorkerUnhealthy):
        judge_worker([worker(claimed_at="0", started_at=str(OWN - 90_000))], "w1")


@pytest.mark.parametrize("full", [True, False])
def test_one_that_need_not_claim_is_well(full: bool) -> None:
    """All slots busy with long answers, or at its end: killing it would do harm."""
    found = worker(unclaimed_s=500, busy_i="2") if full else worker(unclaimed_s=500, state="draining")
    assert ("w1",) == judge_worker([found], "w1")


def test_one_that_is_silent_is_not() -> None:
    """Named by its id it is unhealthy; of a host it is what an earlier process left."""
    workers = [worker(silent_s=30, unclaimed_s=31), worker("w2")]
    with pytest.raises(WorkerUnhealthy, match="last heard 30 s ago"):
        judge_worker(workers, "w1")
    assert ("w2",) == judge_worker(workers, "gpu-7")
    with pytest.raises(WorkerUnhealthy, match="no worker 'gpu-7'"):
        judge_worker(workers[:1], "gpu-7")
