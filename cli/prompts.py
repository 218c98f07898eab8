"""The file of prompts that a command is given: opened and checked whole, before anything is queued."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llmq.cli.progress import meter
from llmq.cli.render import notice
from llmq.scheduler.compression import Codec
from llmq.scheduler.errors import InputFileError, UsageError
from llmq.scheduler.lines import Checked, InputFile, check, open_input

#: Files below this are checked before anybody would see a bar (about a second); packed ones hold some times as much.
_SHOWN_FROM_BYTES = 50_000_000
_SHOWN_FROM_PACKED_BYTES = 4_000_000


@contextmanager
def checked_prompts(
    path: str, *, max_line_bytes: int, model: str | None, skip_bad: bool
) -> Iterator[tuple[InputFile, Checked]]:
    """Open a file (`-`: stdin) and check all of it. Raises InputFileError, with the first 20 bad lines."""
    if not path:
        raise UsageError("expected a file of JSON lines, got an empty name; - is stdin")
    with open_input(path, max_line_bytes=max_line_bytes) as file:
        try:
            checked = _check(file, model, skip_bad)
        except InputFileError as error:
            raise _advised(error, file) from None
        if checked.fault_total:
            notice(f"note: {checked.fault_total:,} of {checked.lines:,} lines cannot be used and become error lines:")
            for fault in checked.faults:
                notice(f"  {fault}")
            if checked.fault_total > len(checked.faults):
                notice(f"  ... and {checked.fault_total - len(checked.faults):,} more")
        yield file, checked


def _check(file: InputFile, model: str | None, skip_bad: bool) -> Checked:
    if file.size < (_SHOWN_FROM_BYTES if file.codec is Codec.PLAIN else _SHOWN_FROM_PACKED_BYTES):
        return check(file, model=model, skip_bad=skip_bad)
    with meter("checking", total=file.size, unit="bytes") as shown:
        checked = check(file, model=model, skip_bad=skip_bad, on_progress=shown.update)
        shown.update(file.size)
    return checked


def _advised(error: InputFileError, file: InputFile) -> InputFileError:
    """Add to bad lines what turns the file into JSON lines, where it is one JSON document: an array, or indented."""
    first = next((raw for _, raw, _ in file.raw_lines() if raw), b"").strip()
    if not error.faults or not (first.startswith(b"[") or first == b"{"):
        return error
    kind, step = ("a JSON array", "'.[]'") if first.startswith(b"[") else ("indented JSON", ".")
    message = f"{str(error).splitlines()[0]}; it looks like {kind}, to be put one object a line: jq -c {step} FILE"
    return InputFileError(message, error.faults, error.total)
