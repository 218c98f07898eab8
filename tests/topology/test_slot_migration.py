"""A queue's hash slot moves to another node: MOVED, ASK and TRYAGAIN, with work in flight (F-091, F-092)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
from redis.exceptions import TryAgainError

from llmq.scheduler.connection import connect, connect_sync
from llmq.scheduler.outage import Outage
from tests.redis.serving import KEYS, batch_ended, each_line_ended_once, submit_batch
from tests.system.worker_process import worker_process
from tests.topologies import ClusterSet, under_way
from tests.topology.conftest import OwnSet
from tests.topology.load import Load

ENGINE = "sim://?decode_tps=2000&answer=20"


@pytest.fixture
def cluster(own_set: OwnSet) -> ClusterSet:
    """A cluster that the test may rearrange."""
    return cast(ClusterSet, own_set("cluster"))


async def test_single_commands_transactions_and_pipelines_find_their_keys(cluster: ClusterSet) -> None:
    """While half of the keys are here and half there: ASK for what has moved, each thing done once; then MOVED."""
    client, sync = connect(cluster.url), connect_sync(cluster.url)
    for name in ("stays", "goes"):
        await client.set(f"{{q}}{name}", name)
    with under_way("{q}", cluster) as (_, source, target):
        with source.client() as plain:
            plain.execute_command("MIGRATE", "127.0.0.1", target.port, "{q}goes", 0, 5000)
        assert [b"stays", b"goes"] == [await client.get("{q}stays"), await client.get("{q}goes")]
        assert [b"stays", b"goes"] == [sync.get("{q}stays"), sync.get("{q}goes")]
        pipe = client.pipeline(transaction=False)
        for name in ("stays", "goes", "new"):
            pipe.incr(f"{{q}}n-{name}")
        pipe.get("{q}goes")
        assert [1, 1, 1, b"goes"] == await pipe.execute()
        pushed: Any = client.pipeline(transaction=True)
        pushed.rpush("{q}list", "a")
        pushed.pexpire("{q}list", 60_000)
        assert [1, True] == [bool(reply) for reply in await pushed.execute()]
        with pytest.raises(TryAgainError):  # one here, one there: only later
            await client.mget("{q}stays", "{q}goes")
        with pytest.raises(TryAgainError):
            sync.mget("{q}stays", "{q}goes")
    assert [b"stays", b"goes"] == await client.mget("{q}stays", "{q}goes")
    assert [b"stays", b"goes"] == sync.mget("{q}stays", "{q}goes")
    assert 1 == await client.llen("{q}list")
    assert b"1" == await client.get("{q}n-new")
    await client.aclose()
    sync.close()


async def test_a_wait_that_blocks_goes_along(cluster: ClusterSet) -> None:
    """BLPOP and XREAD are sent away by the node that loses the slot, and wait on at the other."""
    client = connect(cluster.url, blocking_s=10)
    await client.set("{q}key", "1")
    popped: asyncio.Task[Any] = asyncio.create_task(cast(Any, client.blpop(["{q}bell"], timeout=10)))
    read: asyncio.Task[Any] = asyncio.create_task(cast(Any, client.xread({"{q}stream": "0"}, block=10_000)))
    await asyncio.sleep(0.2)
    with under_way("{q}", cluster):
        pass
    await client.rpush("{q}bell", "ring")
    await client.xadd("{q}stream", {"a": "1"})
    assert (b"{q}bell", b"ring") == tuple(await popped)
    assert 1 == len(await read)
    await client.aclose()


async def test_no_cancellation_is_swallowed(cluster: ClusterSet) -> None:
    """Before Python 3.12 redis-py's connections forget one that comes while a command is sent (F-027, F-142)."""
    client = connect(cluster.url)

    async def commands() -> None:
        while True:
            await client.get("{q}x")
            pipe = client.pipeline(transaction=True)
            pipe.get("{q}x")
            pipe.get("{q}y")
            await pipe.execute()

    async with asyncio.timeout(60):
        for steps in range(120):
            task = asyncio.create_task(commands())
            for _ in range(steps % 40 + 1):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task], timeout=2)
            assert task.cancelled()
    await client.aclose()


async def test_a_queue_moves_with_work_in_flight(cluster: ClusterSet, tmp_path: Path) -> None:
    """Submits, claims and results stop for as long as the slot is on its way, and nothing is lost (G1, G3, G12)."""
    redis = connect(cluster.url)
    with worker_process(cluster.url, tmp_path / "runs", ENGINE, concurrency=8) as worker:
        await submit_batch(redis, 300)
        async with Load(cluster.url) as load:
            await load.more()
            await asyncio.to_thread(_move_slowly, cluster)
            await load.more()
        await Outage("").ride_out(lambda: batch_ended(redis, within=60))
        await each_line_ended_once(redis, 300)
        tally = await load.account()
        assert worker.process.poll() is None
    assert ([], []) == (tally.lost_at, tally.ended)
    assert tally.answered > 40
    assert all("moving this queue" in line for line in tally.refused), set(tally.refused)
    await redis.aclose()


def _move_slowly(cluster: ClusterSet) -> None:
    """Move the slot a few keys at a time: for most of it some keys of the queue are here and some there."""
    with under_way(KEYS.config, cluster) as (slot, source, target):
        for _ in range(20):
            cluster.move_keys(slot, source, target, count=2)
