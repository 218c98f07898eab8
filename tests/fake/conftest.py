"""The fake Redis for tests of submit, inspect and settings; it cannot run the claim script (F-139, F-140)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import fakeredis
import pytest
from fakeredis._commands import SUPPORTED_COMMANDS

if TYPE_CHECKING:
    from redis.asyncio import Redis


@pytest.fixture
async def redis() -> AsyncIterator[Redis]:
    """A client of a fake server of its own; in place of the real one of tests/conftest.py."""
    # EVAL_RO is all that it lacks: EVAL that may not write.
    SUPPORTED_COMMANDS["eval_ro"] = SUPPORTED_COMMANDS["eval"]
    client = fakeredis.FakeAsyncRedis()
    yield client
    await client.aclose()
