"""Lines of a batch on their way into Redis, encrypted: between their encoding (`feeding.py`) and their chunk.

With no key they pass as they are.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import replace

from llmq.scheduler.cipher import Cipher, error_of, line_owner, request_of
from llmq.scheduler.scripts import SubmitLine


def encrypted_lines(lines: AsyncIterable[SubmitLine], batch_id: str, cipher: Cipher) -> AsyncIterable[SubmitLine]:
    """Return the lines as they are stored for this batch: jobs, and the faults of bad lines, encrypted."""
    return _encrypted(lines, batch_id, cipher) if cipher.active else lines


async def _encrypted(lines: AsyncIterable[SubmitLine], batch_id: str, cipher: Cipher) -> AsyncIterator[SubmitLine]:
    async for line in lines:
        owner = line_owner(batch_id, line.number)
        if line.data:
            yield replace(line, data=cipher.encrypt(line.data, request_of(owner)))
        else:  # the fault of a bad line may quote it
            yield replace(line, fault=cipher.encrypt_text(line.fault, error_of(owner)))
