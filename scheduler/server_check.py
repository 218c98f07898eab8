"""Whether a server fits llmq: its kind and version, its role, and settings of it that can lose jobs.

Asked once by every process that starts. What makes llmq wrong is refused (an old server, a replica), and what is sure
to lose jobs is refused to whoever puts work in or runs it; what may lose some is a warning with the setting to change.

A full server that evicts deletes keys without a word. `allkeys-*` may take any: batches that wait, the queue's order.
`volatile-*` takes those with a TTL: results that nobody has fetched yet, records of ended jobs (a `key` runs again),
cancels on their way, the state of the bucket. No job that waits or runs has a TTL, so this is a warning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from llmq.scheduler.errors import RedisUnavailable
from llmq.scheduler.routed import Routed
from llmq.scheduler.units import format_size

#: The oldest servers on which the whole base path works and is tested.
MINIMUM = {"Redis": (7, 0), "Valkey": (7, 2)}

_NOEVICTION = "type CONFIG SET maxmemory-policy noeviction, and set it in the server's configuration"


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What llmq knows of the server behind a connection; of a cluster, its primaries taken together.

    `run_id` changes with every start of a server: contact that was unbroken has the same one. `warnings` and
    `loses_jobs` are whole sentences, each with what to type.
    """

    name: str
    version: str
    run_id: str
    cluster: bool
    maxmemory: int
    maxmemory_policy: str
    append_only: bool
    warnings: tuple[str, ...] = ()
    loses_jobs: str = ""

    def refuse_loss(self) -> None:
        """Raise RedisUnavailable for a server that will delete waiting jobs: for whoever puts work in, or runs it."""
        if self.loses_jobs:
            raise RedisUnavailable(self.loses_jobs)


async def check_server(client: Redis) -> ServerFacts:
    """Return the facts of a client's server; raises RedisUnavailable for one that llmq cannot work on.

    Errors of redis-py pass through: the caller stands within `redis_errors`.
    """
    nodes = [await node.info() for node in await primaries_of(client)]
    return judge_servers(nodes, await setting_of(client, "save"), isinstance(client, Routed) and client.is_cluster)


async def primaries_of(client: Redis) -> list[Redis]:
    """Return a client of each primary: of one server, or of one that Sentinel names, the client itself."""
    return await client.primaries() if isinstance(client, Routed) else [client]


async def run_id_of(client: Redis, key: str) -> str:
    """Return the run id of the server that holds a key: it changes when that restarts, or another takes its place."""
    node = await client.node_of(key) if isinstance(client, Routed) else client
    info: dict[str, Any] = await node.info("server")
    return str(info.get("run_id", ""))


def judge_servers(nodes: Sequence[Mapping[str, Any]], save_points: str | None, cluster: bool) -> ServerFacts:
    """Judge what INFO told of each primary. `save_points` is the setting `save`, None where it cannot be read."""
    for info in nodes:
        _refuse_unfit(info, cluster)
    first = nodes[0]
    name, version = _name_and_version(first)
    return ServerFacts(
        name=name,
        version=version,
        run_id=",".join(sorted(str(info.get("run_id", "")) for info in nodes)),
        cluster=cluster,
        maxmemory=min(int(info.get("maxmemory", 0)) for info in nodes),
        maxmemory_policy=str(first.get("maxmemory_policy", "")),
        append_only=all(int(info.get("aof_enabled", 0)) for info in nodes),
        loses_jobs=next(filter(None, map(_loss, nodes)), ""),
        warnings=tuple(dict.fromkeys(warning for info in nodes for warning in _warnings(info, save_points))),
    )


def _refuse_unfit(info: Mapping[str, Any], cluster: bool) -> None:
    name, version = _name_and_version(info)
    mode = info.get("redis_mode", info.get("server_mode", ""))
    if mode == "sentinel":
        raise RedisUnavailable(
            "this is a Sentinel, not the server that it watches; use redis+sentinel://host:26379/service"
        )
    if _numbers(version) < MINIMUM.get(name, MINIMUM["Redis"]):
        raise RedisUnavailable(
            f"llmq needs Redis 7.0 or Valkey 7.2 or newer, and this is {name} {version}; "
            "upgrade it, or leave LLMQ_REDIS_URL unset to use the embedded server"
        )
    if mode == "cluster" and not cluster:
        raise RedisUnavailable("this is a node of a cluster; use redis+cluster://host:port instead of redis://")
    if info.get("role") == "slave":
        primary = f"{info.get('master_host', '?')}:{info.get('master_port', '?')}"
        raise RedisUnavailable(
            f"this is a replica of {primary}, and takes no writes; point LLMQ_REDIS_URL at the primary, "
            "or use redis+sentinel://, which follows it"
        )


def _loss(info: Mapping[str, Any]) -> str:
    """Say why a server is sure to lose jobs once it is full; "" where it is not. Without maxmemory it never evicts."""
    policy, maxmemory = str(info.get("maxmemory_policy", "")), int(info.get("maxmemory", 0))
    if not policy.startswith("allkeys") or not maxmemory:
        return ""
    what = f"this server deletes jobs when its {format_size(maxmemory)} are full (maxmemory-policy {policy})"
    return f"{what}; {_NOEVICTION}"


def _warnings(info: Mapping[str, Any], save_points: str | None) -> list[str]:
    """Name the settings that can lose jobs (F-026, F-094), each with what to type."""
    found = []
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        what = "results that nobody has fetched yet" if policy.startswith("volatile") else "jobs"
        found.append(f"maxmemory-policy is {policy}: a full Redis deletes {what} without a word; {_NOEVICTION}")
    if not int(info.get("aof_enabled", 0)):
        lost = "all jobs" if save_points == "" else "the jobs since its last snapshot"
        found.append(
            f"appendonly is no: a restart of Redis loses {lost}; "
            "type CONFIG SET appendonly yes, and set it in the server's configuration"
        )
    elif info.get("aof_last_write_status", "ok") != "ok":
        found.append("the last write to the append-only file failed; free space on the server's disk")
    return found


async def setting_of(client: Redis, name: str) -> str | None:
    """Return a setting of the server; None where it does not tell."""
    try:
        answer = await client.execute_command("CONFIG GET", name)  # type: ignore[no-untyped-call]
    except ResponseError:
        # Hosted servers commonly refuse CONFIG, and most users may not.
        return None
    value = answer.get(name, answer.get(name.encode()))  # RESP3: bytes
    return value.decode() if isinstance(value, bytes) else value


def _name_and_version(info: Mapping[str, Any]) -> tuple[str, str]:
    if "valkey_version" in info:
        return "Valkey", str(info["valkey_version"])
    return "Redis", str(info.get("redis_version", "0"))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
