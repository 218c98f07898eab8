"""The inspector on a real server: every figure of `status --json`, and what one look costs."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis

from llmq.scheduler import scripts
from llmq.scheduler.inspect import MAX_LANES, read_status, read_workers
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.lease import ErrorCode
from llmq.scheduler.measures import Measures
from llmq.scheduler.queue import Queue
from llmq.scheduler.totals import sums
from llmq.scheduler.units import Rate
from tests.scripted_queue import T0, ScriptedQueue

pytestmark = pytest.mark.leaves("llmq:{q}:*")


@pytest.fixture
def jobs(redis: Redis) -> Queue:
    """The queue of the `queue` fixture, as its users see it."""
    return Queue(redis, "q")


async def status(jobs: Queue) -> dict[str, Any]:
    """Return `status --json`."""
    return (await read_status(jobs)).to_json()


async def beat(queue: ScriptedQueue, worker: str, **fields: str | int) -> None:
    """Write a worker's heartbeat."""
    about: dict[str, str | int] = {
        "id": worker, "host": "gpu-7", "pid": 12, "gpu": "0", "engine": "vllm", "engine_url": "http://u:secret@h:8000",
        "models": '["qwen"]', "simulated": 0, "slots": 8, "busy_i": 1, "busy_b": 3, "batch_cap": 7, "reserve": 1,
        "state": "ready", "started_at": T0, "seen_at": T0, "claimed_at": T0, "lanes": '["batch:B"]', "version": "0.1",
    }  # fmt: skip
    await queue.call(scripts.beat(queue.keys, worker, ttl_ms=60_000, fields=about | fields))


async def test_an_empty_queue_has_zeros_and_nulls(queue: ScriptedQueue, jobs: Queue) -> None:
    """Every figure is there; what was never measured is null, not 0."""
    empty = {"waiting": 0, "running": 0, "delayed": 0, "dead": 0, "oldest_wait_s": None}
    nothing = {"p50": None, "p95": None, "p99": None, "count": 0}
    assert {
        "queue": "q",
        "at": T0 / 1000,
        "interactive": empty,
        "batch": empty
        | {"throughput_per_s": None, "mean_wait_s": None, "done": 0, "failed": 0}
        | {"preempted": 0, "kept_tokens": 0, "wasted_tokens": 0},
        "dead": 0,
        "bucket": {
            "rate": None,
            "unit": None,
            "burst": None,
            "tokens": None,
            "exhausted": 0,
            "wait_s": None,
            "dry_s": None,
            "open": True,
            "changes_at": None,
        },
        "paused": [],
        "objective": {"ttft_p95_s": None, "itl_p95_s": None, "yields": False, "decisions": []},
        "latency": {"queue_wait_s": nothing, "ttft_s": nothing, "total_s": nothing, "window_s": None},
        "workers": [],
        "lanes": 0,
        "lanes_cut": False,
        "results_bytes": 0,
        "totals": dict.fromkeys(sums({}), 0),
    } == await status(jobs)


async def test_jobs_are_counted_where_they_are(queue: ScriptedQueue, jobs: Queue) -> None:
    """Waiting, running, delayed and dead, of single jobs and of lines; the oldest that waits, of each class."""
    for number in range(3):
        await queue.submit(f"i{number}")
    await queue.submit("b0", cls="b")
    await queue.batch("B", 10)
    leases = (await queue.claim(2)).leases  # chat first
    await queue.pass_time(4_000)
    await queue.retry(leases[0], 60.0)
    await queue.end(leases[1], ErrorCode.WORKER_LOST, dead=True)
    lines = (await queue.claim(5)).leases  # the third chat job, and lines
    await queue.retry(lines[-1], 60.0)
    shown = await status(jobs)
    assert {"waiting": 0, "running": 1, "delayed": 1, "dead": 1, "oldest_wait_s": None} == shown["interactive"]
    batch = {name: shown["batch"][name] for name in ("waiting", "running", "delayed", "dead", "oldest_wait_s")}
    assert {"waiting": 7, "running": 3, "delayed": 1, "dead": 0, "oldest_wait_s": 4.0} == batch
    assert 1 == shown["dead"]


