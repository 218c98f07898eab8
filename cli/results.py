"""Results on their way to the user: followed with a progress bar into an output, and summed up at the end.

`run`, `submit-batch --wait` and `batch results` end here. What is collected, and how it survives a crash, is for
`scheduler/collecting.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Self

import orjson

from llmq.cli.progress import Meter, format_time, meter
from llmq.cli.render import command, count_of, notice
from llmq.scheduler.batch_record import BatchRecord
from llmq.scheduler.batches import Batches
from llmq.scheduler.collecting import Collected, Which, collect_to_file
from llmq.scheduler.errors import UsageError
from llmq.scheduler.outage import REDIS_ERRORS
from llmq.scheduler.output import Output
from llmq.scheduler.parts import OutputName, PartLimit

#: Between two looks at a batch that is only waited for.
_LOOK_S = 1.0


class JsonResults:
    """An output that writes results as one JSON object: `{"id": ..., "results": [...], ...}`, as they come."""

    complete = False
    cursor = ""

    def __init__(self, stream: IO[bytes], batch_id: str) -> None:
        self._stream = stream
        self._length = stream.write(b'{"id":' + orjson.dumps(batch_id) + b',"results":[')
        self._lines = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, line: bytes) -> None:
        """Write one result."""
        self._length += self._stream.write((b",\n" if self._lines else b"\n") + line)
        self._lines += 1

    def sync(self, cursor: str) -> int:
        """Send on what a buffer still holds."""
        self._stream.flush()
        self.cursor = cursor
        return self._length

    def finish(self, cursor: str) -> None:
        """Send on what a buffer still holds."""
        self.sync(cursor)

    def end(self, facts: dict[str, Any]) -> None:
        """Close the list and add what is known of the batch."""
        rest = orjson.dumps({name: value for name, value in facts.items() if name not in ("id", "results")})
        self._stream.write(b"\n]," + rest[1:] + b"\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing to let go of: stdout stays open."""


async def collect(
    batches: Batches,
    record: BatchRecord,
    out: Output,
    *,
    title: str = "collecting",
    total: int | None = None,
    which: Which = Which.ALL,
    follow: bool = True,
    collector: str | None = None,
) -> Collected:
    """Write a batch's results to `out`, showing how far the batch is."""
    with meter(title, total=total or record.total, begin=record.done) as shown:
        collected = await collect_to_file(
            batches,
            record.id,
            out,
            which=which,
            follow=follow,
            collector=collector,
            on_progress=lambda now: show(shown, now),
        )
        shown.update(collected.ok + collected.failed, note=_failed(collected.failed))
    return collected


async def wait_for(batches: Batches, record: BatchRecord) -> Collected:
    """Wait for the end of a batch, showing how far it is; nothing is written."""
    with meter("running", total=record.total, begin=record.done) as shown:
        ended = asyncio.create_task(batches.wait(record.id))
        try:
            while not ended.done():
                await asyncio.wait([ended], timeout=_LOOK_S)
                try:
                    show(shown, await batches.show(record.id))
                except REDIS_ERRORS:
                    continue  # the one that waits decides how long it waits for Redis
        finally:
            ended.cancel()
        last = ended.result()
        show(shown, last)
    tokens = last.prompt_tokens, last.completion_tokens
    return Collected(last.id, last.status, last.completed, last.failed, *tokens, last.seconds, complete=True)


def show(shown: Meter, record: BatchRecord) -> None:
    """Move a meter to where a batch is."""
    notes = [_failed(record.failed), record.reason, "paused" if record.paused and not record.ended else ""]
    shown.update(record.done, total=record.total, note="; ".join(note for note in notes if note))


def check_output(out: Path | None, part_size: str | None, *, ordered: bool) -> None:
    """Raise UsageError for an output that cannot be meant, before anything is read or begun."""
    if out is None or str(out) == "-":
        if ordered:
            raise UsageError("--ordered needs a file to put in order: -o FILE")
        if part_size is not None:
            raise UsageError("--part-size needs files to put the parts in: -o 'out-{part}.jsonl'")
    else:
        OutputName.parse(out, PartLimit.parse(part_size))


def output_facts(out: Path | None) -> dict[str, Any]:
    """Return what `--json` says of an output: its name, and the parts that a pattern stands for."""
    if out is None:
        return {"output": None}
    name = OutputName.parse(out)
    parts = {"parts": [str(out.with_name(name.part(number).name)) for number in name.sizes()]}
    return {"output": str(out)} | (parts if name.limit is not None else {})


def say_ended(collected: Collected, out: Path | None, where: Sequence[str], *, simulated: bool = False) -> None:
    """Print the last lines of a batch: how many are good, LLM tokens, time, and what to do next.

    `where` are the options that lead the next command to the batch.
    """
    tokens = f"{collected.prompt_tokens:,} prompt and {collected.completion_tokens:,} completion tokens"
    parts = len(output_facts(out).get("parts", ()))
    place = (f"; results in {out}" + (f" ({count_of(parts, 'part')})" if parts else "")) if out else ""
    engine = " (simulated)" if simulated else ""
    notice(
        f"{collected.status}{engine}: {count_of(collected.ok, 'line')} ok, {collected.failed:,} failed; {tokens}; "
        f"{format_time(collected.seconds)}{place}"
    )
    if collected.failed:
        retry = command("llmq", "batch", "retry", collected.batch_id, *where)
        notice(f"run the failed lines again: {retry}")


def _failed(failed: int) -> str:
    return f"{failed:,} failed" if failed else ""
