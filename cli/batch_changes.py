"""`llmq batch pause`, `resume`, `retry`, `cancel` and `delete`: what changes a batch."""

from __future__ import annotations

from typing import Annotated

import typer

from llmq.cli.asking import confirm
from llmq.cli.options import BatchId, Json, Queue, RedisUrl, Yes
from llmq.cli.progress import meter
from llmq.cli.queueing import say_who_serves, show
from llmq.cli.render import command, count_of, notice, print_json, print_line
from llmq.cli.running import run_async
from llmq.cli.session import load, open_session, where_options, with_batches
from llmq.cli.submit import parse_window
from llmq.scheduler.batch_record import BatchRecord
from llmq.scheduler.batches import Batches
from llmq.scheduler.errors import UsageError


def pause(batch_id: BatchId, queue: Queue = None, redis: RedisUrl = None, json: Json = False) -> None:
    """Let no line of a batch start.

    Those that run go on.

    \b
    Example:
      llmq batch pause batch_01h8xk2c5m
    """
    settings = load(queue=queue, redis_url=redis).settings
    record = run_async(lambda: with_batches(settings, lambda batches: batches.pause(batch_id)))
    _say(record, f"batch {batch_id} is paused; {count_of(record.waiting, 'line')} wait", json)


def resume(batch_id: BatchId, queue: Queue = None, redis: RedisUrl = None, json: Json = False) -> None:
    """Put a paused batch back into its place.

    \b
    Example:
      llmq batch resume batch_01h8xk2c5m
    """
    settings = load(queue=queue, redis_url=redis).settings
    record = run_async(lambda: with_batches(settings, lambda batches: batches.resume(batch_id)))
    _say(record, f"batch {batch_id} goes on; {count_of(record.waiting, 'line')} wait", json)


def retry(
    batch_id: BatchId,
    window: Annotated[
        str | None, typer.Option("--window", metavar="TIME", help="Lines that have not started by then expire: 24h.")
    ] = None,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Queue all of it at once, or nothing (exit 5).")] = False,
    queue: Queue = None,
    redis: RedisUrl = None,
    json: Json = False,
) -> None:
    """Queue the failed lines of a batch again, as a new one.

    The batch must have ended. Prints the new one's id. Cut off, it is continued by the same command.

    \b
    Example:
      llmq batch retry batch_01h8xk2c5m
    """
    seconds = parse_window(window)
    loaded = load(queue=queue, redis_url=redis)

    async def work() -> BatchRecord:
        async with open_session(loaded.settings, warnings=True) as session:
            batches = Batches(session.queue)
            with meter("queueing", total=(await batches.show(batch_id)).failed) as shown:
                record = await batches.retry(
                    batch_id, window=seconds, wait=not no_wait, on_progress=lambda now: show(shown, now)
                )
            await say_who_serves(session.queue, frozenset(), loaded)
            return record

    record = run_async(work)
    if json:
        print_json(record.to_json())
    else:
        print_line(record.id)
        follow = command(
            "llmq", "batch", "results", record.id, *where_options(loaded), "-o", "retried.jsonl", "--follow"
        )
        notice(f"queued {count_of(record.lines, 'line')} again; their results: {follow}")


def cancel(
    batch_id: BatchId, yes: Yes = False, queue: Queue = None, redis: RedisUrl = None, json: Json = False
) -> None:
    """End a batch; results so far stay.

    Lines that wait never start, lines that run are aborted.

    \b
    Example:
      llmq batch cancel batch_01h8xk2c5m --yes
    """
    loaded = load(queue=queue, redis_url=redis)
    record = run_async(lambda: with_batches(loaded.settings, lambda batches: batches.show(batch_id)))
    if not record.ended:
        again = command("llmq", "batch", "cancel", batch_id, *where_options(loaded))
        living = f"{count_of(record.waiting, 'line')} that wait and {record.running:,} that run"
        confirm(f"this cancels {living} of batch {batch_id}", again, yes=yes)
        record = run_async(lambda: with_batches(loaded.settings, lambda batches: batches.cancel(batch_id)))
    done = f"{record.done:,} of {count_of(record.lines, 'line')} have their result"
    _say(record, f"batch {batch_id} is {record.status.value}; {done}", json)


def delete(
    batch_id: BatchId, yes: Yes = False, queue: Queue = None, redis: RedisUrl = None, json: Json = False
) -> None:
    """Remove a batch that has ended, with its results.

    Files that were written stay.

    \b
    Example:
      llmq batch delete batch_01h8xk2c5m --yes
    """
    loaded = load(queue=queue, redis_url=redis)
    where = where_options(loaded)
    record = run_async(lambda: with_batches(loaded.settings, lambda batches: batches.show(batch_id)))
    if not record.ended:
        again = command("llmq", "batch", "cancel", batch_id, *where)
        raise UsageError(f"batch {batch_id} is {record.status.value}; cancel it first: {again}")
    again = command("llmq", "batch", "delete", batch_id, *where)
    confirm(f"this deletes {count_of(record.done, 'result')} of batch {batch_id} from Redis", again, yes=yes)
    run_async(lambda: with_batches(loaded.settings, lambda batches: batches.delete(batch_id)))
    if json:
        print_json({"id": batch_id, "deleted": True})
    else:
        print_line(f"batch {batch_id} is deleted")


def _say(record: BatchRecord, text: str, json: bool) -> None:
    if json:
        print_json(record.to_json())
    else:
        print_line(text)
