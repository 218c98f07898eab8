"""The output: where the results of a batch are written, one line of JSON each (`-o OUT`, or stdout).

A collector appends rendered lines (`records.py`) and, now and then, syncs with its place in the result stream. A file,
or a series of parts (`result_file.py`), is resumed from that place after a crash; stdout and pipes are not. Nothing
here touches Redis.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol, Self

import orjson

from llmq.scheduler.errors import LLMQError, UsageError
from llmq.scheduler.input_file import InputFile
from llmq.scheduler.part_series import read_parts
from llmq.scheduler.parts import OutputName, PartLimit
from llmq.scheduler.records import FIRST_ERROR_STATUS
from llmq.scheduler.result_file import ResultFile
from llmq.scheduler.result_start import matches
from llmq.scheduler.sidecar import Sidecar, read_sidecar, sidecar_path

__all__ = [
    "Counts",
    "Output",
    "PartLimit",
    "ResultFile",
    "ResultStream",
    "count_ok_failed",
    "is_complete",
    "open_output",
    "sidecar_path",
]


class Output(Protocol):
    """Where a collector writes to: a `ResultFile` or a `ResultStream`."""

    @property
    def cursor(self) -> str:
        """The collector's place at the last sync, "" at the beginning."""
        ...

    @property
    def complete(self) -> bool:
        """Whether all results of the batch are in it."""
        ...

    def append(self, line: bytes) -> None:
        """Take one line, without its newline. A line whose append raised was not taken."""
        ...

    def sync(self, cursor: str) -> int:
        """Make all lines certain, with the collector's place behind them; return the bytes written so far."""
        ...

    def finish(self, cursor: str) -> None:
        """Sync, and mark the output complete (and put it in order, where that was asked for)."""
        ...

    def close(self) -> None:
        """Let go of the output; lines that were not synced may be missing."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


def open_output(
    path: str | os.PathLike[str] | None,
    batch_id: str,
    *,
    source: str = "",
    ordered: bool = False,
    force: bool = False,
    input_file: InputFile | None = None,
    parts: PartLimit | None = None,
    stdout: IO[bytes] | None = None,
) -> ResultFile | ResultStream:
    """Open the output of a batch; None or `-` is stdout (`stdout` stands in for it), which cannot be resumed.

    The name says how it is packed (.gz, .zst) and whether it has parts (`{part}`), which `parts` limits. `source` is
    kept for `is_complete`; `force` overwrites what is there; `input_file` is what OUT may not be. Raises UsageError: a
    folder, no folder for it, no permission, the input, other content, a wrong pattern, another process writes it.
    """
    if path is None or os.fspath(path) == "-":
        if parts is not None:
            raise UsageError("--part-size needs files to put the parts in: -o 'out-{part}.jsonl'")
        return ResultStream(stdout or sys.stdout.buffer, "stdout", ordered=ordered)
    name = OutputName.parse(path, parts)
    if input_file is not None and any(input_file.is_same_file(name.part(number)) for number in name.sizes()):
        raise UsageError(f"{name.path}: is the input file; name another file for the results: -o OUT")
    target = name.path
    try:
        if name.limit is not None or not target.exists() or target.is_file():
            return ResultFile(name, Sidecar(batch_id, source), ordered=ordered, force=force)
        # A pipe, a terminal, /dev/null.
        pipe = open(target, "wb", buffering=0)  # noqa: SIM115 (closed by its ResultStream)
    except OSError as error:
        raise _cannot_open(target, error) from None
    return ResultStream(pipe, str(target), ordered=ordered, owned=True)


class ResultStream:
    """Stdout, or a pipe: lines go out as they come, and nothing is known of earlier ones."""

    complete = False

    def __init__(self, stream: IO[bytes], name: str, *, ordered: bool = False, owned: bool = False) -> None:
        if ordered:
            raise UsageError("--ordered needs a file to put in order: -o FILE")
        self.cursor = ""
        self._stream = stream
        self._name = name
        self._owned = owned
        self._length = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, line: bytes) -> None:
        """Write one line. Raises LLMQError; BrokenPipeError when the reader has gone."""
        self._out(line + b"\n")
        self._length += len(line) + 1

    def sync(self, cursor: str) -> int:
        """Send on what a buffer still holds; return the bytes written so far."""
        self._out(b"")
        self.cursor = cursor
        return self._length

    def finish(self, cursor: str) -> None:
        """Send on what a buffer still holds."""
        self.sync(cursor)
        self.complete = True

    def close(self) -> None:
        """Close a pipe that was opened here; stdout stays open."""
        if self._owned:
            self._stream.close()

    def _out(self, data: bytes) -> None:
        try:
            view = memoryview(data)
            while view:
                view = view[self._stream.write(view) :]
            if not data:
                self._stream.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise LLMQError(
                f"{self._name}: cannot be written ({error.strerror}); make room there, or name another place: -o OUT"
            ) from error


def is_complete(path: str | os.PathLike[str], source: str) -> bool:
    """Whether `path` is a finished, unchanged output whose batch was made of `source`."""
    name = OutputName.parse(path)
    sizes = name.sizes()
    found = read_sidecar(name.path) if sizes else None
    return found is not None and found.complete and found.source == source and matches(sizes, found)


@dataclass(frozen=True, slots=True)
class Counts:
    """Lines of an output file: answered with success, and all others."""

    ok: int
    failed: int


def count_ok_failed(path: str | os.PathLike[str]) -> Counts:
    """Count the lines of a finished output file. Raises UsageError for a line that is no result line."""
    name = OutputName.parse(path)
    ok = failed = 0
    for line in read_parts((name.part(number) for number in name.sizes()), name.codec):
        try:
            result = orjson.loads(line)
            response = result["response"]
            succeeded = response is not None and response["status_code"] < FIRST_ERROR_STATUS
        except (ValueError, TypeError, KeyError):
            raise UsageError(f"{name.path}: line {ok + failed + 1} is not a result line of llmq") from None
        ok, failed = ok + succeeded, failed + (not succeeded)
    return Counts(ok, failed)


def _cannot_open(path: Path, error: OSError) -> UsageError:
    folder = path.parent
    match error:
        case IsADirectoryError():
            fault = "is a folder; name a file in it"
        case FileNotFoundError() | NotADirectoryError():
            fault = f"its folder does not exist; make it first: mkdir -p {folder}"
        case PermissionError():
            fault = f"may not be written by this user; see the permissions: ls -ld {folder} {path}"
        case _:
            fault = f"cannot be written ({error.strerror}); name another place: -o OUT"
    return UsageError(f"{path}: {fault}")
