"""The driver that needs nothing: seeds, changed at random, from one seeded stream of chance."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

#: Pieces with which readers of text, JSON, msgpack, gzip and server-sent events were broken before.
MORSELS = (
    b"\x00", b"\xff", b"\n", b"\r", b"\r\n\r\n", b"data: ", b"[DONE]", b"\xe2\x80\xa8", b"\xed\xa0\x80", b"\\ud800",
    b"{", b"}", b"[" * 300, b"]" * 300, b'{"a":' * 300, b"NaN", b"Infinity", b"-0", b"1e999", b"9" * 30, b"9" * 5000,
    b"null", b"true", b'""', b'"index":', b'"index":"x"', b'"finish_reason":[]', b"\xc1", b"\xd9\xff", b"\xdf\xff\xff",
    b"\xc7\x0c\xff", b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\x81\x81", b"\x91" * 600, b"\xc4\x01x",
    "²".encode(), "٣".encode(), b"%00", b"://", b"@", b"--", b":", b";", b"|", b"=", b"\x1f\x8b\x08", b"(\xb5/\xfd",
)  # fmt: skip

#: Longer inputs are no new ones, only slower.
LONGEST = 1 << 16


def mutations(seeds: Sequence[bytes], seed: int) -> Iterator[bytes]:
    """Yield the seeds, and then for ever changed ones; the same `seed` gives the same inputs."""
    chance = random.Random(seed)
    yield from seeds
    while True:
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.randint(1, 6)):
            _change(data, seeds, chance)
        yield bytes(data[:LONGEST])


def _change(data: bytearray, seeds: Sequence[bytes], chance: random.Random) -> None:
    at = chance.randint(0, len(data))
    upto = min(len(data), at + chance.choice((1, 1, 2, 4, 16, 64)))
    match chance.randrange(7):
        case 0:
            data[at:upto] = b""
        case 1:
            data[at:at] = chance.choice(MORSELS)
        case 2:
            data[at:upto] = chance.choice(MORSELS)
        case 3:
            data[at:at] = data[at:upto] * chance.choice((1, 2, 50))
        case 4 if at < len(data):
            data[at] ^= 1 << chance.randrange(8)
        case 5:
            data[at:] = b""
        case _:
            other = chance.choice(seeds)
            begin = chance.randint(0, len(other))
            data[at:upto] = other[begin : begin + 64]
