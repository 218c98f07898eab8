"""Workers that are asked to stop: real processes, real signals. Nothing is lost, and no attempt is spent."""

from __future__ import annotations

import random
import subprocess
import time
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.redis.serving import (
    KEYS,
    batch_ended,
    each_line_ended_once,
    pending,
    results,
    submit_batch,
    tries,
    until,
)
from tests.system.worker_process import WorkerProcess, runs, worker_process

FAST = "sim://?decode_tps=2000&answer=60"
SLOW = "sim://?decode_tps=40&answer=64"
ENDLESS = "sim://?decode_tps=1&answer=1000"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The file in which all engines of a test write down what they were asked."""
    return tmp_path / "runs"


def ended(worker: WorkerProcess, *, within: float = 20.0) -> int:
    """Wait for the end of the process; return its exit status."""
    try:
        return worker.process.wait(within)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the worker did not end within {within:g} s")


async def test_sigterm_at_random_moments_loses_nothing(redis_url: str, redis: Redis, log: Path) -> None:
    """G6, F-028, F-029, F-030: 6 deploys in the middle of a batch; exit status 0, no attempt spent, each line once."""
    rng = random.Random(2)
    await submit_batch(redis, 600)
    for _ in range(6):
        with worker_process(redis_url, log, FAST, grace=rng.choice([0.0, 10.0])) as worker:
            seen, more = len(runs(log)), rng.randrange(40)
            await until(lambda: len(runs(log)) > seen + more)  # noqa: B023  # awaited within the round
            worker.terminate()
            assert 0 == ended(worker)
        assert 0 == await pending(redis)
        assert {(0, 0, 0)} >= set((await tries(redis)).values())
        assert 0 == await redis.exists(KEYS.worker(worker.worker_id))
    with worker_process(redis_url, log, "sim://?instant=1"):
        await batch_ended(redis)
    await each_line_ended_once(redis, 600)


async def test_running_requests_finish_within_the_grace(redis_url: str, redis: Redis, log: Path) -> None:
    """G6: SIGTERM starts nothing new; what runs is answered, and written before the process ends."""
    await submit_batch(redis, 6)
    with worker_process(redis_url, log, SLOW, concurrency=2) as worker:
        await until(lambda: len(runs(log)) == 2)
        worker.terminate()
        assert 0 == ended(worker)
    assert ["line 1", "line 2"] == sorted(runs(log))
    assert {"c1", "c2"} == {row["k"] for row in await results(redis)}
    await redis.flushall()


async def test_a_second_sigterm_hands_back_at_once(redis_url: str, redis: Redis, log: Path) -> None:
    """G6, F-031: in the middle of a long grace, the second signal ends it; the lines wait again, as they were."""
    await submit_batch(redis, 2)
    with worker_process(redis_url, log, ENDLESS, concurrency=2, grace=60) as worker:
        await until(lambda: len(runs(log)) == 2)
        worker.terminate()
        await until(lambda: _state(redis, worker, "draining"))
        began = time.monotonic()
        worker.terminate()
        assert 0 == ended(worker)
        assert time.monotonic() - began < 3
    assert {"1-0": (0, 0, 0), "2-0": (0, 0, 0)} == await tries(redis)
    await redis.flushall()


async def test_newer_data_ends_the_worker_with_a_clear_message(redis_url: str, redis: Redis, log: Path) -> None:
    """F-046: a part that cannot go on ends the process, non-zero; the last line says what to do."""
    with worker_process(redis_url, log, FAST) as worker:
        await redis.hset(KEYS.config, "format", "2")
        assert 0 != ended(worker)
        assert worker.process.stderr is not None
        assert b"update llmq on this host" in worker.process.stderr.read()


async def _state(redis: Redis, worker: WorkerProcess, state: str) -> bool:
    return await redis.hget(KEYS.worker(worker.worker_id), "state") == state.encode()
