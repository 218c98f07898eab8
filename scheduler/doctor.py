"""The doctor: looks for what breaks queues in the field, and says of each thing that it is fine, or what to type.

It works as llmq does (the claim script, a write, the same connection), takes no job, and changes no setting. What it
measures is judged in `findings.py`. The engine is looked at by the command line: nothing here knows engines.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, cast

from redis import exceptions
from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from llmq.scheduler.connection import check_server, redis_errors
from llmq.scheduler.errors import LLMQError
from llmq.scheduler.findings import (
    Finding,
    judge_clock,
    judge_connections,
    judge_latency,
    judge_memory,
    judge_persistence,
    judge_place,
    judge_replicas,
    judge_rights,
    judge_workers,
)
from llmq.scheduler.fleet import read_workers
from llmq.scheduler.health import PROBE_TTL_MS, check_health
from llmq.scheduler.queue import Queue
from llmq.scheduler.redis_url import parse_redis_url, redact
from llmq.scheduler.routed import Routed
from llmq.scheduler.server_check import primaries_of, setting_of

#: PINGs that are timed: enough to see the slowest in a hundred.
_PINGS = 100

#: A script that no server knows.
_UNKNOWN_SHA = "0" * 40

#: What submitting, and what serving as a worker sends, by itself or in scripts; each would fail on a string.
_SUBMITS = (
    ("XADD", "KEY", "*", "a", "1"),
    ("XDEL", "KEY", "0-1"),
    ("XRANGE", "KEY", "-", "+"),
    ("XREAD", "STREAMS", "KEY", "0"),
    ("XPENDING", "KEY", "workers"),
    ("HSET", "KEY", "a", "1"),
    ("HGETALL", "KEY"),
    ("ZADD", "KEY", "0", "a"),
    ("ZRANGE", "KEY", "0", "0"),
    ("RPUSH", "KEY", "a"),
)
_WORKS = (
    ("XREADGROUP", "GROUP", "workers", "doctor", "STREAMS", "KEY", ">"),
    ("XCLAIM", "KEY", "workers", "doctor", "0", "0-1"),
    ("XAUTOCLAIM", "KEY", "workers", "doctor", "0", "0"),
    ("XACK", "KEY", "workers", "0-1"),
    ("BLPOP", "KEY", "1"),
)


async def examine(queue: Queue, url: str) -> AsyncGenerator[Finding, None]:
    """Iterate over the findings. Where the server cannot be used at all, nothing else of it is looked at."""
    server = await _tried("server", url, lambda: _server(queue.redis, url))
    for finding in server:
        yield finding
    if not server[0].fine:
        return
    checks: dict[str, Callable[[], Awaitable[list[Finding]]]] = {
        "disk": lambda: _disk(queue.redis),
        "memory": lambda: _memory(queue.redis),
        "clients": lambda: _clients(queue.redis),
        "replicas": lambda: _replicas(queue.redis),
        "keys": lambda: _keys(queue),
        "rights": lambda: _rights(queue, url),
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
    if facts.loses_jobs:
        what, _, step = facts.loses_jobs.partition("; ")
        found.append(Finding("settings", False, f"{what}: workers and submits refuse it", step))
    return found


async def _disk(redis: Redis) -> list[Finding]:
    told: list[dict[str, Any]] = [await node.info("persistence") for node in await primaries_of(redis)]
    kept = all(int(info.get("aof_enabled", 0)) for info in told)
    return [judge_persistence(kept, await setting_of(redis, "appendfsync"))]


async def _clients(redis: Redis) -> list[Finding]:
    told: list[dict[str, Any]] = [await node.info("clients") for node in await primaries_of(redis)]
    return [judge_connections(int(info["connected_clients"]), int(info.get("maxclients", 0))) for info in told]


async def _replicas(redis: Redis) -> list[Finding]:
    least = await setting_of(redis, "min-replicas-to-write")
    told: list[dict[str, Any]] = [await node.info("replication") for node in await primaries_of(redis)]
    return [judge_replicas(info, None if least is None else int(least)) for info in told]


async def _keys(queue: Queue) -> list[Finding]:
    keys = (*queue.keys.shared, queue.keys.lane("x"), queue.keys.back("x"), queue.keys.job("x"), queue.keys.batch("x"))
    return [judge_place(keys, isinstance(queue.redis, Routed) and queue.redis.is_cluster)]


async def _rights(queue: Queue, url: str) -> list[Finding]:
    """Try each kind of command on a key of another type: what is permitted fails for that, and nothing is changed."""
    probe = queue.keys.probe
    await queue.redis.set(probe, "1", px=PROBE_TTL_MS)
    pipe: Any = queue.redis.pipeline(transaction=False)
    tries = [*_SUBMITS, *_WORKS]
    for name, *arguments in tries:
        pipe.execute_command(name, *(probe if argument == "KEY" else argument for argument in arguments))
    replies = await pipe.execute(raise_on_error=False)
    refused = [isinstance(reply, exceptions.NoPermissionError) for reply in replies]
    lacks = {name for (name, *_), no in zip(tries, refused, strict=True) if no}
    user = parse_redis_url(url).username or "default"
    return [judge_rights(user, *([name.lower() for name, *_ in some if name in lacks] for some in (_SUBMITS, _WORKS)))]


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
