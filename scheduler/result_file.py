"""The result file: a batch's results in a file that is whole lines at any time and is continued after a crash.

Lines are appended; a sync makes them certain and records, in the sidecar (`sidecar.py`), how long the file is and
where in the result stream its writer stands. Opening decides by what is there:

    no file, or an empty one            started
    with a sidecar of this batch        cut to its certain length (a torn line goes), continued at its cursor
    complete, with the same batch       nothing to do: `complete`
    anything else                       refused, unless forced

The sidecar of a finished file stays, marked complete: so the same command, given again, knows that there is nothing
to run. Delete OUT to run again; a complete sidecar without its file counts for nothing. A file that another process
writes is refused: the lock is on OUT itself (on file systems without locks this goes unnoticed).
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Self

from llmq.scheduler.errors import LLMQError, UsageError
from llmq.scheduler.ordering import order_file
from llmq.scheduler.sidecar import Sidecar, read_sidecar, write_sidecar

#: Lines are written in blocks of about this size.
_BLOCK = 1 << 18

#: What file systems without locks say to `flock`.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL})


class ResultFile:
    """An output file: whole lines, resumable. Made by `open_output`, closed as a context manager."""

    def __init__(self, path: Path, wanted: Sidecar, *, ordered: bool, force: bool) -> None:
        self.path = path
        self._ordered = ordered
        self._lines: list[bytes] = []  # taken, not yet written
        self._waiting = 0  # bytes in _lines
        if not force:  # asked once before anything is touched, and once under the lock
            decide_start(path, path.stat().st_size if path.exists() else 0, read_sidecar(path), wanted)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(self._descriptor, path)
            size = os.fstat(self._descriptor).st_size
            self._state = wanted if force else decide_start(path, size, read_sidecar(path), wanted)
            self._length = self._state.length
            if not self._state.complete:
                # Sidecar first: if we die in between, the next run cuts the file to what it says.
                write_sidecar(path, self._state)
                os.ftruncate(self._descriptor, self._length)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def cursor(self) -> str:
        """The collector's place at the last sync, "" at the beginning."""
        return self._state.cursor

    @property
    def complete(self) -> bool:
        """Whether all results of the batch are in the file: there is nothing to run."""
        return self._state.complete

    def append(self, line: bytes) -> None:
        """Take one line, without its newline. Raises LLMQError when the disk is full; the line was not taken then."""
        if self._waiting >= _BLOCK:
            self._write()
        self._lines.append(line)
        self._waiting += len(line) + 1

    def sync(self, cursor: str) -> int:
        """Make all lines certain, with the collector's place behind them; return the bytes of the file.

        Raises LLMQError when the disk is full: the file then holds whole lines, and sync may be tried again.
        """
        self._write()
        if (cursor, self._length) != (self._state.cursor, self._state.length):
            self._settle(replace(self._state, cursor=cursor, length=self._length))
        return self._length

    def finish(self, cursor: str) -> None:
        """Sync, put the file in order where that was asked for, and mark it complete."""
        self.sync(cursor)
        if self._ordered:
            try:
                order_file(self.path)
            except OSError as error:
                raise self._cannot_write(error) from error
        self._settle(replace(self._state, complete=True))

    def close(self) -> None:
        """Let go of the file and its lock. Lines that were not synced are given up: a resumed run gets them again."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self) -> None:
        block = memoryview(b"".join(part for line in self._lines for part in (line, b"\n")))
        written = 0
        try:
            while written < len(block):
                written += os.pwrite(self._descriptor, block[written:], self._length + written)
        except OSError as error:
            with suppress(OSError):  # whole lines only; if even this fails, the next start cuts the file
                os.ftruncate(self._descriptor, self._length)
            raise self._cannot_write(error) from error
        self._length += len(block)
        self._lines.clear()
        self._waiting = 0

    def _settle(self, state: Sidecar) -> None:
        try:
            os.fsync(self._descriptor)
            write_sidecar(self.path, state)
        except OSError as error:
            raise self._cannot_write(error) from error
        self._state = state

    def _cannot_write(self, error: OSError) -> LLMQError:
        return LLMQError(
            f"{self.path}: cannot be written ({error.strerror}); it holds {self._length:,} bytes of whole lines. "
            "Make room, then give the same command again: it goes on from there"
        )


def decide_start(path: Path, size: int, found: Sidecar | None, wanted: Sidecar) -> Sidecar:
    """Decide from where to write an output file of `size` bytes, given its sidecar; raises UsageError to refuse."""
    name = path.name
    ours = found is not None and found.batch_id == wanted.batch_id
    if size == 0 and (found is None or not ours or found.complete):
        return wanted
    if found is None:
        raise UsageError(f"{path}: exists; name another file, or overwrite it: --force")
    if not ours:
        raise UsageError(
            f"{path}: exists and holds results of batch {found.batch_id}; name another file, or overwrite it: --force"
        )
    if size < found.length:
        raise UsageError(
            f"{path}: has {size:,} bytes, but {found.length:,} were written; it was cut since, so {name} cannot be "
            "continued. Name another file, or start it again: --force"
        )
    if found.complete and size > found.length:
        raise UsageError(f"{path}: was changed since it was complete; name another file, or overwrite it: --force")
    return found


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"{path}: another process is writing it; wait for that one, or name another file") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    if not path.exists() or not os.path.samestat(os.fstat(descriptor), path.stat()):
        raise UsageError(f"{path}: was replaced by another process just now; give the command again")
