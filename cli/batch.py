"""`llmq batch`: the verbs of the noun, and here those that only look.

`batch_results.py` delivers results, `batch_changes.py` changes batches.
"""

from __future__ import annotations

import time
from typing import Annotated

import typer

from llmq.cli import batch_changes, batch_results
from llmq.cli.options import BatchId, Json, Queue, RedisUrl
from llmq.cli.render import age, command, notice, print_facts, print_json, print_table
from llmq.cli.running import run_async
from llmq.cli.session import load, where_options, with_batches
from llmq.scheduler.batch_record import BatchRecord
from llmq.scheduler.units import format_count

_COLUMNS = ("id", "status", "done>", "lines>", "failed>", "age>", "name")


def ls(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, metavar="N", help="Show the newest N.")] = 20,
    queue: Queue = None,
    redis: RedisUrl = None,
    json: Json = False,
) -> None:
    """List the newest batches of a queue, the newest first.

    \b
    Examples:
      llmq batch ls
      llmq batch ls --queue llama-70b --json
    """
    loaded = load(queue=queue, redis_url=redis)
    records = run_async(lambda: with_batches(loaded.settings, lambda batches: batches.ls(limit)))
    if json:
        print_json({"queue": loaded.settings.queue, "batches": [record.to_json() for record in records]})
    elif records:
        print_table(_COLUMNS, [_row(record) for record in records])
    else:
        submit = command("llmq", "submit-batch", "FILE", *where_options(loaded))
        notice(f"queue {loaded.settings.queue} has no batches; submit one: {submit}")


def show(batch_id: BatchId, queue: Queue = None, redis: RedisUrl = None, json: Json = False) -> None:
    """Show how far a batch is.

    \b
    Example:
      llmq batch show batch_01h8xk2c5m --json
    """
    settings = load(queue=queue, redis_url=redis).settings
    record = run_async(lambda: with_batches(settings, lambda batches: batches.show(batch_id)))
    if json:
        print_json(record.to_json())
    else:
        print_facts(_facts(record))


def register(app: typer.Typer) -> None:
    """Add the verbs to the noun's app."""
    changes = batch_changes
    for verb in (
        ls,
        show,
        batch_results.results,
        changes.pause,
        changes.resume,
        changes.retry,
        changes.cancel,
        changes.delete,
    ):
        app.command()(verb)


def _row(record: BatchRecord) -> list[str]:
    total = record.lines if record.total is None else record.total
    counts = map(format_count, (record.done, total, record.failed))
    return [record.id, _status(record), *counts, age(record.created_at), record.name]


def _facts(record: BatchRecord) -> dict[str, str]:
    living = not record.ended
    left = record.expires_at - time.time() if record.expires_at and living else None
    tokens = f"{record.prompt_tokens:,} prompt, {record.completion_tokens:,} completion"
    return {
        "id": record.id,
        "status": _status(record) + (f" ({record.reason})" if record.reason else ""),
        "name": record.name,
        "tenant": record.tenant,
        "lines": f"{record.lines:,} so far; more may come" if record.total is None else f"{record.total:,}",
        "done": f"{record.done:,} ({record.progress:.0%}), {record.failed:,} of them failed",
        "running": f"{record.running:,}" if living else "",
        "waiting": f"{record.waiting:,}" if living else "",
        "tokens": tokens if record.prompt_tokens + record.completion_tokens else "",
        "submitted": f"{age(record.created_at)} ago",
        "window": f"{age(time.time() - left)} left" if left is not None else "",
        "ended": f"{age(record.ended_at)} ago" if record.ended_at else "",
        "retry of": record.retry_of,
        "digest": record.digest,
    }


def _status(record: BatchRecord) -> str:
    return "paused" if record.paused and not record.ended else record.status.value
