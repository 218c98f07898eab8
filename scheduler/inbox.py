"""The inbox: what a waiting client is told while its jobs run.

One bounded stream a client and queue. An entry has the field `t`: `d` carries deltas (field `d`, here encoded), `e`
says that a job has ended (fields `j` job id and `v` delivery). The job's record is the truth; the inbox only rings.
This module encodes and decodes; it neither reads nor writes Redis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgpack

from llmq.scheduler.errors import EncodingError


class Delta(NamedTuple):
    """A piece of an answer: the job, the delivery that made it, its place (from 0), its text and the raw chunk.

    A tuple, because every token of every answer is one: it is made three times as fast as a frozen dataclass.
    """

    job_id: str
    delivery: int
    seq: int
    text: str
    chunk: bytes


def encode_deltas(deltas: Sequence[Delta]) -> bytes:
    """Return the field `d` of an inbox entry."""
    packed: bytes
    try:
        packed = msgpack.packb(deltas)
    except UnicodeEncodeError:  # half a surrogate pair in a text: one job's may not keep the others' back
        packed = msgpack.packb(deltas, unicode_errors="replace")
    return packed


def decode_deltas(data: bytes) -> list[Delta]:
    """Read the field `d` of an inbox entry; raises EncodingError for anything that `encode_deltas` cannot have made."""
    try:
        rows = msgpack.unpackb(data)
        # Looked at by columns, and made without asking each for its length: half of the time.
        right = rows == [] or [{*map(type, column)} for column in zip(*rows, strict=True)] == _TYPES
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException, RecursionError) as error:
        raise EncodingError("inbox", f"holds no deltas ({type(error).__name__})") from None
    if not right:
        raise EncodingError("inbox", "holds a delta of the wrong types")
    return [tuple.__new__(Delta, row) for row in rows]


_TYPES = [{str}, {int}, {int}, {str}, {bytes}]
