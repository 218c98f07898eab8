"""Compression: gzip and zstd, as files of prompts come in and as files of results go out.

Reading is a stream: `Decompressed` turns one into plain bytes, through all members of a gzip file and all frames of a
zstd file, and says so where the data is damaged or cut short. Its memory does not depend on the data: zlib is told how
much to give, and zstd is fed in pieces so small that no piece can grow beyond 16 MiB (32,768 times its size).

Writing makes whole members: `compress` returns a block as one gzip member or zstd frame, and blocks behind each other
are one valid file. So a file of results ends at such a boundary at any time, and can be cut back to one. Nothing here
knows what the bytes mean.
"""

from __future__ import annotations

import io
import zlib
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import zstandard

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class Codec(StrEnum):
    """How the bytes of a file are packed."""

    PLAIN = "plain"
    GZIP = "gzip"
    ZSTD = "zstd"


#: By the end of a file's name.
SUFFIXES = {".gz": Codec.GZIP, ".zst": Codec.ZSTD}

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

#: A frame to be passed over, with which some zstd files begin (pzstd, seekable zstd): sixteen magics, by their end.
_SKIPPABLE_MAGIC = b"\x2a\x4d\x18"

#: Bytes given to a decoder at once. One piece of a zstd frame may become 32,768 times as much.
_GZIP_PIECE = 1 << 16
_ZSTD_PIECE = 1 << 9

#: The most that zlib gives at once.
_MOST_DECODED = 1 << 20

#: What `zstd -d` takes without being asked, and every level of `zstd` below `--long=28` makes.
_MOST_WINDOW = 1 << 27

#: zlib beyond 5 takes half as much time again for 1 % of JSON; zstd at 3 is its own default.
_GZIP_LEVEL, _ZSTD_LEVEL = 5, 3

#: Window bits for zlib that mean: with gzip's header and checksum.
_GZIP_FORMAT = 31


class DamagedData(Exception):
    """Compressed data is damaged or cut short; the message says how, without a name."""


def codec_of_content(head: bytes) -> Codec:
    """Tell by the first bytes of a file how it is packed; what is not known here is plain."""
    if head.startswith(_GZIP_MAGIC):
        return Codec.GZIP
    if head.startswith(_ZSTD_MAGIC) or (head[1:4] == _SKIPPABLE_MAGIC and head[0] & 0xF0 == 0x50):
        return Codec.ZSTD
    return Codec.PLAIN


def codec_of_name(name: str) -> Codec:
    """Tell by the name of a file how it is to be packed."""
    return next((codec for suffix, codec in SUFFIXES.items() if name.endswith(suffix)), Codec.PLAIN)


def without_suffix(name: str) -> str:
    """Return the name that a file has when it is unpacked."""
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def compress(block: bytes, codec: Codec) -> bytes:
    """Return a block as a whole member or frame, with a checksum of its content; a plain one as it is."""
    match codec:
        case Codec.GZIP:
            return zlib.compress(block, _GZIP_LEVEL, wbits=_GZIP_FORMAT)
        case Codec.ZSTD:
            return zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True).compress(block)
        case Codec.PLAIN:
            return block


class Decompressed(io.RawIOBase):
    """The plain content of a compressed stream (which must be buffered); reading raises DamagedData."""

    def __init__(self, source: io.BufferedIOBase, codec: Codec) -> None:
        self._source = source
        self._codec = codec
        self._piece = _GZIP_PIECE if codec is Codec.GZIP else _ZSTD_PIECE
        self._member: _Member | None = None
        self._members = 0
        self._rest = b""  # read and not decoded yet
        self._decoded = memoryview(b"")  # decoded and not given out yet

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        target = memoryview(buffer).cast("B")
        while not self._decoded:
            if not self._decode():
                return 0
        count = min(len(target), len(self._decoded))
        target[:count] = self._decoded[:count]
        self._decoded = self._decoded[count:]
        return count

    def _decode(self) -> bool:
        """Decode one piece; False at the end of the file."""
        data = self._rest or self._source.read(self._piece)
        at_end = not data
        if self._member is None:
            if self._members and self._codec is Codec.GZIP:
                data = data.lstrip(b"\0")  # tapes and some tools fill up with zeros, which gzip passes over
            if not data:
                self._rest = b""
                return not at_end
            self._member = _GzipMember() if self._codec is Codec.GZIP else _ZstdFrame()
        decoded, self._rest = self._member.decode(data)
        self._decoded = memoryview(decoded)
        if self._member.ended:
            self._member = None
            self._members += 1
        elif at_end and not decoded:
            raise DamagedData(f"its {self._codec} data is cut short")
        return True


class _Member(Protocol):
    """One gzip member or zstd frame that is being decoded."""

    @property
    def ended(self) -> bool:
        """Whether all of it was decoded, and its checksum was right."""
        ...

    def decode(self, data: bytes) -> tuple[bytes, bytes]:
        """Decode some bytes; return what they became, and those that were not taken. Raises DamagedData."""
        ...


class _GzipMember:
    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(wbits=_GZIP_FORMAT)

    @property
    def ended(self) -> bool:
        return self._decoder.eof

    def decode(self, data: bytes) -> tuple[bytes, bytes]:
        try:
            decoded = self._decoder.decompress(data, _MOST_DECODED)
        except zlib.error as error:
            raise DamagedData(f"its gzip data is damaged ({str(error).rpartition(': ')[2]})") from None
        return decoded, self._decoder.unused_data if self.ended else self._decoder.unconsumed_tail


class _ZstdFrame:
    def __init__(self) -> None:
        # Output grows in steps of this size; the default is what every call would allocate anew.
        self._decoder = zstandard.ZstdDecompressor(max_window_size=_MOST_WINDOW).decompressobj(write_size=1 << 14)

    @property
    def ended(self) -> bool:
        return self._decoder.eof

    def decode(self, data: bytes) -> tuple[bytes, bytes]:
        try:
            decoded = self._decoder.decompress(data)
        except zstandard.ZstdError as error:
            fault = str(error).rpartition(": ")[2]
            if "too much memory" in fault:
                raise DamagedData("its zstd data needs a window above 128 MiB; pack it again without --long") from None
            raise DamagedData(f"its zstd data is damaged ({fault})") from None
        return decoded, self._decoder.unused_data if self.ended else b""
