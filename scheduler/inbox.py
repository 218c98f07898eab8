"""The inbox: what a waiting client is told while its jobs run.

One bounded stream a client and queue. An entry has the field `t`: `d` carries deltas (field `d`, here encoded), `e`
says that a job has ended (fields `j` job id and `v` delivery). The job's record is the truth; the inbox only rings.
This module encodes and decodes; it neither reads nor writes Redis.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgpack

from llmq.scheduler.errors import EncodingError


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer: the job, the delivery that made it, its place (from 0), its text and the raw chunk."""

    job_id: str
    delivery: int
    seq: int
    text: str
    chunk: bytes


def encode_deltas(deltas: Sequence[Delta]) -> bytes:
    """Return the field `d` of an inbox entry."""
    packed: bytes = msgpack.packb([(d.job_id, d.delivery, d.seq, d.text, d.chunk) for d in deltas])
    return packed


def decode_deltas(data: bytes) -> list[Delta]:
    """Read the field `d` of an inbox entry; raises EncodingError for anything that `encode_deltas` cannot have made."""
    try:
        rows = msgpack.unpackb(data)
        deltas = [Delta(*row) for row in rows]
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException, RecursionError) as error:
        raise EncodingError("inbox", f"holds no deltas ({type(error).__name__})") from None
    for delta in deltas:
        if not (isinstance(delta.job_id, str) and isinstance(delta.text, str) and isinstance(delta.chunk, bytes)):
            raise EncodingError("inbox", "holds a delta of the wrong types")
        if not (isinstance(delta.delivery, int) and isinstance(delta.seq, int)):
            raise EncodingError("inbox", "holds a delta of the wrong types")
    return deltas
