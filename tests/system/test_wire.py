"""The wire to an engine: HTTP as engines speak it, and as they should not, on both event loops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from llmq.scheduler.errors import UsageError
from llmq.workers.engines.base import EngineError, EngineGone, EngineUnclear
from llmq.workers.engines.wire import MAX_HEAD_BYTES, Address, Head
from tests.engine.fake import CHUNKED_HEAD, FakeEngine, chunked

PATH = "/v1/chat/completions"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"

Runner = Callable[[Coroutine[Any, Any, Any]], Any]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Runner:
    """Run a coroutine on one of the loops."""
    factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(work)

    return run


async def exchange(reply: Any, *, body: bytes = b"{}") -> tuple[Head, bytes]:
    """Ask a fake engine, and return what came."""
    engine = FakeEngine()
    engine.replies[PATH] = reply
    async with engine.serving():
        address = Address(engine.url, 5.0, None)
        wire = await address.open()
        try:
            await wire.send(address.post(PATH, {"Content-Type": "application/json"}, len(body)), body)
            return await wire.head(), await wire.read(1000)
        finally:
            wire.close()


@pytest.mark.parametrize(
    "reply",
    [
        OK,
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK,
        b"HTTP/1.0 200 OK\r\n\r\nhello",
        CHUNKED_HEAD + chunked("hel") + chunked("lo") + b"0\r\n\r\n",
        CHUNKED_HEAD + chunked("hel") + chunked("lo") + b"0\r\nTrailer: x\r\n\r\n",
        OK + b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 3\r\n\r\nbye",
        CHUNKED_HEAD + chunked("hello") + b"0\r\n\r\n" + CHUNKED_HEAD + chunked("bye") + b"0\r\n\r\n",
        OK + b"\r\nno HTTP",
        CHUNKED_HEAD.replace(b"\r\n\r\n", b"\r\nContent-Length: 9\r\n\r\n") + chunked("hello") + b"0\r\n\r\n",
        OK.replace(b"\r\n", b"\n"),
    ],
)
def test_a_body_ends_as_its_head_says(run: Runner, reply: bytes) -> None:
    """With a length, in chunks, or with the connection; heads that only announce another are passed over."""
    head, body = run(exchange(reply))
    assert (200, b"hello") == (head.status, body)


@pytest.mark.parametrize("status", [204, 304])
def test_an_answer_that_has_no_body_does_not_wait_for_one(run: Runner, status: int) -> None:
    """Whether or not the engine closes the connection."""

    async def asked() -> tuple[Head, bytes]:
        engine = FakeEngine()

        async def keep_open(writer: asyncio.StreamWriter) -> None:
            writer.write(f"HTTP/1.1 {status} X\r\nConnection: keep-alive\r\n\r\n".encode())
            await engine.hung_up.wait()

        engine.replies[PATH] = keep_open
        async with engine.serving():
            wire = await Address(engine.url, 5.0, 5.0).open()
            try:
                await wire.send(Address(engine.url, 5.0, None).post(PATH, {}, 0), b"")
                return await wire.head(), await wire.read(1000)
            finally:
                wire.close()
                await engine.hung_up.wait()

    head, body = run(asked())
    assert (status, b"") == (head.status, body)


@pytest.mark.parametrize("endless", ["0\r\nx-trailer: ", "0\r\n", "5;extension="])
def test_what_stands_around_a_body_is_bounded(run: Runner, endless: str) -> None:
    """Trailers and the extensions of chunks are no body, and no head: they have the head's limit."""

    async def go_on(writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED_HEAD + chunked("hello") + endless.encode())
        for number in range(1000):
            writer.write((b"x%d: y\r\n" % number if endless.endswith("\n") else b"x") * 8192)
            await writer.drain()

    async def asked() -> tuple[Head, bytes]:
        async with asyncio.timeout(5):
            return await exchange(go_on)

    with pytest.raises(EngineUnclear, match="larger than"):
        run(asked())


def test_an_answer_in_single_bytes_is_an_answer(run: Runner) -> None:
    """However the network cuts it."""

    async def dribble(writer: asyncio.StreamWriter) -> None:
        for byte in CHUNKED_HEAD + chunked("hello") + b"0\r\n\r\n":
            writer.write(bytes([byte]))
            await writer.drain()

    head, body = run(exchange(dribble))
    assert ("text/event-stream", b"hello") == (head.content_type, body)


