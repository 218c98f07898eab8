"""Compression: any way of packing gives the plain bytes back, in constant memory, and damage is never silence."""

from __future__ import annotations

import gzip
import io
import tracemalloc
import zlib
from collections.abc import Callable

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from llmq.scheduler.compression import (
    Codec,
    DamagedData,
    Decompressed,
    codec_of_content,
    codec_of_name,
    compress,
    without_suffix,
)

PACKED = [Codec.GZIP, Codec.ZSTD]

#: A frame that decoders pass over.
SKIPPABLE = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"skip"


def unpack(data: bytes, codec: Codec) -> bytes:
    """Read all of it, as a file is read."""
    with io.BufferedReader(Decompressed(io.BufferedReader(io.BytesIO(data)), codec)) as reader:
        return reader.read()


class TestReading:
    """All members, and nothing else."""

    @pytest.mark.parametrize("codec", PACKED)
    @given(st.lists(st.binary(max_size=3000), min_size=1, max_size=5))
    def test_blocks_behind_each_other_are_one_file(self, codec: Codec, blocks: list[bytes]) -> None:
        """As `cat a.gz b.gz` makes it, and as results are written."""
        packed = b"".join(compress(block, codec) for block in blocks)
        assert codec is codec_of_content(packed)
        assert b"".join(blocks) == unpack(packed, codec)

    def test_what_other_tools_write_is_read(self) -> None:
        """A whole file in one piece, a frame without its size, zeros behind, a frame to be passed over first."""
        text = b"some text " * 50_000
        frame = zstandard.ZstdCompressor(level=19, write_content_size=False).compress(text)
        assert text == unpack(gzip.compress(text), Codec.GZIP)
        assert text == unpack(gzip.compress(text) + bytes(100_000), Codec.GZIP)
        assert text == unpack(frame, Codec.ZSTD)
        assert Codec.ZSTD is codec_of_content(SKIPPABLE + frame)
        assert text == unpack(SKIPPABLE + frame + SKIPPABLE, Codec.ZSTD)

    @pytest.mark.parametrize("codec", PACKED)
    def test_a_file_that_was_cut_anywhere_is_damaged_or_ends_with_a_block(self, codec: Codec) -> None:
        """No cut is taken for the end of the file, but for the one between two blocks."""
        first, second = compress(b"first" * 20, codec), compress(b"second" * 20, codec)
        for cut in range(1, len(first + second)):
            if cut == len(first):
                assert b"first" * 20 == unpack(first, codec)
                continue
            with pytest.raises(DamagedData, match="is cut short"):
                unpack((first + second)[:cut], codec)

    @pytest.mark.parametrize("codec", PACKED)
    def test_a_byte_that_was_changed_is_found(self, codec: Codec) -> None:
        """By the checksum at the latest."""
        packed = bytearray(compress(bytes(range(256)) * 40, codec))
        packed[len(packed) // 2] ^= 1
        with pytest.raises(DamagedData, match=f"its {codec} data is (damaged|cut short)"):
            unpack(bytes(packed), codec)

    @pytest.mark.parametrize("codec", PACKED)
    def test_something_else_behind_the_data_is_damage(self, codec: Codec) -> None:
        """It is not dropped in silence."""
        with pytest.raises(DamagedData):
            unpack(compress(b"text", codec) + b'{"prompt": "plain"}\n', codec)

    def test_a_window_that_would_take_gigabytes_is_refused(self) -> None:
        """`zstd --long=31`: the message says what to do."""
        parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)
        packed = zstandard.ZstdCompressor(compression_params=parameters).compressobj().compress(b"x" * (1 << 20))
        with pytest.raises(DamagedData, match="a window above 128 MiB; pack it again without --long"):
            unpack(packed, Codec.ZSTD)

    @pytest.mark.parametrize(
        ("codec", "pack"),
        [
            (Codec.GZIP, lambda block: zlib.compress(block, 9, 31)),
            (Codec.ZSTD, lambda block: zstandard.ZstdCompressor(level=3).compress(block)),
        ],
    )
    def test_what_unpacks_to_a_thousand_times_its_size_is_read_in_constant_memory(
        self, codec: Codec, pack: Callable[[bytes], bytes]
    ) -> None:
        """A hostile file costs time, and no more memory than a good one."""
        packed = pack(bytes(256 << 20))
        assert len(packed) < 300_000
        tracemalloc.start()
        try:
            with io.BufferedReader(Decompressed(io.BufferedReader(io.BytesIO(packed)), codec)) as reader:
                size = 0
                while piece := reader.read(1 << 20):
                    size += len(piece)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert 256 << 20 == size
        assert peak < 40 << 20


class TestNames:
    """What is to be packed is told by the name, what is packed by the content."""

    def test_a_name_tells_by_its_end(self) -> None:
        """And without it, what the plain file is called."""
        assert [Codec.GZIP, Codec.ZSTD, Codec.PLAIN] == [codec_of_name(name) for name in ("a.gz", "a.jsonl.zst", "gz")]
        assert ["a.jsonl", "a", "a.jsonl"] == [without_suffix(name) for name in ("a.jsonl.gz", "a.zst", "a.jsonl")]
        assert Codec.PLAIN is codec_of_content(b'{"prompt": "x"}')
        assert Codec.PLAIN is codec_of_content(b"")

    def test_an_empty_block_is_a_whole_file_of_its_kind(self) -> None:
        """`gunzip` refuses no bytes at all."""
        for codec in PACKED:
            assert compress(b"", codec)
            assert b"" == unpack(compress(b"", codec), codec)
