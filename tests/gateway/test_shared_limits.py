"""One key at several gateways, each a process of its own: together they keep to its limits, also when one is killed."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from llmq.gateway.keyed_admission import LEASE_S
from llmq.scheduler.api_key import KeyLimits
from llmq.scheduler.key_scripts import enter
from llmq.scheduler.keys import QueueKeys
from tests.scripted_queue import ScriptedQueue

KEYS = QueueKeys("q")


@contextlib.asynccontextmanager
async def hammers(url: str, count: int, *numbers: float) -> AsyncIterator[list[Process]]:
    """Start processes that hammer one key; all have begun. What still runs at the end is killed."""
    arguments = ["-m", "tests.gateway.key_hammer", url, "k1", *(f"{number:g}" for number in numbers)]
    running = [await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=PIPE) for _ in range(count)]
    try:
        for process in running:
            assert b"begun\n" == await line_of(process)
        yield running
    finally:
        for process in running:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def line_of(process: Process) -> bytes:
    """Return the next line that a process prints."""
    assert process.stdout is not None
    async with asyncio.timeout(60):
        return await process.stdout.readline()


async def test_four_processes_start_no_more_than_rate_and_burst_allow(redis: Redis, system_redis_url: str) -> None:
    """Together at most rate * t + burst requests, and all that was allowed is used (G8's form, F-097, F-101)."""
    requests = 300
    began = time.monotonic()
    async with hammers(system_redis_url, 4, requests, 0, 2.0) as running:
        entered = [int(await line_of(process)) for process in running]
    allowed = requests + requests / 60 * (time.monotonic() - began)
    assert requests <= sum(entered) <= allowed
    assert 2 <= sum(1 for count in entered if count)


async def test_four_processes_share_the_places_and_leave_none_behind(redis: Redis, system_redis_url: str) -> None:
    """Never more than the limit at one time, by the zset's own count; at the end all places are free (F-042)."""
    most = 0
    async with hammers(system_redis_url, 4, 0, 3, 1.5) as running:
        while any(process.returncode is None for process in running):
            most = max(most, await redis.zcard(KEYS.passes("k1")))
            await asyncio.sleep(0.005)
        entered = [int(await line_of(process)) for process in running]
    assert sum(entered) > 50
    assert 3 == most
    assert 0 == await redis.zcard(KEYS.passes("k1"))


@pytest.mark.leaves("llmq:{q}:config")
async def test_the_places_of_a_gateway_that_was_killed_come_back(redis: Redis, system_redis_url: str) -> None:
    """SIGKILL leaves the places taken for one lease, and not for ever (F-042)."""
    queue = ScriptedQueue(redis)
    call = enter(KEYS, "k1", call_id="new", limits=KeyLimits(concurrency=3), cost=0, lease_ms=30_000)
    async with hammers(system_redis_url, 1, 0, 3, 0) as (process,):
        assert b"holds 3\n" == await line_of(process)
        process.kill()
        await process.wait()
        assert "concurrency" == (await queue.call(call)).refused
        await queue.set_clock(round((time.time() + LEASE_S + 1) * 1000))
        assert "" == (await queue.call(call)).refused
