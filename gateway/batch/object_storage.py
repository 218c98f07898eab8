"""The storage in an object store, by fsspec: `s3://`, `gs://`, `az://`, and whatever else it has a driver for.

Nothing is appended and nothing renamed: an object is put as a whole, from a temporary file of this host, so that
nothing is left there of an upload that breaks off.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import IO, Any, cast

import fsspec

from llmq.scheduler.errors import UsageError
from llmq.scheduler.input_file import InputFile, open_input

_BLOCK = 1 << 20


class ObjectBackend:
    """A folder of an object store; `url` names both."""

    def __init__(self, url: str) -> None:
        self.name = url
        try:
            self._fs, self._root = cast(tuple[Any, str], fsspec.url_to_fs(url))
        except (ValueError, ImportError) as error:
            raise UsageError(
                f"files and batches cannot be kept in {url}: {error}; "
                "expected a folder, or a URL whose fsspec driver is installed (s3://: pip install s3fs)"
            ) from error

    def read(self, path: str) -> bytes:
        """Return an object."""
        return bytes(self._fs.cat_file(self._at(path)))

    def write(self, path: str, data: bytes) -> None:
        """Put an object."""
        at = self._at(path)
        self._fs.makedirs(self._fs._parent(at), exist_ok=True)  # object stores have no folders, and do nothing
        self._fs.pipe_file(at, data)

    def names(self, folder: str) -> list[str]:
        """Return the names that begin with a folder's; drivers may cache lists, which must not be."""
        at = self._at(folder)
        self._fs.invalidate_cache(at)
        try:
            found = self._fs.ls(at, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = {path.rstrip("/").rpartition("/")[2] for path in found if path.rstrip("/") != at.rstrip("/")}
        return list(names)

    def remove(self, path: str) -> None:
        """Remove an object."""
        try:
            self._fs.rm_file(self._at(path))
        except FileNotFoundError:
            pass

    def remove_folder(self, path: str) -> None:
        """Remove all objects of a folder."""
        at = self._at(path)
        self._fs.invalidate_cache(at)
        try:
            self._fs.rm(at, recursive=True)
        except FileNotFoundError:
            pass

    def open(self, path: str) -> IO[bytes]:
        """Open an object; blocks are read ahead by the driver."""
        return cast(IO[bytes], self._fs.open(self._at(path), "rb"))

    def open_input(self, path: str, name: str, max_line_bytes: int) -> InputFile:
        """Copy an object to this host, where it can be read twice; the copy loses its name at once."""
        with tempfile.NamedTemporaryFile() as copy:
            with self.open(path) as source:
                shutil.copyfileobj(source, copy, _BLOCK)
            copy.flush()
            file = open_input(Path(copy.name), max_line_bytes=max_line_bytes)
        file.name = name
        return file

    def spool(self) -> _ObjectSpool:
        """Begin an object."""
        return _ObjectSpool(self._fs, self._at)

    def tidy(self) -> None:
        """Do nothing: nothing is ever left."""

    def _at(self, path: str) -> str:
        return f"{self._root.rstrip('/')}/{path}"


class _ObjectSpool:
    """An object that is gathered in a temporary file."""

    def __init__(self, fs: Any, at: Any) -> None:
        self._fs = fs
        self._at = at
        self._file = tempfile.NamedTemporaryFile()  # noqa: SIM115 (closed by discard)

    def write(self, data: bytes) -> None:
        """Append bytes."""
        self._file.write(data)

    def commit(self, path: str) -> None:
        """Put the whole."""
        self._file.flush()
        at = self._at(path)
        self._fs.makedirs(self._fs._parent(at), exist_ok=True)
        self._fs.put_file(self._file.name, at)

    def discard(self) -> None:
        """Remove the temporary file."""
        self._file.close()
