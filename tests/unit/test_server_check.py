"""What INFO says of a server, and what llmq makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from llmq.scheduler.errors import RedisUnavailable
from llmq.scheduler.server_check import judge_servers


def info(**changed: Any) -> dict[str, Any]:
    """A healthy Redis 7.0.15 that keeps its data, with what a test changes."""
    healthy = {
        "redis_version": "7.0.15",
        "redis_mode": "standalone",
        "run_id": "abc",
        "role": "master",
        "maxmemory": 0,
        "maxmemory_policy": "noeviction",
        "aof_enabled": 1,
        "aof_last_write_status": "ok",
    }
    return healthy | changed


@pytest.mark.parametrize(
    ("changed", "version"),
    [
        ({}, "Redis 7.0.15"),
        ({"redis_version": 7.4}, "Redis 7.4"),
        ({"redis_version": "7.2.4", "valkey_version": "9.1.2"}, "Valkey 9.1.2"),
        ({"redis_version": "7.2.4", "valkey_version": "7.2.5"}, "Valkey 7.2.5"),
        ({"redis_version": "10.0.0"}, "Redis 10.0.0"),
    ],
)
def test_a_new_enough_server_has_no_warnings(changed: dict[str, Any], version: str) -> None:
    """Versions compare as numbers; Valkey tells a Redis version that is not its own."""
    facts = judge_servers([info(**changed)], "", cluster=False)
    assert (f"{facts.name} {facts.version}", facts.warnings, facts.run_id) == (version, (), "abc")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"redis_version": "6.2.14"}, r"needs Redis 7\.0 or Valkey 7\.2 or newer, and this is Redis 6\.2\.14; upgrade"),
        ({"valkey_version": "7.0.0"}, r"this is Valkey 7\.0\.0"),
        ({"role": "slave", "master_host": "h", "master_port": 1}, r"this is a replica of h:1, .* at the primary"),
        ({"redis_mode": "sentinel"}, r"this is a Sentinel.* use redis\+sentinel://"),
        ({"redis_mode": "cluster"}, r"this is a node of a cluster; use redis\+cluster://"),
    ],
)
def test_a_server_on_which_llmq_cannot_work_is_refused(changed: dict[str, Any], message: str) -> None:
    """At the start and with the next step, instead of an odd error in the middle of a batch (F-074)."""
    with pytest.raises(RedisUnavailable, match=message):
        judge_servers([info(**changed)], "", cluster=False)


@pytest.mark.parametrize(
    ("changed", "save", "words"),
    [
        ({"maxmemory_policy": "allkeys-lru"}, "", ["allkeys-lru", "CONFIG SET maxmemory-policy noeviction"]),
        ({"maxmemory_policy": "volatile-lru"}, "", ["volatile-lru", "CONFIG SET maxmemory-policy noeviction"]),
        ({"aof_enabled": 0}, "", ["loses all jobs", "CONFIG SET appendonly yes"]),
        ({"aof_enabled": 0}, "3600 1", ["since its last snapshot", "CONFIG SET appendonly yes"]),
        ({"aof_enabled": 0}, None, ["since its last snapshot", "CONFIG SET appendonly yes"]),
        ({"aof_last_write_status": "err"}, "", ["free space"]),
    ],
)
def test_a_setting_that_can_lose_jobs_is_a_warning(changed: dict[str, Any], save: str | None, words: list[str]) -> None:
    """With the exact setting to change (F-026, F-094)."""
    (warning,) = judge_servers([info(**changed)], save, cluster=False).warnings
    assert [word for word in words if word not in warning] == []


def test_a_cluster_is_judged_as_its_weakest_node() -> None:
    """One primary without persistence loses its queues; a warning that several share is said once."""
    bad = info(run_id="b", aof_enabled=0, redis_mode="cluster")
    facts = judge_servers([info(redis_mode="cluster"), bad, bad | {"run_id": "c"}], "", cluster=True)
    assert (facts.append_only, facts.run_id, len(facts.warnings)) == (False, "abc,b,c", 1)
