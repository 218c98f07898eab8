"""The upload: a multipart body on its way from the socket into the storage, never held as a whole.

Limits hold while it streams. What breaks off or is not as it should be leaves nothing behind: the spool that it goes to
becomes an object only by `commit`. The name that a client gives its file is text to be shown, and no path of ours.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from llmq.gateway.batch.storage import AsyncSpool
from llmq.gateway.errors import ApiError
from llmq.scheduler.units import format_size

#: Fields beside the file, and bytes of one: purpose and expiry need a few dozen.
_MOST_FIELDS, _FIELD_BYTES = 16, 4096

#: Bytes of the headers of one part.
_HEADER_BYTES = 16 * 1024

#: What a body may have around its file.
OVERHEAD = 64 * 1024

#: Characters of a file's name that are kept.
_NAME_CHARACTERS = 255


@dataclass(frozen=True, slots=True)
class Upload:
    """What was uploaded; the file's bytes are in the spool."""

    filename: str
    fields: Mapping[str, str]


@dataclass(slots=True)
class _Part:
    """The part that is being read."""

    headers: dict[str, bytes] = field(default_factory=dict)
    header_bytes: int = 0
    header: tuple[bytearray, bytearray] = field(default_factory=lambda: (bytearray(), bytearray()))
    name: str = ""
    filename: str | None = None
    value: bytearray = field(default_factory=bytearray)


async def receive_upload(
    headers: Mapping[str, str], chunks: AsyncIterator[bytes], spool: AsyncSpool, file_bytes: int
) -> Upload:
    """Read a multipart body; its part `file` goes to the spool. Raises ApiError (400, 413, 415)."""
    length = headers.get("content-length", "")
    if length.isdigit() and int(length) > file_bytes + OVERHEAD:
        raise _too_large(file_bytes)
    receiver = _Receiver(_boundary(headers.get("content-type", "")), spool, file_bytes)
    async for chunk in chunks:
        receiver.feed(chunk)
        for data in receiver.taken():
            await spool.write(data)
    return receiver.finish()


class _Receiver:
    """Turns the parser's calls into fields and pieces of the file."""

    def __init__(self, boundary: bytes, spool: AsyncSpool, file_bytes: int) -> None:
        self._spool = spool
        self._file_bytes = file_bytes
        self._fields: dict[str, str] = {}
        self._filename: str | None = None
        self._pieces: list[bytes] = []
        self._size = 0
        self._part = _Part()
        self._ended = False
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_end,
                "on_part_data": self._data,
                "on_part_end": self._end,
                "on_end": self._all,
            },
        )

    def feed(self, chunk: bytes) -> None:
        """Take a piece of the body."""
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise ApiError(400, f"The body is not valid multipart/form-data: {error}") from None

    def taken(self) -> list[bytes]:
        """Return the pieces of the file that came since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> Upload:
        """Return what was uploaded. Raises ApiError where the body broke off or has no file."""
        if not self._ended:
            raise ApiError(400, "The body broke off: expected multipart/form-data up to its last boundary.")
        if self._filename is None:
            raise ApiError(400, "Missing required parameter: 'file'.", param="file", code="missing_required_parameter")
        return Upload(self._filename, self._fields)

    def _begin(self) -> None:
        self._part = _Part()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._extend_header(0, data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._extend_header(1, data[start:end])

    def _extend_header(self, which: int, data: bytes) -> None:
        self._part.header_bytes += len(data)
        if self._part.header_bytes > _HEADER_BYTES:
            raise ApiError(400, f"The body has a part with more than {_HEADER_BYTES:,} bytes of headers.")
        self._part.header[which].extend(data)

    def _header_end(self) -> None:
        name, value = self._part.header
        self._part.headers[name.decode("latin-1").lower()] = bytes(value)
        self._part.header = (bytearray(), bytearray())

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._part.headers.get("content-disposition", b""))
        self._part.name = options.get(b"name", b"").decode(errors="replace")
        if self._part.name != "file":
            if len(self._fields) == _MOST_FIELDS:
                raise ApiError(400, f"The body has more than {_MOST_FIELDS} fields.")
            return
        if self._filename is not None:
            raise ApiError(400, "The body has two parts that are called 'file'; expected one.", param="file")
        self._filename = self._part.filename = clean_name(options.get(b"filename", b"").decode(errors="replace"))

    def _data(self, data: bytes, start: int, end: int) -> None:
        piece = data[start:end]
        if self._part.filename is not None:
            self._size += len(piece)
            if self._size > self._file_bytes:
                raise _too_large(self._file_bytes)
            self._pieces.append(piece)
            return
        self._part.value += piece
        if len(self._part.value) > _FIELD_BYTES:
            name = self._part.name[:80]
            raise ApiError(400, f"{name!r}: expected at most {_FIELD_BYTES} bytes in this field.", param=name)

    def _end(self) -> None:
        if self._part.filename is None:
            self._fields[self._part.name] = self._part.value.decode(errors="replace")

    def _all(self) -> None:
        self._ended = True


def clean_name(name: str) -> str:
    """Return a file's name as it is shown: what stands behind the last slash, without control characters."""
    last = re.split(r"[/\\]", name)[-1]
    return re.sub(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e]", "", last)[:_NAME_CHARACTERS] or "file"


def _boundary(content_type: str) -> bytes:
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        got = kind.decode(errors="replace")[:80] or "none"
        raise ApiError(415, f"Expected the content type multipart/form-data, got {got}.")
    boundary = options.get(b"boundary", b"")
    if not 1 <= len(boundary) <= 256:
        raise ApiError(400, "The content type multipart/form-data names no boundary, or too long a one.")
    return boundary


def _too_large(limit: int) -> ApiError:
    return ApiError(
        413, f"The file is larger than the {format_size(limit)} allowed.", param="file", code="file_too_large"
    )
