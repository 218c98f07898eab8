"""Fixtures for the tests of the scripts: a queue on a real server, in virtual time."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from tests.scripted_queue import T0, ScriptedQueue


@pytest.fixture
async def queue(redis: Redis) -> ScriptedQueue:
    """An empty queue whose clock stands at `T0`."""
    queue = ScriptedQueue(redis)
    await queue.set_clock(T0)
    return queue