async def test_the_oldest_wait_is_of_a_job_that_waits(queue: ScriptedQueue, jobs: Queue, redis: Redis) -> None:
    """Not of one that runs; what was handed back waits since its submit. Entries are named by the server's clock."""
    await redis.hdel(queue.keys.config, "virtual")
    first = await queue.submit("first")
    (lease,) = (await queue.claim()).leases
    assert None is (await status(jobs))["interactive"]["oldest_wait_s"]
    second = await queue.submit("second")

    async def since() -> float:
        shown = await status(jobs)
        return float(shown["at"] - shown["interactive"]["oldest_wait_s"])

    assert await since() == pytest.approx(int(second.value.split("-")[0]) / 1000, abs=0.002)
    await queue.hand_back(lease)
    assert await since() == pytest.approx(int(first.value.split("-")[0]) / 1000, abs=0.002)


async def test_a_debt_in_another_unit_is_shown_as_none(queue: ScriptedQueue, jobs: Queue) -> None:
    """LLM tokens that were overdrawn are no jobs: the next claim finds what has come since."""
    await queue.configure(rate=10, burst=10, unit="tok")
    await queue.batch("B", 9, cost=5_000)
    await queue.claim(1)
    assert -4990.0 == (await status(jobs))["bucket"]["tokens"]
    await queue.configure(rate=2, burst=4, unit="job")
    assert 0.0 == (await status(jobs))["bucket"]["tokens"]
    await queue.pass_time(500)
    assert 1 == len((await queue.claim(9)).leases)


async def test_the_bucket_is_shown_as_the_next_claim_finds_it(queue: ScriptedQueue, jobs: Queue) -> None:
    """Tokens are refilled to now; how often it was empty, and for how long, on average."""
    await jobs.set_rate(Rate(2.0), 4.0)
    assert 4.0 == (await status(jobs))["bucket"]["tokens"]
    await queue.batch("B", 20)
    assert 4 == len((await queue.claim(8)).leases)
    assert "bucket" == (await queue.claim(8)).reason
    bucket = (await status(jobs))["bucket"]
    assert (2.0, "job", 4.0, 0.0, 0.0) == tuple(bucket[k] for k in ("rate", "unit", "burst", "tokens", "dry_s"))
    await queue.pass_time(250)
    bucket = (await status(jobs))["bucket"]
    assert (0.5, 0.25, None) == (bucket["tokens"], bucket["dry_s"], bucket["wait_s"])
    await queue.pass_time(250)
    assert 1 == len((await queue.claim(1)).leases)
    bucket = (await status(jobs))["bucket"]
    assert (1, 0.5, None) == (bucket["exhausted"], bucket["wait_s"], bucket["dry_s"])
    await queue.pass_time(3_600_000)
    assert 4.0 == (await status(jobs))["bucket"]["tokens"]


async def test_a_window_shows_what_is_in_force(queue: ScriptedQueue, jobs: Queue) -> None:
    """T0 is a Sunday, 01:46 UTC."""
    await jobs.set("windows", "01:00-02:00 5/s; 02:00-03:00 closed")
    bucket = (await status(jobs))["bucket"]
    assert (5.0, True, T0 / 1000 + 800) == (bucket["rate"], bucket["open"], bucket["changes_at"])
    await queue.pass_time(800_000)
    assert False is (await status(jobs))["bucket"]["open"]


async def test_pauses_are_listed(jobs: Queue) -> None:
    """By the names of their classes."""
    await jobs.pause(TrafficClass.BATCH)
    assert ["batch"] == (await status(jobs))["paused"]
    await jobs.pause(TrafficClass.INTERACTIVE)
    await jobs.resume(TrafficClass.BATCH)
    assert ["interactive"] == (await status(jobs))["paused"]


async def test_latencies_are_those_of_all_workers(queue: ScriptedQueue, jobs: Queue) -> None:
    """Their heartbeats carry histograms, which add up."""
    now = 0.0
    first, second = Measures(lambda: now), Measures(lambda: now)
    now = 10.0
    for _ in range(99):
        first.interactive_started(0.1)
        first.batch_ended(ok=True)
    second.interactive_started(5.0)
    second.first_token(6.0)
    second.batch_started(3.0)
    await beat(queue, "w1", **first.snapshot())
    await beat(queue, "w2", **second.snapshot())
    shown = await status(jobs)
    wait = shown["latency"]["queue_wait_s"]
    assert (wait["p50"], wait["p99"]) == pytest.approx((0.1, 0.1), rel=0.05)
    assert shown["latency"]["ttft_s"]["p95"] == pytest.approx(6.0, rel=0.05)
    assert (9.9, 3.0) == (shown["batch"]["throughput_per_s"], shown["batch"]["mean_wait_s"])


