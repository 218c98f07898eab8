"""Primaries that die, are replaced by hand, or stand still, with work in flight: Sentinel and Cluster alike.

Worker, client and command line follow by themselves (G12); every acknowledged job is accounted for (G1), no line of a
batch ends twice (G3, G16). What a replica had not heard of yet when its primary died is lost: that is Redis', and
docs/redis.md says how to have less of it (F-072, F-088).

Run by hand (`pytest tests/topology/by_hand_failover.py`): what a failover loses is a matter of milliseconds, so one
of them may go red where nothing is wrong. Known to be open: after a primary of a Sentinel set has stood still, a wait
for a job may last longer than the minute that the test allows.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from llmq import AsyncClient
from llmq.scheduler.connection import connect
from llmq.scheduler.errors import JobInterrupted
from llmq.scheduler.outage import Outage
from tests.redis.serving import KEYS, batch_ended, configure, each_line_ended_once, submit_batch, until
from tests.system.cli_process import Done, started
from tests.system.worker_process import runs, worker_process
from tests.topologies import Topology
from tests.topology.conftest import SETS, OwnSet
from tests.topology.load import Load, Tally

#: About 10 ms a job: more than the load needs, or the backlog would be the story.
ENGINE = "sim://?decode_tps=2000&answer=20"
SLOW = "sim://?decode_tps=40&answer=64"

#: All keys of the queue are on one node: that of this one.
KEY = KEYS.config

#: A key of the test's own, on the same node.
PROBE = f"{KEY}:heard-of"

#: What a replica lags behind its primary on one host, with much to spare.
LAG_S = 1.0


async def _through(servers: Topology, tmp_path: Path, change: str) -> tuple[Tally, float, float]:
    """Run load and a batch through a change of the primary; return the tally, and when it began and was over."""
    url, old = servers.url, await asyncio.to_thread(servers.primary_of, KEY)
    redis = connect(url)
    await configure(redis, lease="2000")
    with worker_process(url, tmp_path / "runs", ENGINE, concurrency=8, least_contact=0) as worker:
        await submit_batch(redis, 400)
        async with Load(url) as load:
            await load.more()
            began = time.monotonic()
            if change == "killed":
                old.kill()
            elif change == "frozen":
                old.freeze()
            else:
                await asyncio.to_thread(servers.fail_over, KEY)
            await asyncio.to_thread(servers.await_promotion, old, KEY)
            if change == "frozen":
                old.thaw()
            await load.more()
            over = time.monotonic()
            status = await asyncio.to_thread(_status, url)
            assert [worker.worker_id] == [one["id"] for one in status.json["workers"]], status.err
        await Outage("").ride_out(lambda: batch_ended(redis, within=60))
        await each_line_ended_once(redis, 400)
        tally = await load.account()
        assert worker.process.poll() is None
    await redis.aclose()
    print(f"{change}: {tally.answered} answered, {len(tally.lost_at)} lost, {len(tally.refused)} refused", end=" ")
    print(f"served again after {over - began:.1f} s; errors: {sorted(set(tally.refused))[:3]}")
    return tally, began, over


def _status(url: str) -> Done:
    with started("status", "--json", url=url) as command:
        return command.end()


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("change", ["killed", "by hand"])
async def test_all_follow_the_primary(own_set: OwnSet, tmp_path: Path, name: str, change: str) -> None:
    """SIGKILL of the primary, and a failover by hand, which answers READONLY or MOVED (G1, G12, F-072, F-087, F-088).

    A cluster's primary that is asked to go hands over all that it has. Sentinel promotes a replica beside it: what the
    old one takes until everybody has followed is gone, as is what one that is killed had not passed on yet. A job whose
    answer had begun then ends as interrupted (G18).
    """
    tally, began, over = await _through(own_set(name), tmp_path, change)
    assert all(isinstance(end, JobInterrupted) for end in tally.ended)
    assert all(began - LAG_S < at < over for at in tally.lost_at)
    assert tally.answered > 40
    assert over - began < 30


@pytest.mark.parametrize("name", SETS)
async def test_a_primary_that_stood_still_comes_back_as_a_replica(own_set: OwnSet, tmp_path: Path, name: str) -> None:
    """It wakes up believing that it is the primary, and is told otherwise (F-087); what it took meanwhile is gone."""
    tally, began, over = await _through(own_set(name), tmp_path, "frozen")
    assert all(isinstance(end, JobInterrupted) for end in tally.ended)
    assert all(began - LAG_S < at < over for at in tally.lost_at)
    assert tally.answered > 40


@pytest.mark.parametrize("name", SETS)
async def test_jobs_of_a_killed_worker_run_elsewhere(own_set: OwnSet, tmp_path: Path, name: str) -> None:
    """SIGKILL of a worker: its jobs are reclaimed on every topology (G5, F-044)."""
    url, log = own_set(name).url, tmp_path / "runs"
    redis = connect(url)
    await configure(redis, lease="1000")
    with (
        worker_process(url, log, SLOW, concurrency=3, least_contact=0) as first,
        worker_process(url, log, SLOW, concurrency=3, least_contact=0),
    ):
        await submit_batch(redis, 6)
        await until(lambda: len(runs(log)) == 6)
        first.kill()
        await batch_ended(redis)
        await each_line_ended_once(redis, 6)
        assert 9 == len(runs(log))
    await redis.aclose()


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
