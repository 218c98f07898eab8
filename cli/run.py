"""`llmq run`: a file of prompts through one engine, on this machine, in this process.

Queue, worker and collector are the same as a fleet's; here one process is all three (`workoff.py`). The queue is named
after the file's digest: so the same command again finds what an earlier one left, and serves nobody else's lines.
"""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from llmq.cli.engine import EngineStart, StoppedEarly, open_engine
from llmq.cli.errors import SOME_FAILED, Interrupted
from llmq.cli.options import (
    Concurrency,
    EngineName,
    Gpu,
    Json,
    MaxLineBytes,
    Model,
    Ordered,
    Out,
    PartSize,
    RedisUrl,
    Sample,
    Serve,
    ServeLog,
    SkipBad,
)
from llmq.cli.prompts import checked_prompts
from llmq.cli.render import count_of, notice, print_json
from llmq.cli.results import check_output, collect, output_facts, say_ended
from llmq.cli.run_request import Run, discard, find_earlier, id_of_batch, refuse_other
from llmq.cli.running import run_async
from llmq.cli.sample import Sampling, check_count, take
from llmq.cli.session import Session, load, open_session, redis_option
from llmq.cli.workoff import WorkOff
from llmq.scheduler.batch_record import new_batch_id
from llmq.scheduler.batches import Batches
from llmq.scheduler.collecting import Collected
from llmq.scheduler.compression import without_suffix
from llmq.scheduler.lines import Checked, InputFile, read_lines
from llmq.scheduler.output import Output, count_ok_failed, is_complete
from llmq.workers.engines.base import Engine
from llmq.workers.shutdown import Shutdown
from llmq.workers.worker import DEFAULT_CONCURRENCY

if TYPE_CHECKING:
    from llmq.workers.engines.discovery import FoundEngine

#: Hex digits of the file's digest that name queue and batch: 64 bits.
_DIGITS = 16


def run(
    file: Annotated[str, typer.Argument(metavar="FILE", help="JSON lines; - is stdin.")],
    out: Out = None,
    engine: EngineName = None,
    gpu: Gpu = "0",
    serve: Serve = None,
    serve_log: ServeLog = None,
    concurrency: Concurrency = None,
    model: Model = None,
    part_size: PartSize = None,
    ordered: Ordered = False,
    force: Annotated[bool, typer.Option("--force", help="Start over, and overwrite OUT.")] = False,
    skip_bad: SkipBad = False,
    sample: Sample = None,
    max_line_bytes: MaxLineBytes = None,
    redis: RedisUrl = None,
    json: Json = False,
) -> None:
    """Run a file of prompts on this machine; no server needed.

    Ctrl-C stops it, and the same command goes on from there; once it is complete, the same command says so. Without
    -o the results go to stdout, or to FILE.results.jsonl in this folder where stdout is a terminal. The batch stands
    in a queue of its own, run-<digest of the file>: llmq batch ls --queue run-...

    \b
    Examples:
      llmq run prompts.jsonl -o results.jsonl
      llmq run prompts.jsonl --engine http://127.0.0.1:8000 | jq .
      llmq run prompts.jsonl --engine local:model.gguf      llama.cpp
      llmq run prompts.jsonl -o out.jsonl --engine sim      a simulated GPU
      llmq run big.jsonl.zst -o 'out-{part}.jsonl.gz'       packed, in parts
      llmq run big.jsonl.zst --sample 200                   tokens and time of all
    """
    loaded = load(engine=engine, concurrency=concurrency, redis_url=redis, max_line_bytes=max_line_bytes)
    start = EngineStart(gpu, serve, serve_log)
    check_count(sample)
    asked = Run(
        file=file,
        loaded=loaded,
        out=out or (None if sample else _default_output(file, json)),
        part_size=part_size,
        model=model or "",
        ordered=ordered,
        force=force,
        skip_bad=skip_bad,
        sample=sample,
        json=json,
        start=start,
    )
    check_output(asked.out, part_size, ordered=ordered)
    shutdown = Shutdown()
    limit = loaded.settings.max_line_bytes
    with checked_prompts(file, max_line_bytes=limit, model=model, skip_bad=skip_bad) as (opened, checked):
        if sample:
            failed: int | None = run_async(lambda: _sample(asked, opened, checked, shutdown), shutdown)
        else:
            failed = _report_complete(asked, opened)
            if failed is None:
                failed = run_async(lambda: _run(asked, opened, checked, shutdown), shutdown)
    if failed:
        raise typer.Exit(SOME_FAILED)


def _default_output(file: str, json: bool) -> Path | None:
    """Return where results go without -o; None is stdout."""
    if not json and not sys.stdout.isatty():
        return None
    return Path(f"{'stdin' if file == '-' else Path(without_suffix(file)).stem}.results.jsonl")


