"""The health check: whether jobs can be claimed and submitted now, and whether a worker does claim.

For probes of containers and balancers. It walks the way of a real claim (the same script, with no room for a job) and
writes one key that goes by itself, because a server may answer PING and still be of no use: a replica, a full disk, a
script that holds it up. It takes no job, and changes none.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmq.scheduler import scripts
from llmq.scheduler.errors import WorkerUnhealthy
from llmq.scheduler.fleet import DRAINING, SILENT, WorkerStatus, read_workers
from llmq.scheduler.queue import Queue

#: Who claims; with no room no consumer of this name is ever made.
_PROBE = "health"

#: Long enough to be seen by whoever looks for it, and gone before the next day.
PROBE_TTL_MS = 10_000

#: A worker with a free slot claims once a second; one that has not for so long is stuck, or cannot reach Redis.
LONGEST_WITHOUT_CLAIM_S = 60.0


@dataclass(frozen=True, slots=True)
class Health:
    """What a check that went well has measured, in seconds; `workers` are those that were asked about."""

    claim_s: float
    write_s: float
    workers: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return what `health --json` prints."""
        return {
            "healthy": True,
            "claim_ms": round(self.claim_s * 1000, 3),
            "write_ms": round(self.write_s * 1000, 3),
            "workers": list(self.workers),
        }


async def check_health(queue: Queue, worker: str | None = None) -> Health:
    """Check that the queue can be worked on, and that `worker` (an id, or a host) works on it.

    Raises WorkerUnhealthy; errors of redis-py pass through.
    """
    await queue.ensure_format()
    started = time.perf_counter()
    await scripts.run(
        queue.redis, scripts.claim(queue.keys, _PROBE, room=0, free=0, reserve=0, suspects=0, candidates=[])
    )
    claimed = time.perf_counter()
    await queue.redis.set(queue.keys.probe, "1", px=PROBE_TTL_MS)
    written = time.perf_counter()
    workers = judge_worker(await read_workers(queue), worker) if worker is not None else ()
    return Health(claimed - started, written - claimed, workers)


def judge_worker(workers: Sequence[WorkerStatus], name: str) -> tuple[str, ...]:
    """Return the ids of the workers that `name` means: one by its id, or all that live on a host.

    Raises WorkerUnhealthy where one of them does not claim, or none lives.
    """
    asked = [worker for worker in workers if worker.id == name]
    # Of a host only those that live: an earlier process of a container leaves its heartbeat for a minute.
    asked = asked or [worker for worker in workers if worker.host == name and worker.state != SILENT]
    if not asked:
        raise WorkerUnhealthy(
            f"no worker {name!r}, and none on a host of that name, has a heartbeat in this queue; "
            "see which there are: llmq workers"
        )
    for worker in asked:
        if fault := _fault_of(worker):
            raise WorkerUnhealthy(f"worker {worker.id} {fault}")
    return tuple(worker.id for worker in asked)


def _fault_of(worker: WorkerStatus) -> str:
    """Say what is wrong with a worker; "" for nothing. One that drains, or has no slot free, need not claim."""
    if worker.state == SILENT:
        return f"was last heard {worker.last_seen_s:.0f} s ago; look after its process, pid {worker.pid}"
    if worker.state == DRAINING or worker.busy >= worker.slots:
        return ""
    if worker.claimed_s > LONGEST_WITHOUT_CLAIM_S:
        return f"is {worker.state} and has not claimed for {worker.claimed_s:.0f} s; its log says why"
    return ""
