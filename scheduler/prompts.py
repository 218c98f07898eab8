"""Prompts that a program holds: what `submit_batch` takes besides a path, as the file that it would have been.

Lines go through a file because a batch is read twice: all of it is judged before anything is queued. How a line is
judged stands in `line_form.py`, the same as for any other file.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from typing import IO, Any

from llmq.scheduler.errors import UsageError
from llmq.scheduler.input_file import InputFile, open_input

#: What a batch is made of: a file's path, or its lines (objects in any form that a file's line may have, or texts).
Prompts = str | os.PathLike[str] | Iterable[Mapping[str, Any] | str]

#: What messages call lines that came from no file.
NAME = "prompts"


def open_prompts(prompts: Prompts, *, max_line_bytes: int) -> InputFile:
    """Open a file of prompts, or write lines into one that has no name. Blocks. Raises UsageError."""
    if isinstance(prompts, str | os.PathLike):
        return open_input(prompts, max_line_bytes=max_line_bytes)
    spooled = tempfile.TemporaryFile()  # noqa: SIM115 - the InputFile closes it
    try:
        _write(prompts, spooled)
    except BaseException:
        spooled.close()
        raise
    return InputFile(NAME, spooled, max_line_bytes, None)


def _write(prompts: Iterable[Mapping[str, Any] | str], file: IO[bytes]) -> None:
    for number, prompt in enumerate(prompts, 1):
        value = prompt if isinstance(prompt, str) else _object(prompt, number)
        try:
            # ASCII, so that any text can be written: what cannot be stored is named when the line is judged.
            file.write(json.dumps(value, allow_nan=False).encode("ascii") + b"\n")
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(f"{NAME}, line {number}: expected what JSON can hold, got: {error}") from None
    file.flush()


def _object(prompt: object, number: int) -> dict[str, Any]:
    if isinstance(prompt, Mapping):
        return dict(prompt)
    raise UsageError(f"{NAME}, line {number}: expected an object or a text, got a {type(prompt).__name__}")
