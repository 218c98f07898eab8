"""The examination of an input file: whether all of it can be run, with OpenAI's codes where it cannot.

A batch of which one line is bad fails before anything is queued. How a line is judged stands in
`scheduler/line_form.py`; here its judgement gets the code, the parameter and the line that clients look for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmq.gateway.batch.slices import in_slices, in_thread
from llmq.scheduler.duplicates import Duplicates
from llmq.scheduler.errors import InputFileError
from llmq.scheduler.input_file import InputFile
from llmq.scheduler.line_form import BadLine, parse_request
from llmq.scheduler.units import format_size

#: Faults that are kept of one file: who has more has one that is repeated.
MOST_FAULTS = 50


@dataclass(frozen=True, slots=True)
class InputFault:
    """Why an input is not valid; `line` counts from 1, None: the whole of it."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None

    def to_openai(self) -> dict[str, Any]:
        """Return an entry of `errors.data`."""
        return {"code": self.code, "line": self.line, "message": self.message, "param": self.param}


@dataclass(frozen=True, slots=True)
class Examined:
    """What was found: the number of requests, the model of all (None: several, or none is named), the faults."""

    total: int
    model: str | None
    faults: tuple[InputFault, ...] = ()


@dataclass(frozen=True, slots=True)
class _Seen:
    """One line: its id and model, or its fault."""

    number: int
    key: str = ""
    model: str | None = None
    fault: InputFault | None = None


async def examine(file: InputFile, endpoint: str, most_lines: int) -> Examined:
    """Judge all lines; ends early where there are more than `most_lines`, or more faults than are kept."""
    duplicates, total = Duplicates(file.spool_dir), 0
    faults: list[InputFault] = []
    models: set[str | None] = set()
    file.keep(duplicates)
    async for seen_lines in in_slices(_judge(file, endpoint)):
        total += len(seen_lines)
        for seen in seen_lines:
            if seen.fault is not None:
                faults.append(seen.fault)
            else:
                duplicates.add(seen.key, seen.number)
                if len(models) < 2:
                    models.add(seen.model)
        if total > most_lines:
            return Examined(total, None, (_too_many(most_lines),))
        if len(faults) >= MOST_FAULTS:
            break
    await in_thread(duplicates.settle)
    faults += [_repeated(line, first) for line, first in _first(duplicates, MOST_FAULTS)]
    if not total:
        faults.append(InputFault("empty_file", "The input file holds no requests."))
    faults.sort(key=lambda fault: fault.line or 0)
    return Examined(total, models.pop() if len(models) == 1 else None, tuple(faults[:MOST_FAULTS]))


def fault_of_file(error: InputFileError) -> InputFault:
    """Return the fault of a file that is no file of requests at all."""
    said = str(error)
    if ": is empty" in said:
        return InputFault("empty_file", "The input file is empty.")
    return InputFault("invalid_file", f"The input file cannot be read: {said}")


def _judge(file: InputFile, endpoint: str) -> Iterator[_Seen]:
    for number, raw, _ in file.raw_lines():
        if raw is None:
            yield _Seen(number, fault=_too_long(number, file.max_line_bytes))
            continue
        try:
            key, job = parse_request(raw, endpoint)
        except BadLine as bad:
            yield _Seen(number, fault=_bad(number, bad))
        else:
            model = job.body.get("model")
            yield _Seen(number, key, model if isinstance(model, str) else None)


def _bad(number: int, bad: BadLine) -> InputFault:
    missing = bad.fault.startswith("is missing")
    match bad.field:
        case "":
            return InputFault("invalid_json_line", f"This line is not a valid JSON request: {bad.fault}.", None, number)
        case "custom_id" | "method" | "url" | "body" if missing:
            code, param = "missing_required_parameter", str(bad.field)
        case "method":
            code, param = "invalid_method", bad.field
        case "url":
            code, param = "url_mismatch" if "endpoint of the batch" in bad.fault else "invalid_url", bad.field
        case "custom_id":
            code, param = "invalid_custom_id", bad.field
        case _:
            code = "missing_required_parameter" if missing else "invalid_request"
            param = bad.field if bad.field == "body" else f"body.{bad.field}"
    return InputFault(code, f"{param}: {bad.fault}.", param, number)


def _too_long(number: int, limit: int) -> InputFault:
    return InputFault("line_too_large", f"This line is longer than the {format_size(limit)} allowed.", None, number)


def _too_many(limit: int) -> InputFault:
    return InputFault("too_many_tasks", f"The input file holds more than the {limit:,} requests allowed in a batch.")


def _repeated(line: int, first: int) -> InputFault:
    message = f"custom_id: is the same as on line {first}; every request needs one of its own."
    return InputFault("duplicate_custom_id", message, "custom_id", line)


def _first(duplicates: Duplicates, count: int) -> Iterator[tuple[int, int]]:
    for place, pair in enumerate(duplicates):
        if place == count:
            return
        yield pair
