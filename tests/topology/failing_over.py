"""A change of the primary with work in flight: load, a batch, a worker and the command line, and what became of it all.

    tally = await through(own_set("sentinel"), tmp_path, "killed")

Every acknowledged job is accounted for (G1), no line of a batch ends twice (G3, G16), worker, client and command line
have followed by themselves (G12). What a replica had not heard of when its primary was replaced is lost: that is
Redis', and docs/redis.md says how to have less of it (F-072, F-088).
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from redis.asyncio import Redis

from llmq.scheduler.connection import connect
from llmq.scheduler.errors import JobInterrupted
from llmq.scheduler.outage import Outage
from tests.redis.serving import KEYS, batch_ended, configure, each_line_ended_once, submit_batch, until
from tests.system.cli_process import Done, started
from tests.system.worker_process import runs, worker_process
from tests.topologies import Topology
from tests.topology.load import Load, Tally

#: About 10 ms a job: more than the load needs, or the backlog would be the story.
ENGINE = "sim://?decode_tps=2000&answer=20"
SLOW = "sim://?decode_tps=40&answer=64"

#: All keys of the queue are on one node: that of this one.
KEY = KEYS.config

#: What a replica lags behind its primary on one host, with much to spare.
LAG_S = 1.0

#: Until a job that is submitted then is answered: down after 2 s, an election, and a machine that is busy.
SERVED_AGAIN_S = 30.0

LINES = 400


async def through(servers: Topology, tmp_path: Path, change: str) -> Tally:
    """Run load and a batch through a change of the primary: `killed`, `frozen` or `by hand`; return the tally."""
    url, old = servers.url, await asyncio.to_thread(servers.primary_of, KEY)
    redis = connect(url)
    await configure(redis, lease="2000")
    with worker_process(url, tmp_path / "runs", ENGINE, concurrency=8, least_contact=0) as worker:
        await submit_batch(redis, LINES)
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
        await Outage("").ride_out(lambda: _whole(redis))
        tally = await load.account()
        assert worker.process.poll() is None
    await redis.aclose()
    print(f"{change}: {tally.answered} answered, {len(tally.lost_at)} lost, {len(tally.refused)} refused", end=" ")
    print(f"served again after {over - began:.1f} s; errors: {sorted(set(tally.refused))[:3]}")
    assert all(isinstance(end, JobInterrupted) for end in tally.ended)
    assert all(began - LAG_S < at < over for at in tally.lost_at)
    assert tally.answered > 40
    assert over - began < SERVED_AGAIN_S
    return tally


async def a_worker_dies(url: str, log: Path) -> None:
    """SIGKILL one of two workers with three lines each: its lines run in the other, and each ends once."""
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


async def _whole(redis: Redis) -> None:
    """See the batch's end and its lines; in one step, since a primary that goes may have told of the end."""
    await batch_ended(redis, within=60)
    await each_line_ended_once(redis, LINES)


def _status(url: str) -> Done:
    with started("status", "--json", url=url) as command:
        return command.end()
