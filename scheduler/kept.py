"""What a line keeps of an answer that was cut off: text that is made need not be made again.

A preempted batch line goes back to its lane with it (in `tries`, beside its counts), and the next attempt goes on from
there where its engine can. It is a value, and bounded; who makes and uses it is the worker's `continuing.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgpack

#: More text than this is made again: it lies in Redis beside the job, and a preempted line may wait long.
MAX_KEPT_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True)
class Kept:
    """The beginning of an answer: its text, how many LLM tokens that took, and the model that made it."""

    text: str
    tokens: int
    model: str

    def encode(self) -> bytes:
        """Return it as it is stored, b"" where it is too large or breaks off within a character."""
        try:
            packed: bytes = msgpack.packb([self.text, self.tokens, self.model])
        except UnicodeEncodeError:  # it was cut within a character
            return b""
        return packed if len(packed) <= MAX_KEPT_BYTES else b""

    @classmethod
    def decode(cls, data: bytes) -> Kept | None:
        """Return what was stored; None where there is nothing, or nothing that this version can read."""
        if not data or len(data) > MAX_KEPT_BYTES:
            return None
        try:
            text, tokens, model = msgpack.unpackb(data)
        except Exception:  # msgpack raises what it likes for bytes that are none of its own
            return None
        if not (isinstance(text, str) and type(tokens) is int and tokens >= 0 and isinstance(model, str)):
            return None
        return cls(text, tokens, model)
