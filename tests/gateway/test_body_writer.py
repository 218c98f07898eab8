"""Pieces of a stream that are written as they are heard: the same bytes, in the same order, for any client."""

from __future__ import annotations

import asyncio
import contextlib
import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llmq.gateway.body_writer import BodyWriter
from llmq.scheduler.watch import Watch
from tests.engine.scripted import ScriptedEngine
from tests.gateway.serving import CHAT, Gateway, chunk, events, usage_chunk, whole
from tests.gateway.test_metrics import scrape


class Transport:
    """A transport that remembers."""

    def __init__(self) -> None:
        self.written = b""
        self.closing = False

    def write(self, data: bytes) -> None:
        """Take bytes."""
        self.written += data

    def is_closing(self) -> bool:
        """Whether it is being closed."""
        return self.closing


def cycle() -> Any:
    """Return a request whose answer is under way in pieces."""
    flow = SimpleNamespace(write_paused=False)
    return SimpleNamespace(
        transport=Transport(), flow=flow, response_complete=False, disconnected=False, chunked_encoding=True
    )


def test_a_piece_is_framed_as_a_chunk() -> None:
    """As HTTP/1.1 has it, and counted without its frame."""
    asked = cycle()
    writer = BodyWriter(cast(Any, asked))
    assert writer.clear
    writer.write(b"data: x\n\n" * 3)
    assert b"1b\r\n" + b"data: x\n\n" * 3 + b"\r\n" == asked.transport.written
    assert 27 == writer.written


@pytest.mark.parametrize(
    "change",
    [{"response_complete": True}, {"disconnected": True}, {"chunked_encoding": None}, {"chunked_encoding": False},
     {"flow": SimpleNamespace(write_paused=True)}],
)  # fmt: skip
def test_it_writes_only_where_nothing_is_to_be_waited_for(change: dict[str, Any]) -> None:
    """Else whoever asks goes the long way, which waits."""
    asked = cycle()
    vars(asked).update(change)
    assert not BodyWriter(asked).clear


def test_it_does_not_write_to_a_connection_that_is_closing() -> None:
    """The transport would raise."""
    asked = cycle()
    asked.transport.closing = True
    assert not BodyWriter(asked).clear


async def test_what_fails_on_the_way_is_met_again_by_who_waits() -> None:
    """The listener serves others too: it goes on, and wakes the one whose stream it is."""
    watch, tried = Watch("j", foreign=False, overdue_at=1.0), []

    def fails() -> bool:
        tried.append(1)
        raise RuntimeError("the stream is broken")

    watch.on_deltas = fails
    watch.tell()
    watch.tell()
    assert ([1], True) == (tried, watch.news.is_set())  # not tried again: who waits is awake


async def test_the_tokens_of_a_stream_are_written_as_they_are_heard(
    front: Gateway, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the first, which begins the answer; byte for byte, and every byte counted."""
    at_once: list[bytes] = []
    write = BodyWriter.write

    def noted(self: BodyWriter, data: bytes) -> None:
        at_once.append(data)
        write(self, data)

    monkeypatch.setattr(BodyWriter, "write", noted)
    before = (await scrape(front)).value("llmq_gateway_http_sent_bytes_total")
    asked = asyncio.create_task(front.chat(stream=True).__aenter__())
    request = await engine.next()
    request.say("0", chunk("0"))
    response = await asked
    said, texts = events(response), [str(number) for number in range(20)]
    assert f"data: {chunk('0').decode()}" == await anext(said)
    for text in texts[1:]:
        request.say(text, chunk(text))
        assert f"data: {chunk(text).decode()}" == await anext(said)
    request.say("", chunk())
    request.say("", usage_chunk())
    request.answer(body=whole("".join(texts)))
    assert [f"data: {chunk().decode()}", "data: [DONE]"] == [event async for event in said]
    assert [b"data: " + chunk(text) + b"\n\n" for text in texts[1:]] == at_once[:19]
    sent = sum(len(b"data: " + chunk(text) + b"\n\n") for text in texts)
    assert sent < (await scrape(front)).value("llmq_gateway_http_sent_bytes_total") - before


async def test_a_client_that_reads_late_gets_all_of_it(front: Gateway, engine: ScriptedEngine) -> None:
    """What it does not take is waited with, nothing comes twice, and nothing overtakes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port, limit=2**12)
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    request, texts = await engine.next(), [f"{number:05d}" + "x" * 20_000 for number in range(200)]
    for text in texts:
        request.say(text, chunk(text))
        await asyncio.sleep(0)
    request.say("", chunk())
    request.answer(body=whole("".join(texts)))
    came = b""
    async with asyncio.timeout(30):
        while data := await reader.read(2**20):
            came += data
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    assert "".join(texts) == "".join(_contents(came))


def _contents(came: bytes) -> list[str]:
    _, _, rest = came.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    data = [event[6:] for event in body.split(b"\n\n") if event.startswith(b"data: {")]
    return [json.loads(event)["choices"][0]["delta"].get("content", "") for event in data]