async def test_workers_are_described_by_their_heartbeats(queue: ScriptedQueue, jobs: Queue) -> None:
    """Host, GPU, slots, busy, batch cap, engine, last seen; a password in the engine's URL is not shown."""
    await beat(queue, "w1")
    await queue.pass_time(3_000)
    (worker,) = (await status(jobs))["workers"]
    expected = {
        "id": "w1", "host": "gpu-7", "gpu": "0", "slots": 8, "busy": 4, "batch_cap": 7, "engine": "vllm",
        "state": "ready", "last_seen_s": 3.0, "last_seen_at": T0 / 1000, "models": ["qwen"],
    }  # fmt: skip
    assert expected == {name: worker[name] for name in expected}
    assert "secret" not in str(worker)


async def test_a_worker_that_missed_a_lease_of_heartbeats_is_silent(queue: ScriptedQueue, jobs: Queue) -> None:
    """Its heartbeat is readable for a minute; then it is gone from the list."""
    await beat(queue, "w1")
    await queue.pass_time(10_001)
    (worker,) = await read_workers(jobs)
    assert "silent" == worker.state
    await queue.redis.delete(jobs.keys.worker("w1"))
    assert [] == await read_workers(jobs)


async def test_a_heartbeat_of_another_version_is_read_as_far_as_it_goes(queue: ScriptedQueue, jobs: Queue) -> None:
    """A fleet is updated worker by worker."""
    await beat(queue, "w1", models="{", slots="many", lanes="3")
    (worker,) = await read_workers(jobs)
    assert ((), 0, ()) == (worker.models, worker.slots, worker.lanes)


async def test_one_look_costs_the_same_whatever_waits(queue: ScriptedQueue, jobs: Queue, redis: Redis) -> None:
    """The number of commands does not depend on the number of jobs."""

    async def commands() -> int:
        before = (await redis.info("stats"))["total_commands_processed"]
        await status(jobs)
        return int((await redis.info("stats"))["total_commands_processed"]) - int(before)

    await queue.submit("i0")
    await queue.batch("B", 1)
    few = await commands()
    await queue.batch("C", 1)
    for number in range(1, 50):
        await queue.submit(f"i{number}")
    await queue.append("D", 1, 1)
    await queue.open("E")
    await queue.append("E", 1, 500)
    await queue.append("E", 501, 500)
    assert await commands() - few <= 2 * 12  # two lanes more; not one command for a job


async def test_more_lanes_than_one_look_takes_are_said_to_be_cut(queue: ScriptedQueue, jobs: Queue) -> None:
    """What waits is exact all the same."""
    for number in range(MAX_LANES + 50):
        await queue.submit(f"j{number}", tenant=f"t{number}")
    shown = await status(jobs)
    assert (True, MAX_LANES + 50) == (shown["lanes_cut"], shown["lanes"])
    assert MAX_LANES + 50 == shown["interactive"]["waiting"]


async def test_dead_letters_that_are_too_many_are_counted_together(
    queue: ScriptedQueue, jobs: Queue, redis: Redis
) -> None:
    """Their classes are not known then, and the number of all is exact."""
    for _ in range(501):
        await redis.xadd(jobs.keys.dead, {"class": "b", "data": "x"})
    shown = await status(jobs)
    assert (501, None) == (shown["dead"], shown["batch"]["dead"])


async def test_large_dead_letters_are_not_read_to_tell_their_classes(
    queue: ScriptedQueue, jobs: Queue, redis: Redis
) -> None:
    """A look costs the same whatever a dead letter holds, which is its whole job (F-096)."""
    for _ in range(6):
        await redis.xadd(jobs.keys.dead, {"class": "b", "data": b"x" * 2**20})
    shown = await status(jobs)
    assert (6, None) == (shown["dead"], shown["batch"]["dead"])
