"""Chat through the gateway: what a client is sent, and what the engine is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from llmq.gateway.vigil import Patience
from tests.engine.scripted import Request, ScriptedEngine
from tests.gateway.serving import Gateway, chunk, events, gateway, say_all, usage_chunk, whole
from tests.redis.serving import serving


class TestWhole:
    """Answers that are not streamed."""

    async def test_the_engines_answer_comes_byte_for_byte(self, front: Gateway, engine: ScriptedEngine) -> None:
        """Spaces, order and unknown fields of the body are the engine's."""
        body = b'{"z": 1,  "choices": [], "odd": {"k": 1e2}}'
        engine.on_request = lambda request: request.answer(body=body)

        async with front.chat() as response:
            assert (200, body) == (response.status, await response.read())
            assert "application/json" == response.headers["content-type"]
            assert response.headers["x-llmq-job-id"]

    @pytest.mark.parametrize("status", [400, 404, 422, 501])
    async def test_a_refusal_keeps_status_and_body(self, front: Gateway, engine: ScriptedEngine, status: int) -> None:
        """Whatever shape the engine gives it."""
        body = b'{"object":"error","detail":["no"]}'
        engine.on_request = lambda request: request.answer(status, body)

        for streams in (False, True):
            async with front.chat(stream=streams) as response:
                assert (status, body) == (response.status, await response.read())

    async def test_a_refusal_in_plain_text_stays_plain(self, front: Gateway, engine: ScriptedEngine) -> None:
        """What was no JSON is not made JSON."""
        engine.on_request = lambda request: request.answer(404, b'"Not here \\u00e4"')

        async with front.chat() as response:
            assert (404, "Not here ä") == (response.status, await response.text())
            assert "text/plain" == response.content_type

    async def test_the_body_reaches_the_engine_as_it_was_written(self, front: Gateway, engine: ScriptedEngine) -> None:
        """Order, big numbers, fields that come twice and unknown ones: all of it stays."""
        engine.on_request = lambda request: request.answer(body=whole("x"))
        raw = (
            b'{"zeta":1e400, "messages" : [ {"role":"user","content":"hi \\ud800"} ] ,'
            b'"big":18446744073709551616123,"a":1.0,"a":2,"nothing":null}'
        )

        async with front.post("/v1/chat/completions", raw) as response:
            assert 200 == response.status

        assert raw == engine.started[0].job.raw

    @pytest.mark.parametrize(
        ("path", "body"),
        [
            ("/v1/completions", {"prompt": "hi"}),
            ("/v1/embeddings", {"input": ["hi"]}),
            ("/v1/responses", {"input": "hi"}),
        ],
    )
    async def test_other_endpoints_pass_through(
        self, front: Gateway, engine: ScriptedEngine, path: str, body: dict[str, object]
    ) -> None:
        """The engine is asked at the same path."""
        engine.on_request = lambda request: request.answer(body=b'{"ok": true}')

        async with front.post(path, body) as response:
            assert b'{"ok": true}' == await response.read()

        assert path == engine.started[0].job.url


