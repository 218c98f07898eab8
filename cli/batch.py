"""`llmq batch`: look at batches, take their results, and pause, resume, retry, cancel or delete them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated

import typer

from llmq.cli.asking import confirm
from llmq.cli.errors import SOME_FAILED, Interrupted
from llmq.cli.options import Json, Ordered, Out, Queue, RedisUrl, Yes
from llmq.cli.render import age, count_of, notice, print_facts, print_json, print_line, print_table
from llmq.cli.results import command
from llmq.cli.running import run_async
from llmq.cli.session import load, open_session, where_options
from llmq.cli.submit import parse_window
from llmq.scheduler.batch_record import BatchRecord
from llmq.scheduler.batches import Batches
from llmq.scheduler.settings import Loaded
from llmq.scheduler.units import format_count

BatchId = Annotated[str, typer.Argument(metavar="ID", help="The batch's id.")]


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
    records = _with_batches(loaded, lambda batches: batches.ls(limit))
    if json:
        print_json({"queue": loaded.settings.queue, "batches": [record.to_json() for record in records]})
    elif not records:
        notice(f"queue {loaded.settings.queue} has no batches; submit one: llmq submit-batch FILE")
    else:
        print_table(["id", "status", "lines>", "done>", "failed>", "age>", "name"], [_row(record) for record in records])


def _row(record: BatchRecord) -> list[str]:
    counts = (record.lines if record.total is None else record.total, record.done, record.failed)
    return [record.id, _status(record), *map(format_count, counts), age(record.created_at), record.name]


def show(batch_id: BatchId, queue: Queue = None, redis: RedisUrl = None, json: Json = False) -> None:
    """Show how far a batch is.

    \b
    Example:
      llmq batch show batch_0dhg7rj2gk5wq --json
    """
    loaded = load(queue=queue, redis_url=redis)
    record = _with_batches(loaded, lambda batches: batches.show(batch_id))
    if json:
        print_json(record.to_json())
    else:
        print_facts(_facts(record))


def _facts(record: BatchRecord) -> dict[str, str]:
    total = f"{record.lines:,} so far (still being submitted)" if record.total is None else f"{record.total:,}"
    tokens = record.prompt_tokens + record.completion_tokens
    return {
        "id": record.id,
        "status": _status(record) + (f" ({record.reason})" if record.reason else ""),
        "name": record.name,
        "tenant": record.tenant,
        "lines": total,
        "done": f"{record.done:,} ({record.progress:.0%}), {record.failed:,} of them failed",
        "running": "" if record.ended else f"{record.running:,}",
        "waiting": "" if record.ended else f"{record.waiting:,}",
        "tokens": f"{record.prompt_tokens:,} prompt, {record.completion_tokens:,} completion" if tokens else "",
        "submitted": f"{age(record.created_at)} ago",
        "window": "" if record.ended or not record.expires_at else f"ends in {age(2 * time.time() - record.expires_at)}",
        "ended": f"{age(record.ended_at)} ago" if record.ended_at else "",
        "retry of": record.retry_of,
        "digest": record.digest,
    }


def _status(record: BatchRecord) -> str:
    return "paused" if record.paused and not record.ended else record.status.value
