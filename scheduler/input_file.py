"""The input file: a file of prompts, or what comes on stdin, as physical lines in constant memory.

It is read twice: the first pass checks all of it before anything is queued, the second queues. What cannot be read
twice (stdin, a pipe) is spooled to a temporary file. Lines end at LF bytes and nowhere else: U+2028, U+2029 and
U+0085 are data, though text-mode line readers would split there. What a line says is for `line_form.py` to judge.

gzip and zstd data is known by its first bytes, not by its name, and unpacked on the way (`compression.py`), once for
each pass. The digest is that of the plain content: however a file is packed, the same lines are the same file.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from llmq.scheduler.compression import Codec, DamagedData, Decompressed, codec_of_content
from llmq.scheduler.errors import InputFileError
from llmq.scheduler.input_head import check_head
from llmq.scheduler.input_source import open_source, spool

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

#: Longest line of a file that is taken without `--max-line-bytes`.
MAX_LINE_BYTES = 1 << 20

#: Bytes read at once: large enough that a read costs nothing beside the parsing of what it brought.
_BLOCK = 1 << 20

#: Bytes looked at to tell text from binary.
_HEAD = 1 << 16

_BOM = b"\xef\xbb\xbf"

#: Bytes that a packed file may unpack to without one line that can be looked at. Memory is constant whatever comes;
#: this ends what was made to unpack for ever.
_MOST_BARREN = 1 << 30


class _Closable(Protocol):
    def close(self) -> None: ...


class _Hash(Protocol):
    def update(self, data: memoryview, /) -> None: ...


def open_input(
    path: str | os.PathLike[str],
    *,
    max_line_bytes: int = MAX_LINE_BYTES,
    spool_dir: Path | None = None,
    stdin: IO[bytes] | None = None,
) -> InputFile:
    """Open a file of prompts; `-` is stdin (`stdin` stands in for it).

    `spool_dir` takes what cannot be read twice, and the hashes of very large files (None: the system's temporary
    folder). gzip and zstd data is unpacked. Raises InputFileError: missing, a folder, no permission, empty, binary.
    """
    given = os.fspath(path)
    name = "stdin" if given == "-" else given
    if given == "-":
        stream = stdin or sys.stdin.buffer
        source = spool(stream, name, spool_dir)
    else:
        source = open_source(given)
        if not stat.S_ISREG(os.fstat(source.fileno()).st_mode):
            with source as pipe:
                source = spool(pipe, name, spool_dir)
    file = InputFile(name, source, max_line_bytes, spool_dir)
    try:
        check_head(name, file.head())
    except InputFileError:
        file.close()
        raise
    return file


class InputFile:
    """An open file of prompts; made by `open_input`, closed as a context manager.

    `name` is what messages call it, `codec` how it is packed. Passes over it are independent of each other.
    """

    def __init__(self, name: str, source: IO[bytes], max_line_bytes: int, spool_dir: Path | None) -> None:
        self.name = name
        self.max_line_bytes = max_line_bytes
        self.spool_dir = spool_dir
        self.codec = codec_of_content(os.pread(source.fileno(), 4, 0))
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
        """Bytes of the file as it stands on the disk."""
        return self._version[0]

    @property
    def digest(self) -> str:
        """SHA-256 of the plain content, in hex; a finished pass has found it, else it is read once for this."""
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

    def head(self) -> bytes:
        """Return the beginning of the plain content. Raises InputFileError where it cannot be unpacked."""
        with self._plain(_Passage(self._source.fileno()), hashing=None) as reader:
            try:
                return reader.read1(_HEAD)
            except DamagedData as damage:
                raise self._damaged(damage, 0) from None

    def raw_lines(self) -> Iterator[tuple[int, bytes | None, int]]:
        """Iterate over (line number from 1, its bytes, bytes of the file so far); those of white space are left out.

        The bytes are None for a line longer than `max_line_bytes`, which is passed over without being held. Raises
        InputFileError, at the end at the latest, when the file was changed since it was opened, or is damaged.
        """
        passage = _Passage(self._source.fileno())
        hashing = hashlib.sha256() if self._digest is None else None
        barren = _Barren(self)
        longest = self.max_line_bytes + len(b"\r\n")
        packed, number, offset = self.codec is not Codec.PLAIN, 0, 0
        with self._plain(passage, hashing) as reader:
            readline = reader.readline
            try:
                while raw := readline(longest):
                    number += 1
                    offset += len(raw)
                    if number == 1:
                        raw = raw.removeprefix(_BOM)
                    if len(raw) > self.max_line_bytes and _is_cut_or_long(raw, self.max_line_bytes):
                        barren.add(len(raw))
                        if not raw.endswith(b"\n"):
                            offset += _pass_over(readline, barren)
                        yield number, None, passage.position if packed else offset
                    elif raw and not raw.isspace():
                        barren.bytes = 0
                        yield number, raw, passage.position if packed else offset
                    else:
                        barren.add(len(raw))
            except DamagedData as damage:
                raise self._damaged(damage, number) from None
        if self._read_version() != self._version:
            raise InputFileError(f"{self.name}: was changed while it was read; run the command again on a file at rest")
        if hashing is not None:
            self._digest = hashing.hexdigest()

    def _plain(self, passage: _Passage, hashing: _Hash | None) -> io.BufferedReader:
        """Return a reader of the plain content along a passage; `hashing` is fed with all that is read."""
        raw: io.RawIOBase = passage
        if self.codec is not Codec.PLAIN:
            raw = Decompressed(io.BufferedReader(passage, _BLOCK), self.codec)
        return io.BufferedReader(raw if hashing is None else _Hashed(raw, hashing), _BLOCK)

    def _damaged(self, damage: DamagedData, lines: int) -> InputFileError:
        return InputFileError(
            f"{self.name}: {damage}, after {lines:,} {'line' if lines == 1 else 'lines'}; nothing was queued. "
            "Make the file again, or get it again from where it came"
        )

    def _read_version(self) -> tuple[int, int]:
        status = os.fstat(self._source.fileno())
        return status.st_size, status.st_mtime_ns


class _Passage(io.RawIOBase):
    """One read through a file from its beginning, with a position of its own."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        count = os.preadv(self._descriptor, [buffer], self.position)
        self.position += count
        return count


