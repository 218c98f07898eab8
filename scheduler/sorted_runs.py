"""Sorted runs: a sort of any number of records of one size, in constant memory.

The check for duplicate ids (`duplicates.py`) and `--ordered` output (`ordering.py`) both need more records in order
than memory should hold. Records are gathered, sorted and written to one unlinked temporary file as a run each time
`capacity` of them are held; reading merges the runs. Few records never touch the disk. Records compare as bytes, so
numbers in them are big-endian. It knows nothing of what a record means.
"""

from __future__ import annotations

import heapq
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from llmq.scheduler.errors import LLMQError

#: Records held in memory: about 18 MB at 24 bytes a record.
CAPACITY = 1 << 18

#: Memory for reading all runs at once; 20 million records are 77 runs of 100 KiB each.
MERGE_BYTES = 8 << 20

#: No run is read in smaller pieces than this: a disk has a price for each read.
SMALLEST_READ = 4 << 10


class SortedRuns:
    """Records of `record_size` bytes: `add` them in any order, then iterate over them in order, any number of times.

    `folder` takes the temporary file (None: the system's own); raises LLMQError when the disk there is full.
    """

    def __init__(self, record_size: int, folder: Path | None = None, *, capacity: int = CAPACITY) -> None:
        self._size = record_size
        self._folder = folder
        self._capacity = capacity
        self._held: list[bytes] = []
        self._file: IO[bytes] | None = None
        self._runs: list[tuple[int, int]] = []  # where each run begins and ends in the file
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __enter__(self) -> SortedRuns:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def on_disk(self) -> bool:
        """Whether there were too many records for memory alone."""
        return self._file is not None

    def add(self, record: bytes) -> None:
        """Take one record of the agreed size."""
        self._held.append(record)
        self._count += 1
        if len(self._held) >= self._capacity:
            self._write_run()

    def __iter__(self) -> Iterator[bytes]:
        """Iterate over all records in order; records added meanwhile are not seen."""
        self._held.sort()
        if self._file is None:
            return iter(self._held)
        read_size = max(SMALLEST_READ, MERGE_BYTES // len(self._runs)) // self._size * self._size
        runs = [_read_run(self._file.fileno(), begin, end, read_size, self._size) for begin, end in self._runs]
        return heapq.merge(*runs, self._held)

    def close(self) -> None:
        """Forget all records, and free the disk."""
        self._held.clear()
        self._runs.clear()
        self._count = 0
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write_run(self) -> None:
        self._held.sort()
        run = b"".join(self._held)
        begin = self._runs[-1][1] if self._runs else 0
        try:
            if self._file is None:
                # Unbuffered: a run is one write, and the merge reads by position.
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 (closed by close)
            written = 0
            while written < len(run):
                written += os.pwrite(self._file.fileno(), memoryview(run)[written:], begin + written)
        except OSError as error:
            where = self._folder or tempfile.gettempdir()
            raise LLMQError(
                f"{where}: cannot write a temporary file ({error.strerror}); "
                f"it needs about {2 * (begin + len(run)):,} bytes free there"
            ) from error
        self._runs.append((begin, begin + len(run)))
        self._held = []


def _read_run(descriptor: int, begin: int, end: int, read_size: int, record_size: int) -> Iterator[bytes]:
    while begin < end:
        block = os.pread(descriptor, min(read_size, end - begin), begin)
        whole = len(block) // record_size * record_size
        if not whole:
            raise LLMQError("a temporary file was cut short while it was read; run the command again")
        for at in range(0, whole, record_size):
            yield block[at : at + record_size]
        begin += whole