class TestStream:
    """Answers that are streamed."""

    async def test_chunks_come_in_order_and_as_they_were(self, front: Gateway, engine: ScriptedEngine) -> None:
        """Each chunk is an event of its own, byte for byte; [DONE] is last."""
        odd = b'{"choices": [{"index":0,"delta":{"tool_calls":[{"index":0}]}}],  "unknown": [1e5]}'

        def say(request: Request) -> None:
            for text in ("one", "two"):
                request.say(text, chunk(text))
            request.say("", odd)
            request.say("", chunk())
            request.answer(body=whole("onetwo"))

        engine.on_request = say
        async with front.chat(stream=True) as response:
            came = [event async for event in events(response)]

        assert "text/event-stream" == response.content_type
        expected = [chunk("one"), chunk("two"), odd, chunk(), b"[DONE]"]
        assert [b"data: " + data for data in expected] == [event.encode() for event in came]

    async def test_the_first_token_is_sent_when_it_comes(self, front: Gateway, engine: ScriptedEngine) -> None:
        """Nothing waits for the end of the answer."""
        engine.on_request = lambda request: request.say("first", chunk("first"))
        async with front.chat(stream=True) as response:
            request = engine.running[0]
            async with asyncio.timeout(5):
                assert f"data: {chunk('first').decode()}" == await anext(events(response))
            request.answer(body=whole("first"))

    async def test_half_a_character_harms_no_stream(self, front: Gateway, engine: ScriptedEngine) -> None:
        """Engines that cut UTF-16 write half a surrogate pair: it passes, and the worker's later streams come, too."""
        half = b'{"choices": [{"index": 0, "delta": {"content": "\\ud83d"}}]}'

        def say(request: Request) -> None:
            request.say("one", chunk("one"))
            request.say("\ud83d", half)
            request.say("two", chunk("two"))

        engine.on_request = say
        for _ in range(2):
            async with front.chat(stream=True) as response, asyncio.timeout(5):
                told = events(response)
                came = [(await anext(told)).removeprefix("data: ").encode() for _ in range(3)]
                engine.running[0].answer(body=whole("one?two"))
            assert [chunk("one"), half, chunk("two")] == came

    @pytest.mark.parametrize("asked", [True, False])
    async def test_usage_is_shown_to_who_asked_for_it(
        self, front: Gateway, engine: ScriptedEngine, asked: bool
    ) -> None:
        """The engine is always asked for it; its chunk is taken out again where the client did not ask."""
        engine.on_request = lambda request: say_all(request, "a", "b")

        async with front.chat(stream=True, stream_options={"include_usage": True} if asked else None) as response:
            came = [event async for event in events(response)]

        assert asked == (f"data: {usage_chunk().decode()}" in came)
        assert "data: [DONE]" == came[-1]
        assert 4 + asked == len(came)

    async def test_a_chunk_on_several_lines_is_one_event(self, front: Gateway, engine: ScriptedEngine) -> None:
        """Each line of it is a line of data, which clients put together again."""

        def say(request: Request) -> None:
            request.say("x", b'{\n"choices": []}')
            request.answer(body=whole("x"))

        engine.on_request = say
        async with front.chat(stream=True) as response:
            assert 'data: {\ndata: "choices": []}' == await anext(events(response))

    async def test_a_queued_stream_shows_signs_of_life(self, redis_url: str, engine: ScriptedEngine) -> None:
        """Comments, which clients pass over, before the first token and in long gaps; then the answer as always."""
        async with gateway(redis_url, patience=Patience(0.1)) as front, front.chat(stream=True) as response:
            assert 200 == response.status
            told = events(response)
            assert ": waiting" == await anext(told)
            async with serving(redis_url, engine, concurrency=1, reserve=0):
                request = await engine.next()
                request.say("one", chunk("one"))
                came = [event async for event in _until(told, chunk("one"))]
                assert ": waiting" == await anext(told)
                say_all(request, "two")
                came = [event async for event in told if not event.startswith(":")]
        assert [f"data: {chunk('two').decode()}", f"data: {chunk().decode()}", "data: [DONE]"] == came

    async def test_a_refusal_after_a_sign_of_life_is_an_event(self, redis_url: str, engine: ScriptedEngine) -> None:
        """The status is sent by then: the engine's error follows as the last event, and no [DONE]."""
        refusal = b'{"error":{"message":"too long","type":"invalid_request_error","code":400}}'
        engine.on_request = lambda request: request.answer(400, refusal)
        async with (
            gateway(redis_url, patience=Patience(0.1)) as front,
            front.chat(stream=True) as response,  # begun by a sign of life: there is no worker yet
            serving(redis_url, engine, concurrency=1, reserve=0),
        ):
            came = [event async for event in events(response) if not event.startswith(":")]
        assert [f"data: {refusal.decode()}"] == came

    async def test_events_of_responses_keep_their_names(self, front: Gateway, engine: ScriptedEngine) -> None:
        """The official client tells events apart by type; others by the name."""
        created, text = (
            b'{"type":"response.created","response":{}}',
            b'{"type":"response.output_text.delta","delta":"x"}',
        )
        done = b'{"type":"response.completed","response":{"output":[]}}'

        def say(request: Request) -> None:
            request.say("", created)
            request.say("x", text)
            request.say("", done)
            request.answer(body=b'{"output":[]}')

        engine.on_request = say
        async with front.post("/v1/responses", {"input": "hi", "stream": True}) as response:
            came = [event async for event in events(response)]

        names = ["response.created", "response.output_text.delta", "response.completed"]
        data = [created, text, done]
        assert [f"event: {name}\ndata: {d.decode()}" for name, d in zip(names, data, strict=True)] == came


async def _until(told: AsyncIterator[str], data: bytes) -> AsyncIterator[str]:
    """Yield what comes up to an event."""
    async for event in told:
        yield event
        if event == f"data: {data.decode()}":
            return
