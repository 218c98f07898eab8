"""The line set: which lines of a batch have their result in an output, at one bit a line.

Redis may lose its last second (a power cut, a failover): what a worker had ended then waits again, runs again and has
a second result, though the first is in the output already. A collector knows by this set that it has such a line.
"""

from __future__ import annotations

from collections.abc import Iterable


class LineSet:
    """A set of line numbers; ten million of them take 1.2 MiB."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, number: int) -> bool:
        place = number >> 3
        return place < len(self._bits) and bool(self._bits[place] & 1 << (number & 7))

    def add(self, number: int) -> bool:
        """Add a line; return whether it is new."""
        place, bit = number >> 3, 1 << (number & 7)
        if place >= len(self._bits):
            self._bits.extend(bytes(max(place + 1, 2 * len(self._bits)) - len(self._bits)))
        if self._bits[place] & bit:
            return False
        self._bits[place] |= bit
        self._count += 1
        return True

    def add_from(self, lines: Iterable[bytes], batch_id: str) -> None:
        """Add the lines of a batch that are among those of an output (`records.render` begins them with their id)."""
        start = f'{{"id":"batch_req_{batch_id}_'.encode()
        for line in lines:
            digits = line[len(start) : len(start) + 20].partition(b'"')[0]
            if line.startswith(start) and digits.isdigit():
                self.add(int(digits))
