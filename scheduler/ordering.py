"""Ordering: a finished output file put into the order of its input, for `--ordered`.

Results arrive in the order of completion. Each output line names its input line in its id
(`batch_req_<batch>_<line>`), so the file is read once for an index of (line, offset, length), the index is sorted
(on disk if it is large: `sorted_runs.py`), and the lines are copied in that order to a new file that takes the old
one's place in one rename. Memory stays constant but for the longest line.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

from llmq.scheduler.errors import UsageError
from llmq.scheduler.sidecar import sync_folder
from llmq.scheduler.sorted_runs import CAPACITY, SortedRuns

#: Line number, offset, length. Big-endian: the records sort as bytes.
_INDEX = struct.Struct(">QQQ")

#: How `records.render` begins every line.
_ID = re.compile(rb'\{"id":"batch_req_[^"]*?_([0-9]{1,18})"')

_COPY_BUFFER = 1 << 20


def order_file(path: Path, *, spool_dir: Path | None = None, capacity: int = CAPACITY) -> None:
    """Put the lines of an output file of llmq into the order of the input; the old file stands until the new is done.

    `spool_dir` takes a large index (None: the folder of the file, which has to have room for a copy anyway).
    `capacity` is how many index entries memory holds. Raises UsageError for a line that llmq did not write, OSError
    from the disk.
    """
    aside = path.with_name(f"{path.name}.llmq-ordered")
    try:
        with open(path, "rb") as source, SortedRuns(_INDEX.size, spool_dir or path.parent, capacity=capacity) as index:
            for entry in _index(source, path):
                index.add(entry)
            with open(aside, "wb", buffering=_COPY_BUFFER) as target:
                for entry in index:
                    _, offset, length = _INDEX.unpack(entry)
                    target.write(os.pread(source.fileno(), length, offset))
                target.flush()
                os.fsync(target.fileno())
        shutil.copymode(path, aside)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _index(source: Iterator[bytes], path: Path) -> Iterator[bytes]:
    offset = 0
    for number, line in enumerate(source, 1):
        found = _ID.match(line)
        if found is None or not line.endswith(b"\n"):
            raise UsageError(f"{path}: line {number} was not written by llmq; the file cannot be put in order")
        yield _INDEX.pack(int(found[1]), offset, len(line))
        offset += len(line)
