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


def _whole(told: Any) -> bool:
    """Whether a recorded probe is a whole answer of what the gateway passes on."""
    if not isinstance(told, dict) or told.get("status") != 200 or not isinstance(told.get("body"), dict):
        return False
    return told["request"]["path"] in PATHS and isinstance(told["request"].get("body"), dict)


WHOLES = sorted(path.stem for path in SAMPLES.glob("*.json") if _whole(sample(path.stem)))


@pytest.mark.parametrize("name", WHOLES)
async def test_a_recorded_answer_comes_out_field_for_field(front: Gateway, replaying: FakeEngine, name: str) -> None:
    """Whole, as an engine says it that was asked for a stream and does not know of any."""
    recorded = sample(name)
    path = recorded["request"]["path"]
    replaying.replies[path] = page(200, recorded["body"])
    async with front.post(path, recorded["request"]["body"]) as response:
        assert 200 == response.status, await response.text()
        assert recorded["body"] == json.loads(await response.read())


@pytest.mark.parametrize("name", [name for name in STREAMS if "chat" in name])
async def test_a_recorded_stream_is_put_together_for_who_wants_it_whole(
    front: Gateway, replaying: FakeEngine, name: str
) -> None:
    """Its text, its end and its usage are those of the chunks."""
    recorded = sample(name)
    path, lines = recorded["request"]["path"], [line for _, line in recorded["sse_lines"]]
    replaying.replies[path] = CHUNKED_HEAD + chunked("".join(f"{line}\n\n" for line in lines)) + b"0\r\n\r\n"
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    async with front.post(path, {**recorded["request"]["body"], "stream": False}) as response:
        answer = json.loads(await response.read())
    assert "chat.completion" == answer["object"]
    (choice,) = answer["choices"]
    assert "".join(one["delta"].get("content") or "" for one in choices) == choice["message"]["content"]
    assert [one["finish_reason"] for one in choices if one.get("finish_reason")] == [choice["finish_reason"]]
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    assert usages[-1:] == [answer["usage"]][: len(usages[-1:])]


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
