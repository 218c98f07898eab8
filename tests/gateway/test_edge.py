"""The edge: what is no proper request, comes too slowly, is too large or too much gets an answer in OpenAI's shape."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import time
from collections.abc import AsyncIterator
from typing import ClassVar

import pytest

from llmq.gateway.body_guard import Pace
from llmq.gateway.connection_guard import MOST_PIPELINED
from tests.engine.scripted import ScriptedEngine
from tests.gateway.serving import CHAT, Gateway, chunk, error_of, gateway, whole
from tests.redis.serving import serving

HEAD = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


@pytest.fixture
async def strict(redis_url: str) -> AsyncIterator[Gateway]:
    """A gateway with small limits."""
    pace = Pace(silence_s=0.3, grace_s=0.5, bytes_per_second=1000)
    async with gateway(redis_url, max_body_bytes=1000, head_s=0.3, pace=pace, max_connections=1100) as front:
        yield front


async def spoken(front: Gateway, *pieces: str, pause: float = 0.0) -> tuple[int, bytes, bytes]:
    """Send pieces over a raw connection; return status, head and body of what comes until it is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)

    async def speak() -> None:
        for piece in pieces:
            writer.write(piece.encode())
            await writer.drain()
            await asyncio.sleep(pause)

    speaking = asyncio.create_task(speak())
    try:
        async with asyncio.timeout(10):
            came = await reader.read()
    finally:
        speaking.cancel()
        await asyncio.gather(speaking, return_exceptions=True)
        writer.close()
    head, _, body = came.partition(b"\r\n\r\n")
    return int(head.split()[1]) if head else 0, head, body


def code_of(body: bytes) -> str:
    """Return the code of an error in OpenAI's shape."""
    error = json.loads(body)["error"]
    assert {"message", "type", "param", "code"} == set(error)
    return str(error["code"])


