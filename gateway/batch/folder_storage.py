"""The storage in a folder: a disk of this host, or a file system that all hosts mount.

Objects are written aside, synced and renamed, so that no reader ever sees half of one. What is written aside stands in
a folder of its own, where the next tidy finds what a killed process has left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from llmq.scheduler.input_file import InputFile, open_input
from llmq.scheduler.sidecar import sync_folder

_ASIDE = "aside"

#: Seconds without a write after which what is aside belongs to nobody: no upload rests so long.
_ABANDONED_S = 3600.0


class FolderBackend:
    """A folder; it is made with its first object, readable by this user only."""

    def __init__(self, root: Path) -> None:
        self.name = str(root)
        self._root = root

    def read(self, path: str) -> bytes:
        """Return a file."""
        with _missing_folders():
            return (self._root / path).read_bytes()

    def write(self, path: str, data: bytes) -> None:
        """Write a file aside and put it into its place."""
        spool = self.spool()
        try:
            spool.write(data)
            spool.commit(path)
        finally:
            spool.discard()

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder."""
        try:
            return os.listdir(self._root / folder)
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove(self, path: str) -> None:
        """Remove a file."""
        (self._root / path).unlink(missing_ok=True)

    def remove_folder(self, path: str) -> None:
        """Remove a folder."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._root / path)

    def open(self, path: str) -> IO[bytes]:
        """Open a file."""
        with _missing_folders():
            return open(self._root / path, "rb")

    def open_input(self, path: str, name: str, max_line_bytes: int) -> InputFile:
        """Open a file of requests where it stands."""
        where = self._root / path
        with _missing_folders():
            os.stat(where)  # `open_input` has a message for a missing file, but this is our own
        file = open_input(where, max_line_bytes=max_line_bytes)
        file.name = name
        return file

    def spool(self) -> _FolderSpool:
        """Begin a file."""
        aside = self._root / _ASIDE
        aside.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _FolderSpool(self._root, aside)

    def tidy(self) -> None:
        """Remove what has lain aside for an hour."""
        for name in self.names(_ASIDE):
            path = self._root / _ASIDE / name
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < time.time() - _ABANDONED_S:
                    path.unlink()


class _FolderSpool:
    """A file that is written aside."""

    def __init__(self, root: Path, aside: Path) -> None:
        self._root = root
        descriptor, name = tempfile.mkstemp(dir=aside)
        self._file = open(descriptor, "wb", buffering=0)  # noqa: SIM115 (closed by discard)
        self._path: Path | None = Path(name)

    def write(self, data: bytes) -> None:
        """Append bytes."""
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def commit(self, path: str) -> None:
        """Sync the file and rename it to its place."""
        assert self._path is not None
        target = self._root / path
        os.fsync(self._file.fileno())
        for _ in range(3):  # the folder may be removed, empty, in the moment before the rename
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._path, target)
                break
        else:
            raise OSError(f"{target.parent} is removed again and again")
        self._path = None
        sync_folder(target.parent)

    def discard(self) -> None:
        """Close the file, and remove it where it was not committed."""
        self._file.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None


@contextlib.contextmanager
def _missing_folders() -> Iterator[None]:
    """Let a path through what is no folder be a missing file, as in an object store."""
    try:
        yield
    except NotADirectoryError as error:
        raise FileNotFoundError(*error.args) from None
