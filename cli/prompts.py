"""The file of prompts that a command is given: opened and checked whole, before anything is queued."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from llmq.cli.progress import meter
from llmq.cli.render import notice
from llmq.scheduler.lines import Checked, InputFile, check, open_input

#: Files below this are checked before anybody would see a bar (about a second).
_SHOWN_FROM_BYTES = 50_000_000


@contextmanager
def checked_prompts(
    path: str, *, max_line_bytes: int, model: str | None, skip_bad: bool
) -> Iterator[tuple[InputFile, Checked]]:
    """Open a file (`-`: stdin) and check all of it. Raises InputFileError, with the first 20 bad lines."""
    with open_input(path, max_line_bytes=max_line_bytes) as file:
        if file.size < _SHOWN_FROM_BYTES:
            checked = check(file, model=model, skip_bad=skip_bad)
        else:
            with meter("checking", total=file.size, unit="bytes") as shown:
                checked = check(file, model=model, skip_bad=skip_bad, on_progress=shown.update)
                shown.update(file.size)
        if checked.fault_total:
            notice(f"note: {checked.fault_total:,} of {checked.lines:,} lines cannot be used and become error lines:")
            for fault in checked.faults:
                notice(f"  {fault}")
            if checked.fault_total > len(checked.faults):
                notice(f"  ... and {checked.fault_total - len(checked.faults):,} more")
        yield file, checked
