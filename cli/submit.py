"""`llmq submit-batch`: queue a file of prompts, and on request wait for its results."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from llmq.cli.collecting_beside import CollectingBeside
from llmq.cli.errors import SOME_FAILED, Interrupted
from llmq.cli.options import Json, MaxLineBytes, Model, Ordered, Out, PartSize, Queue, RedisUrl, Sample, SkipBad, Tenant
from llmq.cli.prompts import checked_prompts
from llmq.cli.queueing import feed, say_who_serves
from llmq.cli.render import command, count_of, notice, print_json, print_line
from llmq.cli.results import check_output, collect, output_facts, say_ended, wait_for
from llmq.cli.running import run_async
from llmq.cli.sample import WINDOW_S, Sampling, check_count, take
from llmq.cli.session import load, open_session, where_options, worker_command
from llmq.cli.submission import Submission
from llmq.cli.tally import Tally
from llmq.scheduler.batch_record import BatchRecord, new_batch_id
from llmq.scheduler.batches import Batches
from llmq.scheduler.collecting import collector_of_stream
from llmq.scheduler.errors import EngineUnavailable, UsageError
from llmq.scheduler.fleet import SILENT, read_workers
from llmq.scheduler.lines import Checked, InputFile
from llmq.scheduler.output import ResultFile, ResultStream
from llmq.scheduler.units import parse_duration


def submit_batch(
    file: Annotated[str, typer.Argument(metavar="FILE", help="JSON lines; - is stdin.")],
    queue: Queue = None,
    tenant: Tenant = None,
    model: Model = None,
    window: Annotated[
        str | None, typer.Option("--window", metavar="TIME", help="Lines that have not started by then expire: 24h.")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="TEXT", help="What to call it (default: the file's name).")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Return when the batch has ended.")] = False,
    out: Out = None,
    part_size: PartSize = None,
    ordered: Ordered = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite OUT.")] = False,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Queue all of it at once, or nothing (exit 5).")] = False,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="ID", help="Go on with a batch whose submission was cut off.")
    ] = None,
    skip_bad: SkipBad = False,
    sample: Sample = None,
    max_line_bytes: MaxLineBytes = None,
    redis: RedisUrl = None,
    json: Json = False,
) -> None:
    """Queue a file of prompts as one batch; print its id.

    The whole file is checked first; with a bad line in it nothing is queued. While the queue is full it waits for
    room. A line is an OpenAI batch line, an Anthropic line, {"messages": [...]}, {"prompt": "..."} or a JSON string.

    \b
    Examples:
      llmq submit-batch prompts.jsonl
      llmq submit-batch prompts.jsonl -o results.jsonl      wait for the results
      llmq submit-batch prompts.jsonl --window 24h --tenant evals
      llmq submit-batch big.jsonl.zst -o 'out-{part}.jsonl.gz'
      llmq submit-batch big.jsonl.zst --sample 200      tokens and time of all
      ssh host cat prompts.jsonl.gz | llmq submit-batch - --json
    """
    check_output(out, part_size, ordered=ordered)
    check_count(sample)
    if sample and (resume or no_wait):
        raise UsageError("--sample queues a small batch of its own: leave out --resume and --no-wait")
    asked = Submission(
        file=file,
        loaded=load(queue=queue, tenant=tenant, redis_url=redis, max_line_bytes=max_line_bytes),
        model=model,
        window=parse_window(window),
        name=name or ("stdin" if file == "-" else Path(file).name),
        resume=resume,
        wait=wait or out is not None,
        out=out,
        part_size=part_size,
        ordered=ordered,
        force=force,
        no_wait=no_wait,
        skip_bad=skip_bad,
        sample=sample,
        json=json,
    )
    limit = asked.loaded.settings.max_line_bytes
    with checked_prompts(file, max_line_bytes=limit, model=model, skip_bad=skip_bad) as (opened, checked):
        work = _sample if sample else _submit
        failed = run_async(lambda: work(asked, opened, checked))
    if failed and (asked.wait or sample):
        raise typer.Exit(SOME_FAILED)


def parse_window(text: str | None) -> float | None:
    """Return the seconds of `--window`. Raises UsageError."""
    if text is None:
        return None
    try:
        window = parse_duration(text)
    except UsageError as error:
        raise UsageError(f"--window: {error}") from None
    if window <= 0:
        raise UsageError(f"--window: expected a time above 0, got {text!r}")
    return window


async def _submit(asked: Submission, file: InputFile, checked: Checked) -> int:
    """Queue the file, and on request wait for its end; return how many lines have failed."""
    async with open_session(asked.loaded.settings, warnings=True) as session:
        batches = Batches(session.queue)
        with ExitStack() as opened:
            batch_id = asked.resume or new_batch_id()
            # Before anything is queued: an output that cannot be used must not cost a batch.
            out: ResultFile | ResultStream | None = None
            if asked.out is not None:
                out = asked.open_output(batch_id, file)
                opened.enter_context(out)
            record = await _open(asked, batches, batch_id, file, checked)
            await say_who_serves(session.queue, checked.models, asked.loaded)
            feeding = feed(
                batches, record, file, checked, wait=not asked.no_wait, again=asked.again(batch_id), loaded=asked.loaded
            )
            if asked.wait:
                return await _wait(asked, batches, batch_id, feeding, out)
            await feeding
            record = await batches.show(batch_id)
    if asked.json:
        print_json(record.to_json() | {"queue": asked.loaded.settings.queue})
    else:
        print_line(batch_id)
        _say_next(asked, record)
    return record.failed


async def _sample(asked: Submission, file: InputFile, checked: Checked) -> int:
    """Let the live workers answer some lines, and print what all of them would take; return how many failed."""
    sampling = Sampling(file, checked, asked.sample or 0, asked.out, asked.json)
    async with open_session(asked.loaded.settings, warnings=True) as session:
        alive = [worker for worker in await read_workers(session.queue) if worker.state != SILENT]
        if not alive:
            serve = worker_command(asked.loaded, session.queue.name)
            here = command("llmq", "run", asked.file, "--sample", sampling.count)
            raise EngineUnavailable(
                f"no worker serves queue {session.queue.name}, so there is nothing to measure; "
                f"start one: {serve}, or measure an engine of this machine: {here}"
            )
        batches, batch_id = Batches(session.queue), new_batch_id()
        out = None if asked.out is None else asked.open_output(batch_id, file)
        with out or nullcontext():
            record = await batches.open(
                name=f"sample of {asked.name}",
                digest=file.digest,
                tenant=asked.loaded.settings.tenant,
                window=asked.window or WINDOW_S,
                batch_id=batch_id,
            )

            async def answer(tally: Tally) -> None:
                await batches.feed(batch_id, sampling.lines())
                await collect(batches, await batches.show(batch_id), tally, title="sampling")

            try:
                slots = sum(worker.slots for worker in alive)
                simulated = any(worker.simulated for worker in alive)
                return await take(sampling, batches, record, out, answer, slots=slots, simulated=simulated)
            except asyncio.CancelledError:
                raise Interrupted("interrupted; the sample is gone, and nothing else was queued") from None


async def _open(asked: Submission, batches: Batches, batch_id: str, file: InputFile, checked: Checked) -> BatchRecord:
    if not asked.resume:
        return await batches.open(
            name=asked.name,
            digest=file.digest,
            tenant=asked.loaded.settings.tenant,
            window=asked.window,
            need=checked.good if asked.no_wait else 0,
            batch_id=batch_id,
            extra={"model": asked.model} if asked.model else {},
        )
    record = await batches.reopen(batch_id, file.digest)
    model = (record.extra or {}).get("model")
    if model != asked.model:
        was = f"with --model {model}" if model else "without --model"
        raise UsageError(f"batch {batch_id} was begun {was}; go on with it {was}")
    return record


async def _wait(
    asked: Submission,
    batches: Batches,
    batch_id: str,
    feeding: Coroutine[Any, Any, None],
    out: ResultFile | ResultStream | None,
) -> int:
    """Queue the file and wait for the end of its batch; its results are taken meanwhile."""

    def say_queued(record: BatchRecord) -> None:
        if not asked.json:
            notice(f"queued {count_of(record.lines, 'line')} as {batch_id}")

    try:
        if out is None:
            await feeding
            record = await batches.show(batch_id)
            say_queued(record)
            collected = await wait_for(batches, record)
        else:
            if not asked.json:
                notice(f"queueing as {batch_id}")
            # Into a pipe the results are handed over as well; a file says so by itself.
            collector = None if isinstance(out, ResultFile) else collector_of_stream()
            collected = await CollectingBeside(batches, batch_id, out, collector, say_queued).run(feeding)
    except asyncio.CancelledError:
        raise Interrupted(f"interrupted; the batch goes on. Its results: {asked.collect_later(batch_id)}") from None
    say_ended(collected, asked.out, where_options(asked.loaded))
    if asked.json:
        record = await batches.show(batch_id)
        print_json(record.to_json() | {"queue": asked.loaded.settings.queue} | output_facts(asked.out))
    elif out is None:
        print_line(batch_id)
    return collected.failed


def _say_next(asked: Submission, record: BatchRecord) -> None:
    where = where_options(asked.loaded)
    notice(f"queued {count_of(record.lines, 'line')}; what next:")
    notice(f"  {command('llmq', 'batch', 'show', record.id, *where)}")
    notice(f"  {command('llmq', 'batch', 'results', record.id, *where, '-o', 'results.jsonl', '--follow')}")
