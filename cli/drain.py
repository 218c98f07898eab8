"""`llmq drain`: ask a worker, on whatever host, to end as SIGTERM would."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated

import typer

from llmq.cli.errors import Interrupted
from llmq.cli.options import Json, Queue, RedisUrl
from llmq.cli.render import command, notice, print_json, print_line
from llmq.cli.running import run_async
from llmq.cli.session import load, open_session, where_options
from llmq.scheduler.errors import LLMQError, NotFoundError
from llmq.scheduler.fleet import DRAINING, SILENT, WorkerStatus, read_workers
from llmq.scheduler.queue import Queue as JobQueue

#: Seconds between two looks at a worker that drains: it takes seconds to minutes.
_LOOK_S = 0.25


@dataclass(frozen=True, slots=True)
class _Drained:
    """What came of it: whether the worker drained already when it was asked, and whether it is gone now."""

    worker: WorkerStatus
    already: bool
    gone: bool


def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="The worker's id; see: llmq workers.")],
    wait: Annotated[bool, typer.Option("--wait", help="Return when the worker is gone.")] = False,
    queue: Queue = None,
    redis: RedisUrl = None,
    json: Json = False,
) -> None:
    """Let a worker finish what it runs, and end.

    It takes nothing new, hands back what it cannot finish within its grace, and exits 0. No job is lost.

    \b
    Examples:
      llmq drain gpu7-4242-9f3c
      llmq drain gpu7-4242-9f3c --wait
    """
    loaded = load(queue=queue, redis_url=redis)

    async def work() -> _Drained:
        async with open_session(loaded.settings) as session:
            return await _drain(session.queue, worker, wait)

    try:
        done = run_async(work)
    except Interrupted:
        again = command("llmq", "drain", worker, *where_options(loaded), "--wait")
        raise Interrupted(f"interrupted; the worker drains all the same. To wait for it: {again}") from None
    if json:
        print_json({"worker": worker, "already_draining": done.already, "gone": done.gone})
    elif done.gone:
        print_line(f"worker {worker} is gone")
    else:
        print_line(
            f"worker {worker} {'drains already' if done.already else 'drains'}; it runs {done.worker.busy:,} now"
        )
        notice("it ends when these have, or its grace is over; --wait waits for it")


async def _drain(queue: JobQueue, worker_id: str, wait: bool) -> _Drained:
    found = await _find(queue, worker_id)
    if found is None:
        raise await _unknown(queue, worker_id)
    if found.state == SILENT:
        raise LLMQError(
            f"worker {worker_id} was last heard {found.last_seen_s:.0f} s ago and would not hear a command; "
            f"look after its process on {found.host} (pid {found.pid}); others run its jobs if it is dead"
        )
    # Asked a second time a worker hands back at once: what it runs would be run again elsewhere.
    already = found.state == DRAINING
    if not already:
        await queue.tell_worker(worker_id, "drain")
    while wait and (now := await _find(queue, worker_id)) is not None:
        if now.state == SILENT:
            raise LLMQError(
                f"worker {worker_id} fell silent while it drained; look after its process on {now.host} (pid {now.pid})"
            )
        await asyncio.sleep(_LOOK_S)
    return _Drained(found, already, gone=wait)


async def _find(queue: JobQueue, worker_id: str) -> WorkerStatus | None:
    return next((worker for worker in await read_workers(queue) if worker.id == worker_id), None)


async def _unknown(queue: JobQueue, worker_id: str) -> NotFoundError:
    alive = [worker.id for worker in await read_workers(queue) if worker.state != SILENT]
    there = f"there are: {', '.join(alive[:5])}{', ...' if len(alive) > 5 else ''}" if alive else "there is none"
    return NotFoundError(f"queue {queue.name} has no worker {worker_id!r}; {there} (llmq workers)")
