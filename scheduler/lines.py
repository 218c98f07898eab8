"""The lines of an input file: its first pass (check) and its second (the jobs), each as a stream in constant memory.

    with open_input("prompts.jsonl") as file:
        checked = check(file)                      # all of it, before anything is queued
        for line in read_lines(file, checked):     # InputLine, or UnusableLine after check(skip_bad=True)
            ...

How a file is read stands in `input_file.py`, what a line may look like in `line_form.py`, and how repeated ids are
found in `duplicates.py`. Nothing here queues anything.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from llmq.scheduler.duplicates import Duplicates
from llmq.scheduler.errors import InputFileError, LineFault
from llmq.scheduler.input_file import MAX_LINE_BYTES, InputFile, open_input
from llmq.scheduler.job import Job
from llmq.scheduler.line_form import BadLine, parse_line, shown

__all__ = [
    "MAX_LINE_BYTES",
    "Checked",
    "InputFile",
    "InputLine",
    "LineFault",
    "UnusableLine",
    "check",
    "open_input",
    "read_lines",
]

#: Bad lines that a message lists; the rest is a number.
FAULTS_SHOWN = 20

#: Names of models that are remembered of one file; a file with more has something else in that field.
MODELS_REMEMBERED = 100

#: Stands after the last repetition: no line has this number.
_NO_MORE = (sys.maxsize, 0)

#: Lines between two calls of `on_progress`.
PROGRESS_LINES = 10_000


@dataclass(frozen=True, slots=True)
class InputLine:
    """A line to queue: its physical number (from 1), its id, its job, and the bytes of the file read so far.

    `proven` says that the job was read from a file, and can be stored; one that was made in Python may hold anything.
    """

    number: int
    key: str
    job: Job
    offset: int
    proven: bool = False


@dataclass(frozen=True, slots=True)
class UnusableLine(LineFault):
    """A bad line that was let through: its fault, its id (`line-<number>` where it has none), bytes read so far."""

    key: str
    offset: int

    @property
    def number(self) -> int:
        """The line's number, under the name that it has in an `InputLine`."""
        return self.line


@dataclass(frozen=True, slots=True)
class Checked:
    """What the first pass found.

    `lines` counts all lines that are not empty, `fault_total` the bad ones; `faults` holds the first 20 of them.
    `models` and `urls` are what the good lines name (at most 100 models). `duplicates` and `model` (what was put in
    the place of the bodies' own) are for the second pass.
    """

    lines: int
    faults: tuple[LineFault, ...]
    fault_total: int
    models: frozenset[str]
    urls: frozenset[str]
    model: str | None
    duplicates: Duplicates = field(repr=False)

    @property
    def good(self) -> int:
        """Lines that can be queued."""
        return self.lines - self.fault_total


def check(
    file: InputFile,
    *,
    model: str | None = None,
    skip_bad: bool = False,
    on_progress: Callable[[int], None] | None = None,
) -> Checked:
    """Read all lines and judge them; `on_progress` is told the bytes read so far, now and then.

    Raises InputFileError, which names the first 20 bad lines, unless `skip_bad`; and for a file without lines.
    """
    duplicates = Duplicates(file.spool_dir)
    file.keep(duplicates)
    faults: list[LineFault] = []
    lines = bad = 0
    models: set[str] = set()
    urls: set[str] = set()
    for line in _parse_lines(file, model):
        lines += 1
        if on_progress is not None and lines % PROGRESS_LINES == 0:
            on_progress(line.offset)
        if isinstance(line, UnusableLine):
            bad += 1
            if len(faults) < FAULTS_SHOWN:
                faults.append(line)
            continue
        duplicates.add(line.key, line.number)
        urls.add(line.job.url)
        named = line.job.body.get("model")
        if isinstance(named, str) and len(models) < MODELS_REMEMBERED:
            models.add(named)
    duplicates.settle()
    bad += len(duplicates)
    checked = Checked(lines, tuple(faults), bad, frozenset(models), frozenset(urls), model, duplicates)
    if duplicates:
        # Their ids were held as hashes only, so the faults to show are read once more.
        checked = replace(checked, faults=_first_faults(file, checked))
    _judge(file.name, checked, skip_bad)
    return checked


def read_lines(file: InputFile, checked: Checked, *, after: int = 0) -> Iterator[InputLine | UnusableLine]:
    """Iterate over the jobs of a checked file, with its bad lines in their places; from the line past `after` on."""
    repetitions = iter(checked.duplicates)
    repeated, first = next(repetitions, _NO_MORE)
    for line in _parse_lines(file, checked.model, after):
        if isinstance(line, UnusableLine):
            yield line
            continue
        while repeated < line.number:
            repeated, first = next(repetitions, _NO_MORE)
        if repeated == line.number:
            fault = f"{shown(line.key)} is also on line {first}"
            yield UnusableLine(line.number, "custom_id", fault, line.key, line.offset)
        else:
            yield line


def _parse_lines(file: InputFile, model: str | None, after: int = 0) -> Iterator[InputLine | UnusableLine]:
    """Read and parse the lines past `after`, each by itself: whether an id is repeated is not known here."""
    for number, raw, offset in file.raw_lines():
        if number <= after:
            continue
        if raw is None:
            fault = f"is longer than {file.max_line_bytes:,} bytes; raise the limit: --max-line-bytes N"
            yield UnusableLine(number, "", fault, f"line-{number}", offset)
            continue
        try:
            key, job = parse_line(raw, f"line-{number}", model)
        except BadLine as bad:
            yield UnusableLine(number, bad.field, bad.fault, bad.key or f"line-{number}", offset)
        else:
            yield InputLine(number, key, job, offset, proven=True)


def _first_faults(file: InputFile, checked: Checked) -> tuple[LineFault, ...]:
    faults = (line for line in read_lines(file, checked) if isinstance(line, UnusableLine))
    return tuple(itertools.islice(faults, FAULTS_SHOWN))


def _judge(name: str, checked: Checked, skip_bad: bool) -> None:
    if not checked.lines:
        raise InputFileError(f"{name}: holds no lines; expected one JSON object a line")
    if checked.fault_total and not skip_bad:
        cannot = (
            f"{checked.fault_total:,} of {checked.lines:,} {'line' if checked.lines == 1 else 'lines'} cannot be used"
        )
        raise InputFileError(
            f"{name}: {cannot}; nothing was queued (--skip-bad makes error lines of them)",
            checked.faults,
            checked.fault_total,
        )
