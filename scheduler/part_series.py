"""The part series: lines on their way to the disk, in one file or in one part after the other.

Lines are gathered into blocks; a block is packed by itself (a whole gzip member or zstd frame, or as it is) and written
at once. So the end of every write is a place at which the file is valid, and to which it can be cut back. A full disk
leaves whole blocks and keeps the lines. When a part is followed by the next one is decided here; which file belongs to
which batch is not.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from llmq.scheduler.compression import Codec, DamagedData, Decompressed, compress
from llmq.scheduler.errors import UsageError
from llmq.scheduler.parts import PartLimit

#: Lines are written in blocks of about this size. Packed by itself, such a block of JSON is some percent larger than
#: in a file that is packed as one.
_BLOCK = 1 << 18

_READ = 1 << 20

#: Finished parts that wait for the next sync: files that are open.
_MOST_UNSYNCED = 32


class PartSeries:
    """Appends to the part behind those that are `finished` (bytes of each), at byte `length` and line `lines` of it.

    What stands in that part behind `length` is cut away. Errors of the disk are raised as OSError.
    """

    def __init__(
        self,
        path_of: Callable[[int], Path],
        codec: Codec,
        limit: PartLimit | None,
        *,
        finished: Iterable[int] = (),
        length: int = 0,
        lines: int = 0,
    ) -> None:
        self.finished = tuple(finished)
        self.length = length
        self.lines = lines
        self._path_of = path_of
        self._codec = codec
        self._limit = limit or PartLimit(None, None)
        self._taken: list[bytes] = []  # not yet written
        self._taken_bytes = 0
        self._block = min(_BLOCK, self._limit.bytes or _BLOCK)
        self._unsynced: list[int] = []  # descriptors of parts that were finished since the last sync
        self._descriptor = self._open()
        os.ftruncate(self._descriptor, length)

    @property
    def size(self) -> int:
        """The bytes of all parts."""
        return sum(self.finished) + self.length

    def append(self, line: bytes) -> None:
        """Take one line, without its newline; a line whose append raised was not taken."""
        if self._taken_bytes >= self._block or self._has_lines():
            self.write()
        self._taken.append(line)
        self._taken_bytes += len(line) + 1

    def write(self) -> None:
        """Write all lines that were taken; if it raises, none of them is in the file, and it may be called again."""
        if not self._taken:
            return
        if self._is_full():
            self._begin_next()
        block = memoryview(compress(b"".join(part for line in self._taken for part in (line, b"\n")), self._codec))
        self._put(block)
        self.lines += len(self._taken)
        self._taken.clear()
        self._taken_bytes = 0

    def sync(self) -> None:
        """Make what was written survive a crash of this host."""
        self._sync_finished()
        os.fsync(self._descriptor)

    def finish(self) -> None:
        """Write and sync; a packed part without lines becomes the empty file of its kind, which no bytes are not."""
        self.write()
        if not self.length:
            self._put(memoryview(compress(b"", self._codec)))
        self.sync()

    def close(self) -> None:
        """Let go of the files; lines that were not written are given up."""
        for descriptor in (*self._unsynced, self._descriptor):
            os.close(descriptor)
        self._unsynced.clear()

    def _sync_finished(self) -> None:
        while self._unsynced:
            os.fsync(self._unsynced[-1])
            os.close(self._unsynced.pop())

    def _has_lines(self) -> bool:
        """Whether the lines that are taken fill a part."""
        if self._limit.lines is None:
            return False
        return (0 if self._is_full() else self.lines) + len(self._taken) >= self._limit.lines

    def _is_full(self) -> bool:
        full_of_lines = self._limit.lines is not None and self.lines >= self._limit.lines
        return full_of_lines or (self._limit.bytes is not None and self.length >= self._limit.bytes)

    def _begin_next(self) -> None:
        finished = self.finished
        self.finished = (*finished, self.length)
        try:
            following = self._open()
        except OSError:
            self.finished = finished
            raise
        os.ftruncate(following, 0)
        self._unsynced.append(self._descriptor)
        if len(self._unsynced) >= _MOST_UNSYNCED:
            self._sync_finished()
        self._descriptor, self.length, self.lines = following, 0, 0

    def _open(self) -> int:
        return os.open(self._path_of(len(self.finished) + 1), os.O_RDWR | os.O_CREAT, 0o666)

    def _put(self, block: memoryview) -> None:
        written = 0
        try:
            while written < len(block):
                written += os.pwrite(self._descriptor, block[written:], self.length + written)
        except OSError:
            with suppress(OSError):  # whole blocks only; if even this fails, the next start cuts the file
                os.ftruncate(self._descriptor, self.length)
            raise
        self.length += len(block)


def read_parts(paths: Iterable[Path], codec: Codec) -> Iterator[bytes]:
    """Iterate over the lines of parts, each with its newline. Raises UsageError for a damaged one."""
    for path in paths:
        with io.BufferedReader(io.FileIO(path), _READ) as file:
            reader = file if codec is Codec.PLAIN else io.BufferedReader(Decompressed(file, codec), _READ)
            try:
                yield from reader
            except DamagedData as damage:
                raise UsageError(f"{path}: {damage}; was it changed since llmq wrote it?") from None
