"""A phase of a trial that takes turns, on a real server with a real worker: what the pause is to the worker."""

from __future__ import annotations

from redis.asyncio import Redis

from llmq.scheduler.job import Job
from llmq.scheduler.queue import Queue
from llmq.workers.engines.base import EngineAnswer, OnDelta
from llmq.workers.engines.sim import SimEngine
from llmq.workers.traffic import Arrival
from llmq.workers.trial.metered import BATCH_USER, MeteredEngine
from llmq.workers.trial.phase import Plan, queued
from llmq.workers.trial.requests import Requests, Wording


class Noting(MeteredEngine):
    """Notes in which order requests come: `c` of chat, `b` of batch."""

    came = ""

    async def run(self, job: Job, on_delta: OnDelta | None = None) -> EngineAnswer:
        """Note it, and run it."""
        self.came += "b" if job.body.get("user") == BATCH_USER else "c"
        return await super().run(job, on_delta)


def gpu() -> Noting:
    """Return a fast engine of four slots."""
    return Noting(SimEngine.from_url("sim://?slots=4&prefill_tps=100000&decode_tps=1000"))


def plan(arrivals: list[float], seconds: float, warmup: float) -> Plan:
    """Return a plan of two turns."""
    chat = [Arrival(at, 5, 5) for at in arrivals]
    return Plan(chat, seconds, warmup, 4, lambda: Requests(Wording(), 0.1, 4000), turns=2)


async def test_after_a_pause_between_turns_batch_comes_back_when_chat_has(redis_url: str, redis: Redis) -> None:
    """Else a worker that had a long pause would give batch all slots, just before the chat that is measured."""
    engine, came = gpu(), []
    wanted = plan([0.3, 0.7, 1.8, 1.9], seconds=3.0, warmup=1.4)
    async for _ in queued("llmq", wanted, engine, Queue(redis, "trial"), redis_url, lines=5000):
        came.append(engine.came)
        engine.came = ""
    first, second = came
    assert ("b", "c") == (first[0], second[0])
    assert 2 == first.count("c") == second.count("c")
    assert second.count("b") > 20


async def test_batch_does_not_wait_for_chat_that_does_not_come(redis_url: str, redis: Redis) -> None:
    """It is back at the end of the warm-up, so that all seconds that count have it."""
    wanted = plan([0.5], seconds=2.0, warmup=0.2)
    made = [p.made async for p in queued("llmq", wanted, gpu(), Queue(redis, "trial"), redis_url, lines=5000)]
    assert made[1] > made[0] > 0
