"""`llmq job`: look at one interactive (or single batch) job, cancel it, or delete what is left of it."""

from __future__ import annotations

from typing import Annotated

import typer

from llmq.cli.options import Json, Queue, RedisUrl, Yes
from llmq.cli.render import age, print_facts, print_json, print_line
from llmq.cli.running import run_async
from llmq.cli.session import load, open_session
from llmq.scheduler.job_record import JobRecord
from llmq.scheduler.queue import CancelResult

JobId = Annotated[str, typer.Argument(metavar="ID", help="The job's id.")]

_OUTCOMES = {
    CancelResult.CANCELLED: "cancelled before it started",
    CancelResult.SIGNALLED: "is being aborted by its worker",
    CancelResult.ENDED: "had ended already",
}


def show(job_id: JobId, queue: Queue = None, redis: RedisUrl = None, json: Json = False) -> None:
    """Show where a job is and how it went.

    \b
    Example:
      llmq job show 0f8c2a9be1d64c1f
    """
    settings = load(queue=queue, redis_url=redis).settings

    async def work() -> tuple[JobRecord, float]:
        async with open_session(settings) as session:
            return await session.queue.job(job_id), await session.queue.now_ms() / 1000

    record, now = run_async(work)
    if json:
        print_json(record.to_json())
    else:
        print_facts(_facts(record, now))


def cancel(job_id: JobId, yes: Yes = False, queue: Queue = None, redis: RedisUrl = None, json: Json = False) -> None:
    """Cancel a job.

    It never starts, or is aborted within a second. It is one job, named by its id: nobody is asked.

    \b
    Example:
      llmq job cancel 0f8c2a9be1d64c1f
    """
    settings = load(queue=queue, redis_url=redis).settings

    async def work() -> CancelResult:
        async with open_session(settings) as session:
            return await session.queue.cancel_job(job_id)

    result = run_async(work)
    if json:
        print_json({"id": job_id, "result": result.value})
    else:
        print_line(f"job {job_id} {_OUTCOMES[result]}")


def delete(job_id: JobId, yes: Yes = False, queue: Queue = None, redis: RedisUrl = None, json: Json = False) -> None:
    """Delete the record of a job that has ended, with its answer.

    It would go by itself (llmq set keep_interactive), as what was streamed to its client does within ten minutes.
    It is one job, named by its id: nobody is asked.

    \b
    Example:
      llmq job delete 0f8c2a9be1d64c1f
    """
    settings = load(queue=queue, redis_url=redis).settings

    async def work() -> None:
        async with open_session(settings) as session:
            await session.queue.delete_job(job_id)

    run_async(work)
    if json:
        print_json({"id": job_id, "deleted": True})
    else:
        print_line(f"job {job_id} is deleted")


def _facts(record: JobRecord, now: float) -> dict[str, str]:
    usage = record.usage
    return {
        "id": record.id,
        "state": record.state.value,
        "class": record.cls.value,
        "tenant": record.tenant,
        "submitted": f"{age(record.submitted_at, now)} ago",
        "ended": f"{age(record.ended_at, now)} ago" if record.ended_at else "",
        "worker": record.consumer or "",
        "attempts": str(record.attempts or ""),
        "crashes": str(record.crashes or ""),
        "status": str(record.status_code or ""),
        "error": f"{record.code}: {record.message}" if record.code else "",
        "tokens": f"{usage.prompt_tokens:,} prompt, {usage.completion_tokens:,} completion" if usage.total else "",
    }


def register(app: typer.Typer) -> None:
    """Add the verbs to the noun's app."""
    for verb in (show, cancel, delete):
        app.command()(verb)
