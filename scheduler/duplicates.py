"""Duplicate ids: which lines of an input file repeat the `custom_id` of an earlier line.

Results are matched to prompts by `custom_id`, so it must be unique in its file. The first pass over a file adds each
line's id; the second asks, line by line, whether this one is a repetition. Memory stays constant: an id is held as a
128-bit hash, and hashes beyond a number go to disk (`sorted_runs.py`). At 128 bits two different ids of a file of a
billion lines collide with a chance of one in 10^21, so a good file is never refused in practice.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from llmq.scheduler.sorted_runs import CAPACITY, SortedRuns

_HASH_BYTES = 16
_LINE_BYTES = 8


class Duplicates:
    """The ids of a file's lines. `add` all of them, `settle` once, then iterate over the repetitions."""

    def __init__(self, folder: Path | None = None, *, capacity: int = CAPACITY) -> None:
        self._ids = SortedRuns(_HASH_BYTES + _LINE_BYTES, folder, capacity=capacity)
        self._repetitions = SortedRuns(2 * _LINE_BYTES, folder, capacity=capacity)

    def __len__(self) -> int:
        """Count the repetitions; 0 before `settle`."""
        return len(self._repetitions)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Iterate, in the order of the file, over (line, the first line that has its id)."""
        for record in self._repetitions:
            yield int.from_bytes(record[:_LINE_BYTES], "big"), int.from_bytes(record[_LINE_BYTES:], "big")

    def add(self, key: str, line: int) -> None:
        """Take the id of one line."""
        hashed = blake2b(key.encode(), digest_size=_HASH_BYTES).digest()
        self._ids.add(hashed + line.to_bytes(_LINE_BYTES, "big"))

    def settle(self) -> None:
        """Find the repetitions, and free what the ids took."""
        previous, first = b"", b""
        for record in self._ids:  # equal ids stand together, their lines ascending
            hashed, line = record[:_HASH_BYTES], record[_HASH_BYTES:]
            if hashed == previous:
                self._repetitions.add(line + first)
            else:
                previous, first = hashed, line
        self._ids.close()

    def close(self) -> None:
        """Free memory and disk."""
        self._ids.close()
        self._repetitions.close()
