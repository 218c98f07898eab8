"""The fleet: the workers of a queue, as their heartbeats describe them.

Reads the list of workers and each one's heartbeat; a worker that has missed its heartbeats for a whole lease is shown
as `silent` until its heartbeat is gone, after a minute. How long ago is told by Redis' clock, never by two hosts'.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from llmq.scheduler.live import LiveSettings
from llmq.scheduler.queue import Queue
from llmq.scheduler.redis_url import redact
from llmq.scheduler.stored_number import finite, whole

#: More workers than any queue has; keeps one look bounded.
MAX_WORKERS = 1000

#: States of a worker (see WorkerStatus): it missed a lease of heartbeats; it takes nothing new and ends soon.
SILENT = "silent"
DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One worker. `state` is starting, ready, draining, engine_down or silent; times are seconds since the epoch.

    `batch_cap` is the most batch requests that it runs at a time now, `reserve` the slots that it keeps free for chat.
    `governor` is what sets the cap (fixed, idle, search, holds, cut, waste, own_load), `governor_why` its objective and
    its reason in words; of `chat_seen` first tokens of the last seconds `chat_far_over` came later than twice the
    objective.
    `claimed_s` is how long ago it claimed, or started if it has not yet. `measures` are the fields `m.*` of its
    heartbeat.
    """

    id: str
    state: str
    last_seen_at: float
    last_seen_s: float
    host: str
    pid: int
    gpu: str
    engine: str
    engine_url: str
    models: tuple[str, ...]
    simulated: bool
    slots: int
    busy_interactive: int
    busy_batch: int
    batch_cap: int
    reserve: int
    started_at: float
    claimed_at: float
    claimed_s: float
    governor: str
    governor_why: str
    chat_seen: int
    chat_far_over: int
    lanes: tuple[str, ...]
    version: str
    measures: Mapping[str, str]

    @property
    def busy(self) -> int:
        """Slots in use."""
        return self.busy_interactive + self.busy_batch

    def to_json(self) -> dict[str, Any]:
        """Return a worker as `status --json` and `workers --json` print it."""
        return {
            "id": self.id,
            "state": self.state,
            "host": self.host,
            "pid": self.pid,
            "gpu": self.gpu,
            "slots": self.slots,
            "busy": self.busy,
            "busy_interactive": self.busy_interactive,
            "busy_batch": self.busy_batch,
            "batch_cap": self.batch_cap,
            "reserve": self.reserve,
            "governor": self.governor,
            "governor_why": self.governor_why,
            "engine": self.engine,
            "engine_url": self.engine_url,
            "simulated": self.simulated,
            "models": list(self.models),
            "last_seen_at": self.last_seen_at,
            "last_seen_s": self.last_seen_s,
            "started_at": self.started_at,
            "claimed_at": self.claimed_at,
            "lanes": list(self.lanes),
            "version": self.version,
        }


async def read_workers(queue: Queue) -> list[WorkerStatus]:
    """Return the queue's workers in the order of their ids."""
    redis: Any = queue.redis
    listed: list[tuple[bytes, float]] = await redis.zrange(
        queue.keys.workers, 0, MAX_WORKERS - 1, desc=True, withscores=True
    )
    if not listed:
        return []
    pipe = cast(Any, queue.redis.pipeline(transaction=False))
    for name, _ in listed:
        pipe.hgetall(queue.keys.worker(name.decode(errors="replace")))
    pipe.hget(queue.keys.config, "lease")
    *heartbeats, lease = await pipe.execute(raise_on_error=False)
    if isinstance(lease, Exception):
        raise lease
    lease_s = LiveSettings.from_hash({b"lease": lease or b""}).lease_s
    now_ms = await queue.now_ms()
    # A worker without a heartbeat is gone; its name is taken from the list by the next sweep.
    found = [
        worker_of(
            {name.decode(errors="replace"): value.decode(errors="replace") for name, value in heartbeat.items()},
            finite(seen, 0.0),
            now_ms,
            lease_s,
        )
        for (_, seen), heartbeat in zip(listed, heartbeats, strict=True)
        if heartbeat and not isinstance(heartbeat, Exception)  # somebody may have put another type of key there
    ]
    return sorted(found, key=lambda worker: worker.id)


def worker_of(fields: Mapping[str, str], seen_ms: float, now_ms: int, lease_s: float) -> WorkerStatus:
    """Read a heartbeat. What is missing (another version wrote it) is empty or 0."""
    age_s = max(0.0, now_ms - seen_ms) / 1000
    return WorkerStatus(
        id=fields.get("id", ""),
        state=SILENT if age_s > lease_s else fields.get("state", ""),
        last_seen_at=seen_ms / 1000,
        last_seen_s=round(age_s, 3),
        host=fields.get("host", ""),
        pid=_number(fields, "pid"),
        gpu=fields.get("gpu", ""),
        engine=fields.get("engine", ""),
        engine_url=redact(fields.get("engine_url", "")),
        models=_names(fields, "models"),
        simulated=fields.get("simulated") == "1",
        slots=_number(fields, "slots"),
        busy_interactive=_number(fields, "busy_i"),
        busy_batch=_number(fields, "busy_b"),
        batch_cap=_number(fields, "batch_cap"),
        reserve=_number(fields, "reserve"),
        started_at=_number(fields, "started_at") / 1000,
        claimed_at=_number(fields, "claimed_at") / 1000,
        claimed_s=age_s + _unclaimed_ms(fields) / 1000,
        governor=fields.get("governor", ""),
        governor_why=fields.get("governor_why", ""),
        chat_seen=_number(fields, "chat_seen"),
        chat_far_over=_number(fields, "chat_far_over"),
        lanes=_names(fields, "lanes"),
        version=fields.get("version", ""),
        measures={name: value for name, value in fields.items() if name.startswith("m.")},
    )


def _unclaimed_ms(fields: Mapping[str, str]) -> int:
    """Return how long a worker had not claimed when it wrote its heartbeat: both times are of its own clock."""
    return max(0, _number(fields, "seen_at") - (_number(fields, "claimed_at") or _number(fields, "started_at")))


def _number(fields: Mapping[str, str], name: str) -> int:
    return whole(fields.get(name))


def _names(fields: Mapping[str, str], name: str) -> tuple[str, ...]:
    try:
        names = json.loads(fields.get(name, "[]"))
    except (ValueError, RecursionError):
        return ()
    return tuple(str(item).encode(errors="replace").decode() for item in names) if isinstance(names, list) else ()
