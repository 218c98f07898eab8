"""`llmq batch results`: the results of a batch, so far or to its end, on stdout or in a file."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from llmq.cli.errors import SOME_FAILED, Interrupted
from llmq.cli.options import BatchId, Json, Ordered, Out, PartSize, Queue, RedisUrl
from llmq.cli.render import command, notice, print_json
from llmq.cli.results import JsonResults, check_output, collect, output_facts, say_ended
from llmq.cli.running import run_async
from llmq.cli.session import load, open_session, where_options
from llmq.scheduler.batches import Batches
from llmq.scheduler.collecting import Collected, Which
from llmq.scheduler.errors import UsageError
from llmq.scheduler.output import Output, PartLimit, open_output


def results(
    batch_id: BatchId,
    out: Out = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only lines that failed.")] = False,
    ok: Annotated[bool, typer.Option("--ok", help="Only lines that did not fail.")] = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the batch has ended.")] = False,
    part_size: PartSize = None,
    ordered: Ordered = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite OUT.")] = False,
    queue: Queue = None,
    redis: RedisUrl = None,
    json: Json = False,
) -> None:
    """Print the results of a batch, or write them to a file.

    All lines so far, good and bad, in the order in which they ended. A file is continued where it was left. Ends
    with 3 when the batch has ended and lines of it failed.

    \b
    Examples:
      llmq batch results ID | jq .response.body
      llmq batch results ID -o results.jsonl --follow
      llmq batch results ID -o 'out-{part}.jsonl.gz' --part-size 100MiB
      llmq batch results ID --failed
    """
    if ok and failed:
        raise UsageError("--ok and --failed leave nothing; give one of them, or none for all lines")
    which = Which.OK if ok else Which.FAILED if failed else Which.ALL
    check_output(out, part_size, ordered=ordered)
    parts = PartLimit.parse(part_size)
    loaded = load(queue=queue, redis_url=redis)

    async def work() -> Collected:
        async with open_session(loaded.settings) as session:
            batches = Batches(session.queue)
            record = await batches.show(batch_id)
            # A file of some lines is not a file of all: it is continued only by the same choice.
            content = batch_id if which is Which.ALL else f"{batch_id} ({which.value} lines only)"
            array = JsonResults(sys.stdout.buffer, batch_id) if json and out is None else None
            output: Output = array or open_output(out, content, ordered=ordered, force=force, parts=parts)
            with output:
                collected = await collect(batches, record, output, which=which, follow=follow)
            record = await batches.show(batch_id)
            if array is not None:
                array.end(record.to_json())
            elif json:
                print_json(record.to_json() | output_facts(out) | {"written": collected.written})
            return collected

    words: list[object] = ["llmq", "batch", "results", batch_id, *where_options(loaded)]
    words += [option for option, given in (("--ok", ok), ("--failed", failed), ("--ordered", ordered)) if given]
    words += [*(["-o", out] if out else []), *(["--part-size", part_size] if part_size else [])]
    try:
        collected = run_async(work)
    except Interrupted:
        raise Interrupted(f"interrupted; the batch goes on. Its results: {command(*words, '--follow')}") from None
    if collected.complete and out is not None:
        say_ended(collected, out, where_options(loaded))
    elif not collected.complete and not follow:
        again = command(*words, "--follow")
        notice(f"note: the batch is {collected.status}; these are its results so far. To its end: {again}")
    if collected.complete and collected.failed:
        raise typer.Exit(SOME_FAILED)
