"""`llmq dead`: the jobs that were given up, to be looked at, queued again or purged."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import orjson
import typer

from llmq.cli.asking import confirm
from llmq.cli.options import Json, Queue, RedisUrl, Yes
from llmq.cli.render import age, command, count_of, notice, print_facts, print_json, print_line, print_table, warn
from llmq.cli.running import run_async
from llmq.cli.session import load, open_session, where_options
from llmq.scheduler.dead import DeadLetter, DeadLetters, Retried
from llmq.scheduler.errors import EncodingError, UsageError
from llmq.scheduler.job import Job
from llmq.scheduler.settings import Settings
from llmq.scheduler.units import format_size

T = TypeVar("T")

LetterId = Annotated[str, typer.Argument(metavar="ID", help="The dead letter's id.")]
LetterIds = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Ids of dead letters, one or more.")]
All = Annotated[bool, typer.Option("--all", help="All dead letters of the queue.")]

#: Characters of an error that a table has room for.
_ERROR_SHOWN = 60


def ls(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, metavar="N", help="Show the newest N.")] = 20,
    queue: Queue = None,
    redis: RedisUrl = None,
    json: Json = False,
) -> None:
    """List the newest dead letters, the newest first.

    A job that used up its attempts, or was in flight at three deaths of its worker or engine, becomes one.
    It is kept for 30 days.

    \b
    Examples:
      llmq dead ls
      llmq dead ls --limit 100 --json
    """
    settings = load(queue=queue, redis_url=redis).settings

    async def work(letters: DeadLetters) -> tuple[list[DeadLetter], int]:
        return await letters.ls(limit), await letters.count()

    found, total = run_async(lambda: _with_letters(settings, work))
    if json:
        print_json({"queue": settings.queue, "total": total, "letters": [letter.to_json() for letter in found]})
    elif not found:
        notice(f"queue {settings.queue} has no dead letters")
    else:
        columns = ["id", "age>", "class", "tenant", "job", "attempts>", "crashes>", "error"]
        print_table(columns, [_row(letter) for letter in found])
        if total > len(found):
            notice(f"{len(found):,} of {count_of(total, 'dead letter')}; more: --limit {total}")


def show(
    letter_id: LetterId,
    body: Annotated[bool, typer.Option("--body", help="Show the job too; it may hold private text.")] = False,
    queue: Queue = None,
    redis: RedisUrl = None,
    json: Json = False,
) -> None:
    """Show what is known of a dead letter.

    \b
    Examples:
      llmq dead show 1764460000000-0
      llmq dead show 1764460000000-0 --body
    """
    settings = load(queue=queue, redis_url=redis).settings

    async def work(letters: DeadLetters) -> tuple[DeadLetter, Job | None]:
        letter = await letters.show(letter_id)
        return letter, await letters.job(letter) if body else None

    try:
        letter, job = run_async(lambda: _with_letters(settings, work))
    except EncodingError as error:
        raise UsageError(f"dead letter {letter_id}: {error}; without --body the rest is shown") from None
    if json:
        asked = {"url": job.url, "body": _body(job)} if job else {}
        print_json(letter.to_json() | asked)
        return
    print_facts(_facts(letter) | ({"endpoint": job.url} if job else {}))
    if job:
        print_line()
        print_json(_body(job))


def _body(job: Job) -> object:
    """Return a body to print; one that came as bytes may hold what no value can."""
    return orjson.Fragment(job.raw) if job.raw else job.body


def retry(
    letter_ids: LetterIds = None, all_: All = False, queue: Queue = None, redis: RedisUrl = None, json: Json = False
) -> None:
    """Queue the jobs of dead letters again.

    A single job becomes a new one, the lines of a batch become one new batch; attempts are counted anew. Cut off,
    the same command goes on.

    \b
    Examples:
      llmq dead retry 1764460000000-0
      llmq dead retry --all
    """
    _check_choice(letter_ids, all_)
    loaded = load(queue=queue, redis_url=redis)

    async def work(letters: DeadLetters) -> Retried:
        return await letters.retry(await (letters.ls() if all_ else letters.choose(letter_ids or [])))

    done = run_async(lambda: _with_letters(loaded.settings, work))
    for letter in done.unreadable:
        warn(f"dead letter {letter.id} holds no job that can be read; it stays: llmq dead purge {letter.id}")
    if json:
        print_json(
            {
                "retried": done.count,
                "jobs": done.jobs,
                "batches": [{"id": batch.id, "of": batch.retry_of, "lines": batch.lines} for batch in done.batches],
                "unreadable": [letter.id for letter in done.unreadable],
            }
        )
        return
    for job_id in done.jobs:
        print_line(f"job {job_id}")
    for batch in done.batches:
        print_line(f"batch {batch.id}: {count_of(batch.lines, 'line')} of {batch.retry_of}")
    if done.batches:
        results = command("llmq", "batch", "results", done.batches[0].id, *where_options(loaded), "--follow")
        notice(f"their results: {results}")
    if not done.count:
        notice("nothing was queued")


def purge(
    letter_ids: LetterIds = None,
    all_: All = False,
    yes: Yes = False,
    queue: Queue = None,
    redis: RedisUrl = None,
    json: Json = False,
) -> None:
    """Delete dead letters for good.

    \b
    Examples:
      llmq dead purge 1764460000000-0
      llmq dead purge --all --yes
    """
    _check_choice(letter_ids, all_)
    loaded = load(queue=queue, redis_url=redis)

    async def choose(letters: DeadLetters) -> list[DeadLetter]:
        return await (letters.ls() if all_ else letters.choose(letter_ids or []))

    # Those that come while the question is asked stay: nobody has seen them.
    chosen = run_async(lambda: _with_letters(loaded.settings, choose))
    deleted = 0
    if chosen:
        named = ["--all"] if all_ else [letter.id for letter in chosen]
        again = command("llmq", "dead", "purge", *named, *where_options(loaded))
        confirm(f"this deletes {count_of(len(chosen), 'dead letter')} with their jobs", again, yes=yes)
        deleted = run_async(lambda: _with_letters(loaded.settings, lambda letters: letters.purge(chosen)))
    if json:
        print_json({"purged": deleted})
    else:
        print_line(f"{count_of(deleted, 'dead letter')} purged")


def _check_choice(letter_ids: list[str] | None, all_: bool) -> None:
    if all_ == bool(letter_ids):
        raise UsageError("expected ids of dead letters, or --all; see which there are: llmq dead ls")


async def _with_letters(settings: Settings, work: Callable[[DeadLetters], Awaitable[T]]) -> T:
    async with open_session(settings) as session:
        return await work(DeadLetters(session.queue))


def _row(letter: DeadLetter) -> list[str]:
    error = " ".join((letter.error or letter.code).split())
    return [
        letter.id,
        age(letter.died_at),
        letter.cls.value,
        letter.tenant,
        f"{letter.batch_id} {letter.key}" if letter.batch_id else letter.key,
        f"{letter.attempts:,}",
        f"{letter.crashes:,}",
        error if len(error) <= _ERROR_SHOWN else f"{error[: _ERROR_SHOWN - 3]}...",
    ]


def _facts(letter: DeadLetter) -> dict[str, str]:
    return {
        "id": letter.id,
        "job": letter.key if letter.batch_id is None else "",
        "batch": letter.batch_id or "",
        "line": f"{letter.line} ({letter.key})" if letter.batch_id else "",
        "class": letter.cls.value,
        "tenant": letter.tenant,
        "died": f"{age(letter.died_at)} ago",
        "error": f"{letter.code}: {letter.error}" if letter.code else letter.error,
        "status": str(letter.status_code or ""),
        "attempts": str(letter.attempts),
        "crashes": str(letter.crashes),
        "host": letter.host,
        "entry": f"{letter.entry} of lane {letter.lane}",
        "job size": format_size(letter.size),
    }


def register(app: typer.Typer) -> None:
    """Add the verbs to the noun's app."""
    for verb in (ls, show, retry, purge):
        app.command()(verb)
