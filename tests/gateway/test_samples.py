"""What real engines said, recorded, comes out of the gateway as they said it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from llmq.workers.engines.http import HttpEngine
from tests.engine.fake import CHUNKED_HEAD, SAMPLES, FakeEngine, chunked, page, sample
from tests.gateway.serving import Gateway, events, gateway
from tests.redis.serving import serving

STREAMS = sorted(path.stem for path in SAMPLES.glob("*-stream.json"))
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses")


def _refused(told: Any) -> bool:
    """Whether a recorded probe is a refusal of what the gateway passes on."""
    if not isinstance(told, dict) or told.get("status") not in (400, 404, 422, 501):
        return False
    asked = told["request"]
    body = asked.get("body")
    return asked["path"] in PATHS and isinstance(body, dict) and bool(body.get("messages", "chat" not in asked["path"]))


REFUSALS = sorted(path.stem for path in SAMPLES.glob("*.json") if _refused(sample(path.stem)))


@pytest.fixture
async def replaying() -> AsyncIterator[FakeEngine]:
    """A server that says what was recorded."""
    engine = FakeEngine()
    async with engine.serving():
        yield engine


@pytest.fixture
async def front(redis_url: str, replaying: FakeEngine) -> AsyncIterator[Gateway]:
    """A gateway in front of it."""
    engine = HttpEngine(replaying.url)
    async with serving(redis_url, engine, concurrency=1, reserve=0), gateway(redis_url) as front:
        yield front
    await engine.close()


@pytest.mark.parametrize("name", STREAMS)
async def test_a_recorded_stream_comes_out_event_for_event(front: Gateway, replaying: FakeEngine, name: str) -> None:
    """Byte for byte, and with the [DONE] that not every engine sends."""
    recorded = sample(name)
    path, lines = recorded["request"]["path"], [line for _, line in recorded["sse_lines"]]
    replaying.replies[path] = CHUNKED_HEAD + chunked("".join(f"{line}\n\n" for line in lines)) + b"0\r\n\r\n"

    async with front.post(path, {**recorded["request"]["body"], "stream_options": {"include_usage": True}}) as response:
        came = [event async for event in events(response)]

    said = [line for line in lines if line.startswith("data: ") and line != "data: [DONE]"]
    assert [*said, "data: [DONE]"] == came


@pytest.mark.parametrize("name", REFUSALS)
async def test_a_recorded_refusal_keeps_status_and_body(front: Gateway, replaying: FakeEngine, name: str) -> None:
    """Each engine has a shape of its own, and clients of it know it."""
    recorded = sample(name)
    path, body = recorded["request"]["path"], recorded["body"]
    replaying.replies[path] = page(recorded["status"], body)

    async with front.post(path, recorded["request"]["body"]) as response:
        assert recorded["status"] == response.status, await response.text()
        came = await response.read()
    assert body == (came.decode() if isinstance(body, str) else json.loads(came))