class TestBadRequests:
    """What cannot be served."""

    @pytest.mark.parametrize(
        ("body", "param", "code"),
        [
            (b"", None, "invalid_json"),
            (b"{", None, "invalid_json"),
            (b"[]", None, "invalid_json"),
            (b'"text"', None, "invalid_json"),
            (b'{"messages": NaN}', None, "invalid_json"),
            (b"\xff\xfe{}", None, "invalid_json"),
            (b"[" * 100_000, None, "invalid_json"),
            (b'{"messages":' + b"[" * 200 + b"]" * 200 + b"}", None, "invalid_json"),
            (b"{}", "messages", "missing_required_parameter"),
            (b'{"messages": []}', "messages", "invalid_type"),
            (b'{"messages": [{}], "stream": "yes"}', "stream", "invalid_type"),
            (b'{"messages": [{}], "model": 3}', "model", "invalid_type"),
        ],
        ids=range(12),
    )
    async def test_a_bad_body_is_named(self, front: Gateway, body: bytes, param: str | None, code: str) -> None:
        """400 with the field at fault, and nothing is queued."""
        async with front.post(CHAT, body) as response:
            assert 400 == response.status
            error = await error_of(response)
        assert ("invalid_request_error", param, code) == (error["type"], error["param"], error["code"])

    @pytest.mark.parametrize("path", ["/", "/v1", "/v1/chat", "/v1/chat/completions/", "/v1/%00"])
    async def test_an_unknown_address_is_404(self, front: Gateway, path: str) -> None:
        """Nothing is redirected, and no path leads elsewhere."""
        async with front.http.get(front.base + path, allow_redirects=False) as response:
            assert 404 == response.status
            assert "not_found" == (await error_of(response))["code"]

    async def test_dots_lead_nowhere(self, strict: Gateway) -> None:
        """A path is taken as it is written, not walked."""
        for path in ("/v1/../healthz", "/healthz/../v1/models", "/v1/..%2fhealthz"):
            status, _, body = await spoken(
                strict, f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
            )
            assert (404, "not_found") == (status, code_of(body)), path

    async def test_a_wrong_method_is_405(self, front: Gateway) -> None:
        """With the one that is right."""
        async with front.get(CHAT) as response:
            assert (405, "POST") == (response.status, response.headers["allow"])
            assert "method_not_allowed" == (await error_of(response))["code"]

    @pytest.mark.parametrize("encoding", ["gzip", "br", "zstd"])
    async def test_a_compressed_body_is_415(self, front: Gateway, encoding: str) -> None:
        """What it is once unpacked cannot be bounded beforehand."""
        async with front.post(CHAT, b"x", {"content-encoding": encoding}) as response:
            assert 415 == response.status
            assert encoding in (await error_of(response))["message"]

    async def test_an_answer_before_the_end_of_its_request_arrives(self, strict: Gateway) -> None:
        """The rest is read for a moment and thrown away; closing at once could take the answer along."""
        status, _, body = await spoken(strict, f"{HEAD}content-length: 9000000\r\n\r\n", *["x" * 100_000] * 30)
        assert (413, "body_too_large") == (status, code_of(body))

    async def test_a_fault_of_the_gateway_shows_nothing(self, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """500, an id to look for in the log, and no word of what it was."""
        from llmq.gateway.jobs import Jobs

        async def fail(*_: object) -> None:
            raise ZeroDivisionError("secret")

        monkeypatch.setattr(Jobs, "open", fail)
        async with gateway(redis_url) as front, front.chat() as response:
            assert 500 == response.status
            assert response.headers["x-request-id"].startswith("req_")
            assert "secret" not in json.dumps(await error_of(response))


class TestRequestIds:
    """Each request has an id, the client's or a new one."""

    async def test_the_clients_own_is_kept(self, front: Gateway) -> None:
        """It is in the answer, an error included."""
        async with front.http.get(front.base + "/v1/nope", headers={"x-request-id": "trace-1"}) as response:
            assert "trace-1" == response.headers["x-request-id"]

    @pytest.mark.parametrize("given", ["a b", "x" * 200, "<script>"])
    async def test_one_that_could_harm_a_log_is_not(self, front: Gateway, given: str) -> None:
        """A new one takes its place."""
        async with front.http.get(front.base + "/healthz", headers={"x-request-id": given}) as response:
            assert response.headers["x-request-id"].startswith("req_")


class TestSizes:
    """Bodies that are too large."""

    @pytest.mark.parametrize("size", [1001, 3000, 100_000])
    async def test_a_declared_body_over_the_limit_is_413(self, strict: Gateway, size: int) -> None:
        """At once, whether or not it is sent."""
        async with strict.post(CHAT, b"x" * size) as response:
            assert 413 == response.status
            assert "body_too_large" == (await error_of(response))["code"]

    async def test_a_chunked_body_over_the_limit_is_413(self, strict: Gateway) -> None:
        """As soon as it is over the limit."""
        piece = "c8\r\n" + "x" * 200 + "\r\n"
        status, _, body = await spoken(strict, f"{HEAD}transfer-encoding: chunked\r\n\r\n", *[piece] * 20)
        assert (413, "body_too_large") == (status, code_of(body))

    async def test_a_body_of_16_mib_passes(self, front: Gateway, engine: ScriptedEngine) -> None:
        """A picture comes through unharmed, in one piece or in chunks."""
        engine.on_request = lambda request: request.answer(body=whole("seen"))
        url = "data:image/png;base64," + "A" * (16 * 2**20 - 300)
        raw = json.dumps(
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
        )

        async def pieces() -> AsyncIterator[bytes]:
            for first in range(0, len(raw), 2**20):
                yield raw[first : first + 2**20].encode()

        for data in (io.BytesIO(raw.encode()), pieces()):
            async with front.http.post(front.base + CHAT, data=data) as response:
                assert 200 == response.status, await response.text()
        assert [raw.encode()] * 2 == [request.job.raw for request in engine.started]

    async def test_a_head_that_is_too_large_is_refused(self, strict: Gateway) -> None:
        """Headers are held in memory until the head is whole."""
        status, _, body = await spoken(strict, HEAD, *[f"x-{n}: {'v' * 8000}\r\n" for n in range(200)])
        assert (431, "head_too_large") == (status, code_of(body))


class TestProtocols:
    """Offers of another protocol, and what stands around a body."""

    @pytest.mark.parametrize("offer", ["h2c", "websocket"])
    async def test_an_offer_of_another_protocol_is_passed_over(
        self, front: Gateway, engine: ScriptedEngine, offer: str
    ) -> None:
        """Java's client offers HTTP/2 with every request: it is served all the same, its body with it."""
        engine.on_request = lambda request: request.answer(body=whole(request.prompt))
        asked = json.dumps({"messages": [{"role": "user", "content": "hello"}]})
        offered = f"connection: Upgrade, HTTP2-Settings\r\nupgrade: {offer}\r\nhttp2-settings: AAEA\r\n"
        request = f"{HEAD}{offered}content-length: {len(asked)}\r\n\r\n{asked}"
        last = "GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        status, _, rest = await spoken(front, request[:90], request[90:250], request[250:] + last)
        assert 200 == status
        assert b"hello" in rest
        assert b'{"status":"ok"}' in rest  # the next request of the connection is read as one

    async def test_many_offers_at_once_are_passed_over_one_by_one(self, strict: Gateway) -> None:
        """Each is answered, and none is held in memory for the others' sake."""
        ask = "GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
        last = "GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
        status, _, rest = await spoken(strict, ask * MOST_PIPELINED + last)
        assert (200, MOST_PIPELINED + 1) == (status, rest.count(b'{"status":"ok"}'))

    @pytest.mark.parametrize("offer", ["", "connection: upgrade\r\nupgrade: h2c\r\n"])
    async def test_requests_that_wait_behind_an_answer_are_few(self, strict: Gateway, offer: str) -> None:
        """One packet may hold thousands, each of which takes many times its bytes while it waits."""
        ask = f"GET /healthz HTTP/1.1\r\nhost: localhost\r\n{offer}\r\n"
        _, _, rest = await spoken(strict, ask * (MOST_PIPELINED + 2) + ask)
        assert rest.count(b'{"status":"ok"}') <= 1

    async def test_no_tunnel_is_opened(self, strict: Gateway) -> None:
        """CONNECT leads nowhere."""
        status, _, body = await spoken(strict, "CONNECT 127.0.0.1:6379 HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert (400, "bad_request") == (status, code_of(body))

    @pytest.mark.parametrize("endless", ["0\r\nx-trailer: ", "5;extension="])
    async def test_what_stands_around_a_body_is_bounded(self, front: Gateway, endless: str) -> None:
        """Trailers and the extensions of chunks are no body, and no head: they have the head's limit."""
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(f"{HEAD}transfer-encoding: chunked\r\n\r\n2\r\n{{}}\r\n{endless}".encode())
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 100 * 2**20 and not reader.at_eof():
                writer.write(b"x" * 65536)
                await writer.drain()
                sent += 65536
        writer.close()
        assert sent < 20 * 2**20  # what the buffers of two sockets hold


class TestSlowClients:
    """Clients that keep a connection busy with nothing (slowloris)."""

    async def test_a_head_that_trickles_is_cut_off(self, strict: Gateway) -> None:
        """The time is that of the whole head, and not between two bytes."""
        began = time.monotonic()
        status, _, body = await spoken(strict, "POST", *" /v1/chat/completions HTTP/1.1\r\n", pause=0.05)
        assert (408, "head_timeout") == (status, code_of(body))
        assert time.monotonic() - began < 5

    @pytest.mark.parametrize("behind", ["\r\n", "POST /v1/chat"])
    async def test_what_stands_behind_a_request_does_not_cut_its_answer_off(
        self, redis_url: str, engine: ScriptedEngine, behind: str
    ) -> None:
        """An empty line, which old clients send behind a body, or the beginning of the next request."""
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True})
        async with serving(redis_url, engine, concurrency=1, reserve=0), gateway(redis_url, head_s=0.1) as front:
            reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
            writer.write(f"{HEAD}content-length: {len(body)}\r\n\r\n{body}".encode())
            request = await engine.next()
            request.say("one", chunk("one"))
            await reader.readuntil(b"one")
            writer.write(behind.encode())
            await asyncio.sleep(0.3)  # longer than a head may take
            request.answer(body=whole("one"))
            async with asyncio.timeout(5):
                await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n")
                rest = await reader.read() if behind.strip() else b""
            assert not rest or b"head_timeout" in rest  # the next one has its time from then on
            writer.close()

    async def test_an_empty_line_before_a_request_is_passed_over(self, strict: Gateway) -> None:
        """It is no beginning of a head, and does not hurry the next one."""
        ask = "GET /healthz HTTP/1.1\r\nhost: localhost\r\n"
        came = await spoken(strict, f"{ask}\r\n", "\r\n", "", "", f"{ask}connection: close\r\n\r\n", pause=0.15)
        assert 2 == (came[1] + came[2]).count(b'{"status":"ok"}')

    async def test_a_head_may_be_cut_anywhere(self, redis_url: str) -> None:
        """Also behind another request, and where an empty line would be none."""
        ask = "GET /healthz HTTP/1.1\r\nhost: localhost\r\n"
        last = f"{ask}connection: close\r\n\r\n"
        async with gateway(redis_url) as front:
            for cut in range(1, len(last)):
                status, _, rest = await spoken(front, f"{ask}\r\n{last[:cut]}", last[cut:], pause=0.001)
                assert (200, 2) == (status, rest.count(b'{"status":"ok"}')), last[:cut]

    async def test_empty_lines_hold_no_connection(self, redis_url: str) -> None:
        """However many come."""
        async with gateway(redis_url, head_s=0.2) as front:
            assert 0 == (await spoken(front, *["\r\n"] * 100, pause=0.02))[0]

    async def test_a_silent_connection_is_closed(self, strict: Gateway) -> None:
        """Without a word: nothing was asked."""
        assert 0 == (await spoken(strict))[0]

    async def test_a_body_that_stops_is_cut_off(self, strict: Gateway) -> None:
        """After the longest silence."""
        status, _, body = await spoken(strict, f"{HEAD}content-length: 100\r\n\r\n", "{")
        assert (408, "body_timeout") == (status, code_of(body))

    async def test_a_body_that_trickles_is_cut_off(self, strict: Gateway) -> None:
        """One byte now and then is no progress."""
        status, _, body = await spoken(strict, f"{HEAD}content-length: 900\r\n\r\n", *"{" * 100, pause=0.1)
        assert (408, "body_timeout") == (status, code_of(body))

    async def test_a_client_that_does_not_read_is_cut_off(self, redis_url: str, engine: ScriptedEngine) -> None:
        """Its connection and its request in the engine are given up; it must not hold either for ever."""
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "stream": True})
        async with serving(redis_url, engine, concurrency=1, reserve=0), gateway(redis_url, stall_s=0.3) as front:
            _, writer = await asyncio.open_connection("127.0.0.1", front.port, limit=1024)
            writer.write(f"{HEAD}content-length: {len(body)}\r\n\r\n{body}".encode())
            request = await engine.next()
            async with asyncio.timeout(20):
                while not request.aborted.is_set():
                    request.say("x", chunk("x" * 100_000))
                    await asyncio.sleep(0.01)
            writer.close()

    async def test_what_is_no_http_is_told_so(self, strict: Gateway) -> None:
        """In the same shape as everything else."""
        status, _, body = await spoken(strict, "\x16\x03\x01 hello\r\n\r\n")
        assert (400, "bad_request") == (status, code_of(body))

    async def test_two_lengths_are_refused(self, strict: Gateway) -> None:
        """A body of which two servers could see two ends is how requests are smuggled."""
        both = f"{HEAD}content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
        assert 400 == (await spoken(strict, both))[0]


