"""The doctor: looks for what breaks queues in the field, and says of each thing that it is fine, or what to type.

It works as llmq does (the claim script, a write, the same connection), takes no job, and changes no setting. What it
measures is judged by functions without I/O. The engine is looked at by the command line: nothing here knows engines.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from llmq.scheduler.connection import check_server, redis_errors
from llmq.scheduler.errors import LLMQError
from llmq.scheduler.fleet import SILENT, WorkerStatus, read_workers
from llmq.scheduler.health import check_health
from llmq.scheduler.queue import Queue
from llmq.scheduler.redis_url import redact
from llmq.scheduler.server_check import primaries_of
from llmq.scheduler.units import format_size

#: PINGs that are timed: enough to see the slowest in a hundred.
_PINGS = 100

#: A trip to Redis stands several times between a chat job and its first token.
_SLOW_S = 0.1

#: llmq goes by Redis' clock; a host that is further off shows wrong ages and sorts its logs wrongly.
_CLOCK_OFF_S = 5.0

#: Used memory from which on a server is about to refuse jobs.
_NEARLY_FULL = 0.9

#: A script that no server knows.
_UNKNOWN_SHA = "0" * 40


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found of one thing; `step` is what to do about it where it is not fine."""

    check: str
    fine: bool
    text: str
    step: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return one of the findings of `doctor --json`."""
        return {"check": self.check, "fine": self.fine, "text": self.text, "step": self.step or None}


async def examine(queue: Queue, url: str) -> AsyncGenerator[Finding, None]:
    """Iterate over the findings. Where the server cannot be used at all, nothing else of it is looked at."""
    server = await _tried("server", url, lambda: _server(queue.redis, url))
    for finding in server:
        yield finding
    if not server[0].fine:
        return
    checks: dict[str, Callable[[], Awaitable[list[Finding]]]] = {
        "memory": lambda: _memory(queue.redis),
        "latency": lambda: _latency(queue.redis),
        "clock": lambda: _clock(queue),
        "scripts": lambda: _scripts(queue),
        "claim": lambda: _claim(queue),
        "workers": lambda: _workers(queue),
    }
    for name, check in checks.items():
        for finding in await _tried(name, url, check):
            yield finding


async def _tried(name: str, url: str, check: Callable[[], Awaitable[list[Finding]]]) -> list[Finding]:
    """Make one check; what it raises is its finding."""
    try:
        with redis_errors(url):
            return await check()
    except LLMQError as error:
        return [Finding(name, False, str(error))]
    except RedisError as error:
        return [Finding(name, False, f"Redis at {redact(url)} answered: {error}", "look for that in its log")]


# --- what is measured -----------------------------------------------------------------------------------------------


async def _server(redis: Redis, url: str) -> list[Finding]:
    facts = await check_server(redis)
    cluster = " (cluster)" if facts.cluster else ""
    found = [Finding("server", True, f"{facts.name} {facts.version}{cluster} at {redact(url)}")]
    # A warning says what is wrong and, behind a semicolon, what to type.
    parts = [warning.partition("; ") for warning in facts.warnings]
    found += [Finding("settings", False, what, step) for what, _, step in parts]
    if not parts:
        found.append(Finding("settings", True, "append-only file on, nothing is evicted"))
    return found


async def _memory(redis: Redis) -> list[Finding]:
    nodes: list[dict[str, Any]] = [await node.info("memory") for node in await primaries_of(redis)]
    return [
        judge_memory(int(node["used_memory"]), int(node.get("maxmemory", 0)), int(node.get("total_system_memory", 0)))
        for node in nodes
    ]


async def _latency(redis: Redis) -> list[Finding]:
    await redis.ping()  # the first one connects
    return [judge_latency([await _timed(redis.ping) for _ in range(_PINGS)])]


async def _clock(queue: Queue) -> list[Finding]:
    if await cast(Any, queue.redis).hexists(queue.keys.config, "virtual"):
        return [Finding("clock", True, "a simulation sets the time of this queue")]
    before = time.time()
    theirs = await queue.now_ms() / 1000
    after = time.time()
    return [judge_clock((before + after) / 2 - theirs)]


async def _scripts(queue: Queue) -> list[Finding]:
    """A server forgets its scripts at a restart and a failover: what it then answers must be understood (G12)."""
    try:
        await cast(Any, queue.redis).evalsha(_UNKNOWN_SHA, 1, queue.keys.config)
    except NoScriptError:
        return [Finding("scripts", True, "a script that the server forgot is noticed, and loaded again")]
    return [
        Finding(
            "scripts",
            False,
            "the server ran a script that it cannot know: something between here and Redis answers for it",
            "connect to Redis itself, without a proxy",
        )
    ]


async def _claim(queue: Queue) -> list[Finding]:
    health = await check_health(queue)
    return [
        Finding(
            "claim",
            True,
            f"queue {queue.name}: claim {health.claim_s * 1000:.1f} ms, write {health.write_s * 1000:.1f} ms",
        )
    ]


async def _workers(queue: Queue) -> list[Finding]:
    return [judge_workers(await read_workers(queue), queue.name)]


async def _timed(call: Callable[[], Awaitable[object]]) -> float:
    began = time.perf_counter()
    await call()
    return time.perf_counter() - began


# --- and how it is judged -------------------------------------------------------------------------------------------


def judge_memory(used: int, most: int, machine: int) -> Finding:
    """Judge what a server uses of its `maxmemory`, or of its machine where there is none (0: not known)."""
    limit, of = (most, "maxmemory") if most else (machine, "the machine's memory; no maxmemory is set")
    if not limit:
        return Finding("memory", True, f"{format_size(used)} used; no maxmemory is set")
    text = f"{format_size(used)} used of {format_size(limit)} ({of})"
    if used < _NEARLY_FULL * limit:
        return Finding("memory", True, text)
    give = "CONFIG SET maxmemory SIZE" if most else "a larger machine"
    step = f"delete batches that are done (llmq batch delete ID), or give it more: {give}"
    return Finding("memory", False, f"{text}: it is about to refuse jobs", step)


def judge_latency(seconds: Sequence[float]) -> Finding:
    """Judge the times of some trips."""
    ordered = sorted(seconds)
    half, most = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.99))
    text = f"p50 {half * 1000:.1f} ms, p99 {most * 1000:.1f} ms of {len(ordered)} pings"
    if most < _SLOW_S:
        return Finding("latency", True, text)
    step = "put Redis nearer to the workers, or see what holds it up: SLOWLOG GET, LATENCY DOCTOR"
    return Finding("latency", False, f"{text}: chat waits for several such trips", step)


def judge_clock(offset_s: float) -> Finding:
    """Judge by how much this host's clock is ahead of Redis'."""
    size = f"{abs(offset_s):.1f} s" if abs(offset_s) >= 1 else f"{abs(offset_s) * 1000:.0f} ms"
    text = f"this host is {size} {'ahead of' if offset_s > 0 else 'behind'} Redis"
    if abs(offset_s) < _CLOCK_OFF_S:
        return Finding("clock", True, text)
    return Finding("clock", False, f"{text}; llmq goes by Redis' clock, people by others", "set both by NTP")


def judge_workers(workers: Sequence[WorkerStatus], queue: str) -> Finding:
    """Judge the workers of a queue by their states."""
    alive = [worker for worker in workers if worker.state != SILENT]
    states = {state: [one for one in workers if one.state == state] for state in sorted({one.state for one in workers})}
    text = ", ".join(f"{len(some):,} {state}" for state, some in states.items()) or "none"
    if not alive:
        option = "" if queue == "default" else f" --queue {queue}"
        return Finding("workers", False, f"{text}: nobody serves queue {queue}", f"llmq worker --gpu 0{option}")
    if sick := [worker.id for worker in workers if worker.state in (SILENT, "engine_down")]:
        named = ", ".join(sick[:3]) + (", ..." if len(sick) > 3 else "")
        return Finding("workers", False, f"{text} ({named})", "look after them: llmq workers")
    slots = sum(worker.slots for worker in alive)
    return Finding("workers", True, f"{text}; {slots:,} {'slot' if slots == 1 else 'slots'}")