class _Hashed(io.RawIOBase):
    """Hashes what is read through it."""

    def __init__(self, source: io.RawIOBase, hashing: _Hash) -> None:
        self._source = source
        self._hashing = hashing

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        count = self._source.readinto(buffer) or 0
        self._hashing.update(memoryview(buffer)[:count])
        return count


class _Barren:
    """Counts bytes since the last line that could be looked at, and ends what goes on without one (packed files)."""

    def __init__(self, file: InputFile) -> None:
        self.bytes = 0
        self._file = file

    def add(self, count: int) -> None:
        """Count bytes of no use. Raises InputFileError when there are too many."""
        self.bytes += count
        if self.bytes > _MOST_BARREN and self._file.codec is not Codec.PLAIN:
            raise InputFileError(
                f"{self._file.name}: unpacks to more than {_MOST_BARREN:,} bytes without a line that could be used; "
                f"expected one JSON object a line, of at most {self._file.max_line_bytes:,} bytes (--max-line-bytes N)"
            )


def _is_cut_or_long(raw: bytes, limit: int) -> bool:
    """Whether the line is longer than the limit: more than fits beside a line end was read, or its content is."""
    cut = len(raw) >= limit + len(b"\r\n") and not raw.endswith(b"\n")
    return cut or len(raw.rstrip(b"\r\n")) > limit


def _pass_over(readline: Callable[[int], bytes], barren: _Barren) -> int:
    """Read to the end of the line that has begun; return the bytes passed over."""
    passed = 0
    while piece := readline(_BLOCK):
        passed += len(piece)
        barren.add(len(piece))
        if piece.endswith(b"\n"):
            break
    return passed