class TestManyConnections:
    """Connections that do nothing, and more than there may be."""

    async def test_a_thousand_idle_connections_keep_nobody_out(self, redis_url: str) -> None:
        """Requests are served beside them."""
        async with gateway(redis_url) as front:
            idle = [await asyncio.open_connection("127.0.0.1", front.port) for _ in range(1000)]
            began = time.monotonic()
            async with front.get("/healthz") as response:
                assert 200 == response.status
            assert time.monotonic() - began < 2
            for _, writer in idle:
                writer.close()

    async def test_one_connection_too_many_is_told_so(self, redis_url: str) -> None:
        """503 in OpenAI's shape, and those that are there go on."""
        async with gateway(redis_url, max_connections=2) as front:
            held = [await asyncio.open_connection("127.0.0.1", front.port) for _ in range(2)]
            status, _, body = await spoken(front, "GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert (503, "overloaded") == (status, code_of(body))
            reader, writer = held[0]
            writer.write(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b"200" in await reader.readline()
            for _, writer in held:
                writer.close()


class TestCors:
    """Web pages of other origins."""

    ASK: ClassVar = {"origin": "https://chat.example", "access-control-request-method": "POST"}

    async def test_it_is_off_by_default(self, front: Gateway) -> None:
        """No page may call the gateway from a browser."""
        async with front.http.options(front.base + CHAT, headers=self.ASK) as response:
            assert 403 == response.status
            assert "access-control-allow-origin" not in response.headers

    async def test_an_origin_that_is_allowed_may_call(self, redis_url: str) -> None:
        """And read the errors, too."""
        async with gateway(redis_url, cors_origins=("https://chat.example",)) as front:
            async with front.http.options(front.base + CHAT, headers=self.ASK) as response:
                assert (200, "https://chat.example") == (
                    response.status,
                    response.headers["access-control-allow-origin"],
                )
            async with front.post(CHAT, b"{", {"origin": "https://chat.example"}) as response:
                assert "access-control-allow-origin" in response.headers
            async with front.post(CHAT, b"{", {"origin": "https://other.example"}) as response:
                assert "access-control-allow-origin" not in response.headers


class TestProbes:
    """What balancers ask."""

    async def test_ready_means_that_a_worker_serves_a_model(self, redis_url: str, front: Gateway) -> None:
        """And that a job can be claimed and written now."""
        async with front.get("/readyz") as response:
            told = await response.json()
        assert (200, ["model"]) == (response.status, told["models"])
        assert told["claim_ms"] > 0

    async def test_without_a_worker_it_is_not_ready(self, redis_url: str) -> None:
        """But it lives."""
        async with gateway(redis_url) as front:
            async with front.get("/readyz") as response:
                assert 503 == response.status
                assert "no_worker" == (await error_of(response))["code"]
            async with front.get("/healthz") as response:
                assert 200 == response.status

    async def test_models_are_those_of_live_workers(self, front: Gateway) -> None:
        """In OpenAI's form; an unknown one is 404."""
        async with front.get("/v1/models") as response:
            told = await response.json()
        assert ("list", ["model"]) == (told["object"], [model["id"] for model in told["data"]])
        assert {"id", "object", "created", "owned_by"} == set(told["data"][0])
        async with front.get("/v1/models/model") as response:
            assert told["data"][0] == await response.json()
        async with front.get("/v1/models/org/other") as response:
            assert 404 == response.status
            assert "model_not_found" == (await error_of(response))["code"]
