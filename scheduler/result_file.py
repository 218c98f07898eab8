"""The result file: a batch's results in one file, or in parts, valid at any time and continued after a crash.

Lines are appended (`part_series.py`); a sync makes them certain and records, in the sidecar (`sidecar.py`), how long
the file is and where in the result stream its writer stands. Opening decides by what is there (`result_start.py`):

    no file, or an empty one            started
    with a sidecar of this batch        cut to its certain length (a torn line, a torn part goes), continued
    complete, with the same batch       nothing to do: `complete`
    anything else                       refused, unless forced

Putting a file in order makes new parts aside, says so in the sidecar, and then lets them take the places of the old
ones: after a crash before that word the old parts stand, after it the places are taken by whoever opens the file next.

The sidecar of a finished file stays, marked complete: so the same command, given again, knows that there is nothing
to run. Delete OUT to run again; a complete sidecar without its file counts for nothing. A file that another process
writes is refused: the lock is on OUT itself, or its first part (on file systems without locks this goes unnoticed).
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Self

from llmq.scheduler.errors import LLMQError, UsageError
from llmq.scheduler.ordering import order_lines
from llmq.scheduler.part_series import PartSeries, read_parts
from llmq.scheduler.parts import OutputName
from llmq.scheduler.result_start import decide_start
from llmq.scheduler.sidecar import Sidecar, read_sidecar, sync_folder, write_sidecar

#: What file systems without locks say to `flock`.
_NO_LOCKS = frozenset({errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL})


class ResultFile:
    """An output on the disk: whole lines, resumable. Made by `open_output`, closed as a context manager."""

    def __init__(self, name: OutputName, wanted: Sidecar, *, ordered: bool, force: bool) -> None:
        self.name = name
        self._ordered = ordered
        self._series: PartSeries | None = None
        if not force:  # asked once before anything is touched, and once under the lock
            decide_start(name, name.sizes(), read_sidecar(name.path), wanted)
        self._descriptor = os.open(name.part(1), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(self._descriptor, name.part(1))
            found = None if force else read_sidecar(name.path)
            self._state = wanted if force else decide_start(name, name.sizes(), found, wanted)
            if self._state.placing:
                self._place()
            if not self._state.complete:
                self._begin()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def path(self) -> Path:
        """What names the whole output."""
        return self.name.path

    @property
    def parts(self) -> list[Path]:
        """The paths of its parts at the last sync; one, where it is one file."""
        return [self.name.part(number) for number in range(1, len(self._state.sizes) + 1)]

    @property
    def cursor(self) -> str:
        """The collector's place at the last sync, "" at the beginning."""
        return self._state.cursor

    @property
    def complete(self) -> bool:
        """Whether all results of the batch are in the file: there is nothing to run."""
        return self._state.complete

    def lines(self) -> Iterator[bytes]:
        """Iterate over all lines that are certain, each with its newline."""
        return read_parts(self.parts, self.name.codec)

    def append(self, line: bytes) -> None:
        """Take one line, without its newline. Raises LLMQError when the disk is full; the line was not taken then."""
        try:
            self._open_series.append(line)
        except OSError as error:
            raise self._cannot_write(error) from error

    def sync(self, cursor: str) -> int:
        """Make all lines certain, with the collector's place behind them; return the bytes of the file.

        Raises LLMQError when the disk is full: the file then holds whole lines, and sync may be tried again.
        """
        series = self._open_series
        try:
            series.write()
            state = replace(
                self._state, cursor=cursor, length=series.length, lines=series.lines, finished=series.finished
            )
            if state != self._state:
                series.sync()
                self._settle(state)
        except OSError as error:
            raise self._cannot_write(error) from error
        return series.size

    def finish(self, cursor: str) -> None:
        """Sync, put the file in order where that was asked for, and mark it complete."""
        self.sync(cursor)
        series = self._open_series
        try:
            series.finish()
            self._settle(replace(self._state, length=series.length))
            if self._ordered:
                self._settle(replace(self._state, placing=self._order()))
                self._place()
            else:
                self._settle(replace(self._state, complete=True))
        except OSError as error:
            raise self._cannot_write(error) from error

    def close(self) -> None:
        """Let go of the file and its lock. Lines that were not synced are given up: a resumed run gets them again."""
        if self._series is not None:
            self._series.close()
            self._series = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def _open_series(self) -> PartSeries:
        assert self._series is not None, "a complete or closed output takes no lines"
        return self._series

    def _begin(self) -> None:
        """Cut what is there to what is certain."""
        # Sidecar first: if we die in between, the next run cuts the file to what it says.
        write_sidecar(self.path, self._state)
        for number in self.name.sizes():
            if number > len(self._state.sizes):
                self.name.part(number).unlink()
        self._discard_asides()
        state, name = self._state, self.name
        self._series = PartSeries(
            name.part, name.codec, name.limit, finished=state.finished, length=state.length, lines=state.lines
        )

    def _order(self) -> tuple[int, ...]:
        """Make parts in the order of the input, aside; return the bytes of each."""
        name = self.name
        series = PartSeries(name.aside, name.codec, name.limit)
        try:
            for line in order_lines(self.lines(), self.path, self.path.parent):
                series.append(line[:-1])
            series.finish()
        except BaseException:
            series.close()
            self._discard_asides()
            raise
        series.close()
        sizes = (*series.finished, series.length)
        for number in range(1, len(sizes) + 1):
            shutil.copymode(name.part(1), name.aside(number))
        sync_folder(self.path.parent)
        return sizes

    def _place(self) -> None:
        """Let the parts that stand aside take their places, as many as have not, and mark the output complete."""
        placing = self._state.placing
        for number in range(1, len(placing) + 1):
            if self.name.aside(number).exists():
                os.replace(self.name.aside(number), self.name.part(number))
        for number in self.name.sizes():
            if number > len(placing):
                self.name.part(number).unlink()
        sync_folder(self.path.parent)
        if self.name.sizes() != dict(enumerate(placing, 1)):
            raise UsageError(f"{self.path}: was changed while it was put in order; start it again: --force")
        *finished, length = placing
        self._settle(replace(self._state, finished=tuple(finished), length=length, placing=(), complete=True))

    def _discard_asides(self) -> None:
        for aside in self.name.asides():
            aside.unlink()

    def _settle(self, state: Sidecar) -> None:
        write_sidecar(self.path, state)
        self._state = state

    def _cannot_write(self, error: OSError) -> LLMQError:
        held = self._series.size if self._series is not None else sum(self._state.sizes)
        return LLMQError(
            f"{self.path}: cannot be written ({error.strerror}); it holds {held:,} bytes of whole lines. "
            "Make room, then give the same command again: it goes on from there"
        )


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
