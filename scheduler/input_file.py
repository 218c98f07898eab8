"""The input file: a file of prompts, or what comes on stdin, as physical lines in constant memory.

It is read twice: the first pass checks all of it before anything is queued, the second queues. What cannot be read
twice (stdin, a pipe) is spooled to a temporary file. Lines end at LF bytes and nowhere else: U+2028, U+2029 and
U+0085 are data, though text-mode line readers would split there. What a line says is for `line_form.py` to judge.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from llmq.scheduler.errors import InputFileError, LLMQError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

#: Longest line of a file that is taken without `--max-line-bytes`.
MAX_LINE_BYTES = 1 << 20

#: Bytes read at once: large enough that a read costs nothing beside the parsing of what it brought.
_BLOCK = 1 << 20

#: Bytes looked at to tell text from binary.
_HEAD = 1 << 16

_BOM = b"\xef\xbb\xbf"

#: What people hand over by mistake, by its first bytes: name, and what to do.
_MAGIC = (
    (b"\x1f\x8b", "gzip data", "unpack it first: gunzip -c FILE | llmq ... -"),
    (b"\x28\xb5\x2f\xfd", "zstd data", "unpack it first: zstd -dc FILE | llmq ... -"),
    (b"PK\x03\x04", "a zip archive", "unpack it first"),
    (b"PAR1", "a Parquet file", "export it as JSON lines first"),
    (b"\xff\xfe", "UTF-16 text", "save it as UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "save it as UTF-8"),
)


class _Closable(Protocol):
    def close(self) -> None: ...


def open_input(
    path: str | os.PathLike[str],
    *,
    max_line_bytes: int = MAX_LINE_BYTES,
    spool_dir: Path | None = None,
    stdin: IO[bytes] | None = None,
) -> InputFile:
    """Open a file of prompts; `-` is stdin (`stdin` stands in for it).

    `spool_dir` takes what cannot be read twice, and the hashes of very large files (None: the system's temporary
    folder). Raises InputFileError: missing, a folder, no permission, empty, binary.
    """
    given = os.fspath(path)
    name = "stdin" if given == "-" else given
    if given == "-":
        stream = stdin or sys.stdin.buffer
        source = _spool(stream, name, spool_dir)
    else:
        source = _open(given)
        if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
            with source as pipe:
                source = _spool(pipe, name, spool_dir)
    try:
        _check_head(name, os.pread(source.fileno(), _HEAD, 0))
    except InputFileError:
        source.close()
        raise
    return InputFile(name, source, max_line_bytes, spool_dir)


class InputFile:
    """An open file of prompts; made by `open_input`, closed as a context manager.

    `name` is what messages call it, `size` its bytes. Passes over it are independent of each other.
    """

    def __init__(self, name: str, source: IO[bytes], max_line_bytes: int, spool_dir: Path | None) -> None:
        self.name = name
        self.max_line_bytes = max_line_bytes
        self.spool_dir = spool_dir
        self._source = source
        self._version = self._read_version()
        self._digest: str | None = None
        self._kept: list[_Closable] = [source]

    def __enter__(self) -> InputFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self._version[0]

    @property
    def digest(self) -> str:
        """SHA-256 of the whole content, in hex; a finished pass has found it, else it is read once for this."""
        if self._digest is None:
            for _ in self.raw_lines():
                pass
        assert self._digest is not None  # a pass that ends without raising has set it
        return self._digest

    def is_same_file(self, path: str | os.PathLike[str]) -> bool:
        """Whether `path` leads to this very file, under whatever name."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._source.fileno()))
        except OSError:
            return False

    def keep(self, resource: _Closable) -> None:
        """Close `resource` together with this file."""
        self._kept.append(resource)

    def close(self) -> None:
        """Close the file, and all that was kept with it."""
        while self._kept:
            self._kept.pop().close()

    def raw_lines(self) -> Iterator[tuple[int, bytes | None, int]]:
        """Iterate over (line number from 1, its bytes, bytes read so far); lines of white space only are left out.

        The bytes are None for a line longer than `max_line_bytes`, which is passed over without being held. Raises
        InputFileError, at the end at the latest, when the file was changed since it was opened.
        """
        passage = _Passage(self._source.fileno(), hashed=self._digest is None)
        longest = self.max_line_bytes + len(b"\r\n")
        with io.BufferedReader(passage, _BLOCK) as reader:
            readline, number, offset = reader.readline, 0, 0
            while raw := readline(longest):
                number += 1
                offset += len(raw)
                if number == 1:
                    raw = raw.removeprefix(_BOM)
                if len(raw) > self.max_line_bytes and _is_cut_or_long(raw, self.max_line_bytes):
                    if not raw.endswith(b"\n"):
                        offset += _pass_over(readline)
                    yield number, None, offset
                elif raw and not raw.isspace():
                    yield number, raw, offset
        if self._read_version() != self._version:
            raise InputFileError(f"{self.name}: was changed while it was read; run the command again on a file at rest")
        if passage.hash is not None:
            self._digest = passage.hash.hexdigest()

    def _read_version(self) -> tuple[int, int]:
        status = os.fstat(self._source.fileno())
        return status.st_size, status.st_mtime_ns


