"""The sender of deltas on a real server, while trips fail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
from redis import exceptions
from redis.asyncio import Redis

from llmq.scheduler.inbox import decode_deltas
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.lease import Fence, Lease, Why
from llmq.workers.deltas import DeltaSender

KEYS = QueueKeys("deltas")


async def test_the_end_of_an_answer_waits_for_its_deltas_while_redis_is_away(
    redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For as long as its patience lasts, however many trips fail: not every answer can be completed from its record."""
    monkeypatch.setattr("llmq.workers.deltas.RETRY_S", 0.01)
    sender = DeltaSender(redis, KEYS, "worker", lambda fence: None)
    run_all, failures = sender._calls.run_all, 4

    async def fails_first(calls: Sequence[Any]) -> list[Any]:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise exceptions.ConnectionError("away")
        return await run_all(calls)

    monkeypatch.setattr(sender._calls, "run_all", fails_first)
    fence = Fence("lane", "1-0", 1)
    lease = Lease(fence, TrafficClass.BATCH, Why.CHAT, "tenant", "job", b"{}", 1, reply_to="client")
    send = sender.outlet(lease)
    assert send is not None
    for text in ("Hel", "lo"):
        send(text, text.encode())
    await sender.flushed(fence)
    ((_, fields),) = await cast(Any, redis).xrange(KEYS.inbox("client"))
    assert ["Hel", "lo"] == [delta.text for delta in decode_deltas(fields[b"d"])]
    await sender.close()
