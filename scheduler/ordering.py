"""Ordering: the lines of a finished output in the order of its input, for `--ordered`.

Results arrive in the order of completion; each output line names its input line in its id (`batch_req_<batch>_<line>`).
Lines are gathered until they take some memory, sorted, and written to one unlinked temporary file as a run, packed;
reading merges the runs. Memory stays constant however long the output is and whatever order it has, but for some KiB a
run of 32 MiB and for the longest line. What is done with the lines is for `result_file.py`.
"""

from __future__ import annotations

import heapq
import io
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import IO

import zstandard

from llmq.scheduler.errors import UsageError

#: Bytes of lines that are sorted in memory.
RUN_BYTES = 32 << 20

#: A run is read in frames of about this size: the memory that each run takes while all are merged.
_FRAME_BYTES = 1 << 15

#: The fastest that zstd does at a fair size: a run is written once and read once.
_LEVEL = 1

#: How `records.render` begins every line.
_ID = re.compile(rb'\{"id":"batch_req_[^"]*?_([0-9]{1,18})"')

_Numbered = tuple[int, bytes]


def order_lines(lines: Iterable[bytes], name: Path, folder: Path, *, run_bytes: int = RUN_BYTES) -> Iterator[bytes]:
    """Iterate over lines, each with its newline, in the order of the input; all are read before the first is given.

    `folder` takes the runs. Raises UsageError for a line that llmq did not write (`name` is whose it is), OSError from
    the disk.
    """
    runs: list[Iterator[_Numbered]] = []
    held: list[_Numbered] = []
    size = 0
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for place, line in enumerate(lines, 1):
            found = _ID.match(line)
            if found is None or not line.endswith(b"\n"):
                raise UsageError(f"{name}: line {place} was not written by llmq; the file cannot be put in order")
            held.append((int(found[1]), line))
            size += len(line)
            if size >= run_bytes:
                runs.append(_read_run(file, *_write_run(file, held)))
                held, size = [], 0
        held.sort(key=itemgetter(0))
        for _, line in heapq.merge(*runs, held, key=itemgetter(0)):
            yield line


def _write_run(file: IO[bytes], lines: list[_Numbered]) -> tuple[int, int]:
    """Append lines as a run of frames, each behind its length; return where the run begins and ends."""
    lines.sort(key=itemgetter(0))
    compressor = zstandard.ZstdCompressor(level=_LEVEL)
    begin = file.seek(0, os.SEEK_END)
    block: list[bytes] = []
    size = 0
    for place, (_, line) in enumerate(lines, 1):
        block.append(line)
        size += len(line)
        if size >= _FRAME_BYTES or place == len(lines):
            frame = compressor.compress(b"".join(block))
            _write_all(file, len(frame).to_bytes(8, "big") + frame)
            block, size = [], 0
    return begin, file.tell()


def _read_run(file: IO[bytes], begin: int, end: int) -> Iterator[_Numbered]:
    decompressor = zstandard.ZstdDecompressor()
    while begin < end:
        length = int.from_bytes(os.pread(file.fileno(), 8, begin), "big")
        block = decompressor.decompress(os.pread(file.fileno(), length, begin + 8))
        begin += 8 + length
        for line in io.BytesIO(block):
            found = _ID.match(line)
            assert found is not None  # it was matched on its way in
            yield int(found[1]), line


def _write_all(file: IO[bytes], data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