class _Passage(io.RawIOBase):
    """One read through a file from its beginning, with a position of its own; hashes what it reads."""

    def __init__(self, descriptor: int, *, hashed: bool) -> None:
        self._descriptor = descriptor
        self._position = 0
        self.hash = hashlib.sha256() if hashed else None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        count = os.preadv(self._descriptor, [buffer], self._position)
        self._position += count
        if self.hash is not None:
            self.hash.update(memoryview(buffer)[:count])
        return count


def _open(path: str) -> IO[bytes]:
    try:
        source = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by its InputFile)
    except FileNotFoundError:
        raise InputFileError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputFileError(f"{path}: is a folder; name a file of JSON lines") from None
    except PermissionError:
        raise InputFileError(f"{path}: may not be read by this user; see its permissions: ls -l") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise InputFileError(f"{path}: cannot be opened ({error})") from None
    return source


def _spool(source: IO[bytes], name: str, folder: Path | None) -> IO[bytes]:
    try:
        spool = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (closed by its InputFile)
    except OSError as error:
        raise LLMQError(
            f"{folder or tempfile.gettempdir()}: cannot hold a copy of {name} ({error.strerror})"
        ) from error
    try:
        shutil.copyfileobj(source, spool, _BLOCK)
    except OSError as error:
        spool.close()
        raise LLMQError(
            f"{name}: cannot be copied to {folder or tempfile.gettempdir()} ({error.strerror}); "
            "it is read twice, so free some space there or give a file instead"
        ) from error
    return spool


def _check_head(name: str, head: bytes) -> None:
    if not head:
        raise InputFileError(f"{name}: is empty; expected one JSON object a line")
    for magic, kind, advice in _MAGIC:
        if head.startswith(magic):
            raise InputFileError(f"{name}: is {kind}; {advice}")
    if b"\0" in head:
        raise InputFileError(f"{name}: is binary (it holds NUL bytes); expected UTF-8 text, one JSON object a line")
    text = head.decode(errors="replace")
    # A few wrong bytes are the fault of their lines; many mean that the whole is something else.
    if text.count("\N{REPLACEMENT CHARACTER}") * 10 > len(text):
        raise InputFileError(f"{name}: is not UTF-8 text; expected one JSON object a line")


def _is_cut_or_long(raw: bytes, limit: int) -> bool:
    """Whether the line is longer than the limit: more than fits beside a line end was read, or its content is."""
    cut = len(raw) >= limit + len(b"\r\n") and not raw.endswith(b"\n")
    return cut or len(raw.rstrip(b"\r\n")) > limit


def _pass_over(readline: Callable[[int], bytes]) -> int:
    """Read to the end of the line that has begun; return the bytes passed over."""
    passed = 0
    while piece := readline(_BLOCK):
        passed += len(piece)
        if piece.endswith(b"\n"):
            break
    return passed
