"""Fixtures for the tests of the gateway: an engine in the hands of the test, and a gateway with a worker for it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.engine.scripted import ScriptedEngine
from tests.gateway.serving import Gateway, gateway
from tests.redis.serving import serving


@pytest.fixture
async def engine() -> ScriptedEngine:
    """An engine with one slot."""
    return ScriptedEngine(slots=1)


@pytest.fixture
async def front(redis_url: str, engine: ScriptedEngine) -> AsyncIterator[Gateway]:
    """A gateway, and one worker with the engine."""
    async with serving(redis_url, engine, concurrency=1, reserve=0), gateway(redis_url) as front:
        yield front
