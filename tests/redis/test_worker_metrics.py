"""A worker's own metrics, scraped over HTTP; and its faults as the queue counts them."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import pytest
from redis.asyncio import Redis

from llmq.scheduler import scripts
from llmq.scheduler.errors import UsageError
from llmq.scheduler.inspect import read_status
from llmq.scheduler.lease import HandedBack, Reason
from llmq.scheduler.queue import Queue
from llmq.workers import keeper as keeper_module
from llmq.workers.engines.base import EngineGone, EngineUnclear
from llmq.workers.metrics import MetricsAddress
from llmq.workers.shutdown import Shutdown
from llmq.workers.worker import Worker, WorkerOptions
from tests.engine.scripted import ScriptedEngine
from tests.metric_text import Scrape
from tests.redis.serving import KEYS, batch_ended, configure, job_ended, serving, submit_batch, submit_chat, until


def free_port() -> int:
    """Return a port that nobody has at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


async def scrape(port: int) -> Scrape:
    """Return what Prometheus would read of a worker."""
    async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{port}/metrics") as response:
        assert 200 == response.status
        found = Scrape(await response.text())
    assert [] == found.faults()
    return found


async def test_a_worker_tells_of_itself(redis_url: str, redis: Redis) -> None:
    """Slots in use while a job runs, then the job; its own percentiles; nothing of other workers, no tenant."""
    engine, port = ScriptedEngine(slots=4), free_port()
    async with serving(redis_url, engine, concurrency=4, reserve=0, metrics=MetricsAddress(port)) as served:
        await submit_chat(redis, "j1")
        request = await engine.next()
        found = await scrape(port)
        assert (1, 0, 4) == (
            found.value("llmq_worker_slots_busy", **{"class": "interactive"}),
            found.value("llmq_worker_slots_busy", **{"class": "batch"}),
            found.value("llmq_worker_slots"),
        )
        assert (1, 1) == (found.value("llmq_worker_redis_up"), found.value("llmq_worker_engine_up"))
        assert 1 == found.value("llmq_worker_info", worker=served.worker.id, gpu="0")
        request.say("hi")
        request.answer()
        await job_ended(redis, "j1")
        found = await scrape(port)
        assert 1 == found.value("llmq_worker_jobs_ended_total", **{"class": "interactive", "outcome": "completed"})
        assert 1 == found.value("llmq_worker_interactive_first_token_seconds_count")
        assert 3 == len(found.values("llmq_worker_interactive_total_quantile_seconds"))
        assert 0 < found.value("llmq_worker_last_claim_timestamp_seconds")
        assert {"llmq_worker", "process"} == {
            "_".join(name.split("_")[: 2 if name[0] == "l" else 1]) for name in found.kinds
        }
    with pytest.raises(aiohttp.ClientError):
        await scrape(port)


async def test_a_worker_whose_loop_hangs_can_still_be_looked_at(redis_url: str) -> None:
    """The server is a thread of its own: a scrape waits for nothing of the worker (F-046)."""
    port = free_port()

    def from_a_thread() -> Scrape:
        return asyncio.run(scrape(port))

    async with serving(redis_url, ScriptedEngine(slots=4), metrics=MetricsAddress(port)):
        with ThreadPoolExecutor() as threads:
            found = threads.submit(from_a_thread).result(timeout=10)  # which holds up the loop, and so the worker
    assert 4 == found.value("llmq_worker_slots")


async def test_a_port_that_is_taken_is_said_before_anything_begins(redis_url: str, redis: Redis) -> None:
    """One line with the next step, and no worker in the list."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        options = WorkerOptions(metrics=MetricsAddress(holder.getsockname()[1]), announce=lambda line: None)
        engine = ScriptedEngine()
        with pytest.raises(UsageError, match=r"--metrics-port: .* is in use"):
            await Worker.start(redis_url, engine, await engine.probe(), options, Shutdown())
    assert 0 == await redis.exists(KEYS.workers)


async def test_faults_are_counted_where_they_happen(
    redis_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry, a death of the engine, an outcome that the fence refuses: each once, in the queue's totals."""
    # A renewal between the end of the delivery and the answer would abort the request: no outcome would be refused.
    monkeypatch.setattr(keeper_module, "LONGEST_INTERVAL_S", 60.0)
    await configure(redis, lease="240000")
    engine = ScriptedEngine(slots=1)
    async with serving(redis_url, engine, concurrency=1, reserve=0) as served:
        await submit_batch(redis, 1)
        (await engine.next()).fail(EngineUnclear("HTTP 500", 500, b"{}"))
        request = await engine.next()
        lease = next(iter(served.worker._desk.held))
        # Somebody else ends the delivery, as a sweeper would after a partition.
        await scripts.run(
            redis, scripts.hand_back(KEYS, served.worker.id, [(lease.fence, HandedBack(Reason.SHUTDOWN))])
        )
        request.answer()
        (await engine.next()).fail(EngineGone("died", in_flight=True))
        (await engine.next()).answer()
        await batch_ended(redis)

    async def counted() -> dict[str, Any]:
        totals: dict[str, Any] = (await read_status(Queue(redis, "default"))).to_json()["totals"]
        return totals

    async def all_there() -> bool:
        return bool((await counted())["jobs_ended"] >= 2)

    await until(all_there)
    totals = await counted()
    assert (2, 1, 2) == (totals["retries"], totals["stale_outcomes"], totals["engine_errors"])
