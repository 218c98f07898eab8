"""`--sample N` of `run` and `submit-batch`: some lines are answered, and what all of them would take is estimated.

The sample is a small batch of its own: for `run` in a queue `sample-<digest of the file>`, so that a real run never
meets it; for `submit-batch` in the queue that was named, where the live workers serve it before what waits there of
the same tenant (it is due within the hour). When it has ended it is deleted; its answers stay in OUT if there is one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmq.cli.progress import format_time
from llmq.cli.render import count_of, notice, print_facts, print_json
from llmq.cli.results import output_facts
from llmq.cli.tally import Tally
from llmq.scheduler.batch_record import BatchRecord
from llmq.scheduler.batches import Batches
from llmq.scheduler.errors import LLMQError, UsageError
from llmq.scheduler.lines import Checked, InputFile, InputLine
from llmq.scheduler.outage import REDIS_ERRORS
from llmq.scheduler.output import Output
from llmq.scheduler.sampling import FEW_LINES, Estimate, Range, estimate, sample_lines

#: Due so soon, the sample is served before batches without a window; what has not started by then would mislead.
WINDOW_S = 3600.0

#: Reasons for failures that are listed.
_REASONS_SHOWN = 5

#: Below so many lines for each slot, much of a sample's time is its end, with slots that have nothing to do.
_LINES_PER_SLOT = 4


@dataclass(frozen=True, slots=True)
class Sampling:
    """A sample that was asked for: of which file, how many lines, where its answers go."""

    file: InputFile
    checked: Checked
    count: int
    out: Path | None
    json: bool

    @property
    def size(self) -> int:
        """How many lines it has."""
        return min(self.count, self.checked.good)

    def lines(self) -> Iterator[InputLine]:
        """Iterate over its lines."""
        return sample_lines(self.file, self.checked, self.count)


def check_count(count: int | None) -> None:
    """Raise UsageError for a sample of no lines."""
    if count is not None and count < 1:
        raise UsageError(f"--sample: expected a number of lines, 1 or more, got {count}")


async def take(
    sampling: Sampling,
    batches: Batches,
    record: BatchRecord,
    out: Output | None,
    answer: Callable[[Tally], Awaitable[Any]],
    *,
    slots: int,
    simulated: bool,
) -> int:
    """Let `answer` run the sample's batch into a tally, print the estimate, and return how many lines failed.

    The batch is gone afterwards, whatever happens.
    """
    tally = Tally(out)
    try:
        await answer(tally)
        record = await batches.show(record.id)
    finally:
        with suppress(LLMQError, *REDIS_ERRORS):
            await batches.discard(record.id)
    if not tally.lines:
        raise LLMQError("the sample has no results: its batch was ended by somebody; give the command again")
    found = estimate(tally.lines, sampling.checked.good, record.seconds)
    _print(sampling, found, slots, simulated)
    return found.failed


def _print(sampling: Sampling, found: Estimate, slots: int, simulated: bool) -> None:
    notes = list(_notes(sampling, found, slots, simulated))
    if sampling.json:
        facts = {"file": sampling.file.name, "bad_lines": sampling.checked.fault_total}
        print_json(facts | found.to_json() | output_facts(sampling.out) | {"simulated": simulated, "notes": notes})
        return
    print_facts(
        {
            "sample": f"{found.sampled:,} of {count_of(found.lines, 'line')}, {found.failed:,} failed",
            "prompt": _shown(found.prompt_tokens, _tokens, " LLM tokens"),
            "completion": _shown(found.completion_tokens, _tokens, " LLM tokens"),
            "time": f"{_shown(found.seconds, format_time)}, at {found.lines_per_second:,.3g} lines/s",
            "answers": str(sampling.out or ""),
        }
    )
    for reason, count in found.reasons[:_REASONS_SHOWN]:
        notice(f"{count_of(count, 'line')} failed: {reason}")
    for note in notes:
        notice(f"note: {note}")


def _notes(sampling: Sampling, found: Estimate, slots: int, simulated: bool) -> Iterator[str]:
    """Say what the estimate is worth."""
    if simulated:
        yield "a simulated engine answered: tokens and time are those of the simulation"
    if found.sampled == found.lines:
        return
    yield "the ranges are for 95 % of samples like this one, and for an engine that goes on as it went"
    if found.sampled < FEW_LINES:
        yield f"{count_of(found.sampled, 'line')} say little, and nothing of what is rare: take {FEW_LINES} or more"
    if found.sampled < _LINES_PER_SLOT * slots:
        yield (
            f"the time is rather too long: {slots:,} slots want a sample of {_LINES_PER_SLOT * slots:,} lines or more "
            "to be busy most of the time"
        )
    if sampling.checked.fault_total:
        yield f"{count_of(sampling.checked.fault_total, 'bad line')} of the file are in no estimate: they cost nothing"


def _tokens(value: float) -> str:
    return f"{round(value):,}"


def _shown(found: Range, write: Callable[[float], str], unit: str = "") -> str:
    if found.low is None or found.high is None:
        return f"about {write(found.estimate)}{unit}, range unknown"
    if found.low == found.high:
        return f"{write(found.estimate)}{unit}"
    return f"about {write(found.estimate)}{unit} ({write(found.low)} to {write(found.high)})"
