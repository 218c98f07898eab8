"""How the doctor judges what it measured: values in, a finding out, no I/O."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redis.crc import key_slot

from llmq.scheduler.fleet import SILENT, WorkerStatus
from llmq.scheduler.units import format_size

#: A trip to Redis stands several times between a chat job and its first token.
_SLOW_S = 0.1

#: llmq goes by Redis' clock; a host that is further off shows wrong ages and sorts its logs wrongly.
_CLOCK_OFF_S = 5.0

#: Used memory, or connections, from which on a server is about to refuse more.
_NEARLY_FULL = 0.9

#: A replica that is so many seconds behind has a fault; one that works is behind by none or one.
_LAGGING_S = 10


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


def judge_persistence(append_only: bool, appendfsync: str | None) -> Finding:
    """Judge what a crash loses. Without an append-only file another finding says so; `appendfsync` None: not told."""
    if not append_only or appendfsync in (None, "everysec", "always"):
        lost = {"everysec": "the last second", "always": "nothing"}.get(appendfsync or "", "what appendfsync says")
        text = f"a crash of its machine loses {lost}" if append_only else "kept in memory"
        return Finding("disk", True, text)
    text = f"appendfsync is {appendfsync}: a crash of its machine loses up to half a minute"
    return Finding("disk", False, text, "CONFIG SET appendfsync everysec, and set it in the server's configuration")


def judge_connections(used: int, most: int) -> Finding:
    """Judge how near a server is to its `maxclients` (0: not told)."""
    text = f"{used:,} of {most:,}" if most else f"{used:,}"
    if not most or used < _NEARLY_FULL * most:
        return Finding("clients", True, text)
    step = "see whose they are (CLIENT LIST), or allow more: CONFIG SET maxclients N"
    return Finding("clients", False, f"{text}: it is about to refuse connections", step)


def judge_replicas(info: Mapping[str, Any], least: int | None) -> Finding:
    """Judge the replicas of a primary by its INFO; `least` is min-replicas-to-write, None where it is not told."""
    replicas = [info[f"slave{number}"] for number in range(int(info.get("connected_slaves", 0)))]
    bad = [one for one in replicas if one.get("state") != "online" or int(one.get("lag", 0)) > _LAGGING_S]
    if bad:
        named = ", ".join(f"{one.get('ip')}:{one.get('port')} ({one.get('state')})" for one in bad)
        step = "look after it, or a failover loses what it lacks: INFO replication"
        return Finding("replicas", False, f"{len(bad)} of {len(replicas)} lag behind: {named}", step)
    if not replicas:
        return Finding("replicas", True, "none")
    safe = f"writes need {least}" if least else "a failover may lose what was acknowledged last (docs/redis.md)"
    return Finding("replicas", True, f"{len(replicas)} up to date; {safe}")


def judge_place(keys: Sequence[str], cluster: bool) -> Finding:
    """Judge whether all keys of a queue are in one place, which scripts and failovers rely on."""
    slots = {key_slot(key.encode()) for key in keys}
    if len(slots) == 1:
        text = f"all keys of the queue are in hash slot {slots.pop()}" + ("" if cluster else ", as a cluster wants it")
        return Finding("keys", True, text)
    return Finding("keys", False, f"the keys of the queue are in {len(slots)} hash slots", "report this as a bug")


def judge_rights(user: str, submits: Sequence[str], works: Sequence[str]) -> Finding:
    """Judge what a user may not do: commands that submitting, and those that working needs."""
    lacks = ", ".join(dict.fromkeys((*submits, *works)))
    if submits and works:
        step = "give it the rights of its role: deploy/acl/llmq.acl"
        return Finding("rights", False, f"{user} may neither submit nor serve as a worker: it lacks {lacks}", step)
    if works:
        return Finding("rights", True, f"{user} may submit, and not serve as a worker: it lacks {lacks}")
    if submits:
        return Finding("rights", True, f"{user} may serve as a worker, and not submit: it lacks {lacks}")
    return Finding("rights", True, f"{user} may submit and serve as a worker")