def _report_complete(asked: Run, file: InputFile) -> int | None:
    """Say that the output is complete and return its failed lines; None where it is not. Redis is not asked."""
    if asked.force or asked.out is None or not is_complete(asked.out, asked.source(file)):
        return None
    counts = count_ok_failed(asked.out)
    notice(
        f"{asked.out} is complete: {count_of(counts.ok, 'line')} ok, {counts.failed:,} failed; "
        "nothing was run again (--force starts over)"
    )
    if asked.json:
        request_counts = {"total": counts.ok + counts.failed, "completed": counts.ok, "failed": counts.failed}
        print_json({"status": "completed", "request_counts": request_counts} | output_facts(asked.out))
    return counts.failed


async def _run(asked: Run, file: InputFile, checked: Checked, shutdown: Shutdown) -> int:
    """Do what is left to do; return how many lines failed."""
    queue = f"run-{file.digest[:_DIGITS]}"
    async with open_session(asked.loaded.settings, queue=queue, warnings=True) as session:
        batches = Batches(session.queue)
        earlier = await find_earlier(batches, file.digest)
        batch_id = id_of_batch(queue, earlier, anew=asked.force)
        if earlier is not None and not asked.force:
            refuse_other(asked, earlier)
        async with AsyncExitStack() as opened:
            found: FoundEngine | None = None
            if earlier is None or not earlier.ended or asked.force:
                # Before anything is overwritten or begun: a run without an engine must not cost an earlier one.
                found = await _open_engine(asked, opened, shutdown)
            out = asked.open_output(batch_id, file)
            opened.enter_context(out)
            if found is not None:
                if earlier is not None and asked.force:
                    await discard(batches, earlier)
                collected = await _work_off(asked, session, batch_id, file, checked, out, found.engine, shutdown)
            else:
                assert earlier is not None
                notice(f"this file was run before ({earlier.status.value}); nothing is run again (--force starts over)")
                collected = await collect(batches, earlier, out)
        simulated = found is not None and found.info.simulated
        say_ended(collected, asked.out, ("--queue", queue, *redis_option(asked.loaded)), simulated=simulated)
        if asked.json:
            facts = (await batches.show(batch_id)).to_json()
            print_json(facts | output_facts(asked.out) | {"queue": queue, "simulated": simulated})
    return collected.failed


async def _sample(asked: Run, file: InputFile, checked: Checked, shutdown: Shutdown) -> int:
    """Run some lines in a queue of their own, and print what all of them would take; return how many failed."""
    sampling = Sampling(file, checked, asked.sample or 0, asked.out, asked.json)
    async with (
        open_session(asked.loaded.settings, queue=f"sample-{file.digest[:_DIGITS]}", warnings=True) as session,
        AsyncExitStack() as opened,
    ):
        found = await _open_engine(asked, opened, shutdown)
        batches, batch_id = Batches(session.queue), new_batch_id()
        out = None if asked.out is None else opened.enter_context(asked.open_output(batch_id, file))
        record = await batches.open(name=Path(file.name).name, digest=file.digest, batch_id=batch_id)
        work = WorkOff(session, record, found.engine, shutdown)
        slots = session.settings.concurrency or found.info.slots or DEFAULT_CONCURRENCY
        try:
            return await take(
                sampling,
                batches,
                record,
                out,
                lambda tally: work.run(sampling.lines(), sampling.size, tally),
                slots=slots,
                simulated=found.info.simulated,
            )
        except Interrupted:
            raise Interrupted("interrupted; the sample is gone, and nothing else was queued") from None


async def _open_engine(asked: Run, opened: AsyncExitStack, shutdown: Shutdown) -> FoundEngine:
    """Find or start the engine; `opened` closes it."""
    try:
        return await opened.enter_async_context(open_engine(asked.loaded.settings, asked.start, shutdown))
    except StoppedEarly:
        raise Interrupted(f"interrupted before the engine was ready. Go on: {asked.again()}") from None


async def _work_off(
    asked: Run,
    session: Session,
    batch_id: str,
    file: InputFile,
    checked: Checked,
    out: Output,
    engine: Engine,
    shutdown: Shutdown,
) -> Collected:
    """Run all lines that have not ended."""
    try:
        batches = Batches(session.queue)
        extra = {"model": asked.model, "engine": asked.engine}
        record = await batches.open(name=Path(file.name).name, digest=file.digest, batch_id=batch_id, extra=extra)
        if record.done:
            notice(f"going on: {record.done:,} of {count_of(checked.lines, 'line')} were done before")
        lines = read_lines(file, checked, after=record.next_line - 1)
        return await WorkOff(session, record, engine, shutdown).run(lines, checked.lines, out)
    except Interrupted:
        raise Interrupted(f"interrupted; what is done is kept. Go on: {asked.again()}") from None