@pytest.mark.parametrize(
    "reply",
    [b"", b"HTTP/1.1 200 OK\r\nContent-Le", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello",
     CHUNKED_HEAD + chunked("hel"), CHUNKED_HEAD + b"9\r\nhel"],
)  # fmt: skip
def test_an_answer_that_is_cut_off_is_an_engine_lost_in_flight(run: Runner, reply: bytes) -> None:
    """Wherever the cut is: it may have the request."""
    with pytest.raises(EngineGone) as lost:
        run(exchange(reply))
    assert lost.value.in_flight


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "no HTTP answer"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * MAX_HEAD_BYTES + b"y" * 1000, "head of the engine's answer is larger"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx", r"encoded \(gzip\)"),
        (CHUNKED_HEAD + b"zz\r\nhello", "no HTTP answer"),
    ],
)
def test_what_is_no_answer_is_unclear(run: Runner, reply: bytes, says: str) -> None:
    """And says what is wrong with it."""
    with pytest.raises(EngineUnclear, match=says):
        run(exchange(reply))


def test_silence_is_noticed(run: Runner) -> None:
    """Where the time between two pieces is bounded."""

    async def silent() -> None:
        engine, writers = FakeEngine(), list[asyncio.StreamWriter]()

        async def say_nothing(writer: asyncio.StreamWriter) -> None:
            writers.append(writer)
            await engine.hung_up.wait()

        engine.replies[PATH] = say_nothing
        async with engine.serving():
            address = Address(engine.url, 5.0, 0.05)
            wire = await address.open()
            try:
                await wire.send(address.post(PATH, {}, 0), b"")
                await wire.head()
            finally:
                wire.close()
                await writers[0].wait_closed()

    with pytest.raises(EngineUnclear, match="fell silent"):
        run(silent())


def test_a_refusal_before_the_request_is_out_ends_the_writing(run: Runner) -> None:
    """An engine that answers 413 and reads no more would be written to for ever."""

    async def refused() -> Head:
        over, ended = asyncio.Event(), asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")
            await over.wait()
            writer.transport.abort()
            ended.set()

        async with await asyncio.start_server(answer, "127.0.0.1", 0, limit=1) as server:
            host, port = server.sockets[0].getsockname()
            address, body = Address(f"http://{host}:{port}", 5.0, None), b"x" * 2**26
            wire = await address.open()
            try:
                async with asyncio.timeout(10):
                    await wire.send(address.post(PATH, {}, len(body)), body)
                    return await wire.head()
            finally:
                wire.close()
                over.set()
                await ended.wait()

    assert 413 == run(refused()).status


def test_who_feeds_may_end_the_answer_or_fail(run: Runner) -> None:
    """What comes after an end is not fed; an error is raised where the answer is waited for."""

    async def fed(feed: Callable[[bytes], str | None]) -> str:
        engine = FakeEngine()
        engine.replies[PATH] = OK
        async with engine.serving():
            address = Address(engine.url, 5.0, None)
            wire = await address.open()
            try:
                await wire.send(address.post(PATH, {}, 0), b"")
                await wire.head()
                return await wire.body(feed, lambda: "closed")
            finally:
                wire.close()

    assert "fed hello" == run(fed(lambda data: f"fed {data.decode()}"))
    assert "closed" == run(fed(lambda data: None))
    with pytest.raises(EngineError, match="odd"):
        run(fed(_fail))


def _fail(data: bytes) -> str:
    raise EngineUnclear("odd")


@pytest.mark.parametrize(
    ("url", "line", "host"),
    [
        ("http://gpu7", b"POST /v1/x HTTP/1.1", b"gpu7"),
        ("https://gpu7:8443/a%20b", b"POST /a%20b/v1/x HTTP/1.1", b"gpu7:8443"),
        ("http://[::1]:8000/a b", b"POST /a%20b/v1/x HTTP/1.1", b"[::1]:8000"),
        ("http://bücher.example", b"POST /v1/x HTTP/1.1", b"xn--bcher-kva.example"),
    ],
)
def test_a_request_names_its_place(url: str, line: bytes, host: bytes) -> None:
    """In the form that HTTP has for it."""
    lines = Address(url, 1.0, None).post("/v1/x", {}, 3).split(b"\r\n")
    assert (line, b"Host: " + host) == (lines[0], lines[1])
    assert b"Content-Length: 3" in lines


def test_a_host_that_can_be_none_is_refused() -> None:
    """At the start, and not with every request."""
    with pytest.raises(UsageError, match="can be no name"):
        Address("http://a..b:8000", 1.0, None)
