"""The HTTP engine against recorded answers, and against servers that misbehave in every way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest

from llmq.scheduler.job import Job
from llmq.scheduler.lease import Usage
from llmq.workers.engines.base import AnswerTooLarge, EngineAnswer, EngineGone, EngineOverloaded, EngineUnclear
from llmq.workers.engines.http import HttpEngine
from tests.engine.fake import (
    CHAT_BODY,
    CHUNKED_HEAD,
    DONE,
    SAMPLES,
    STREAM_HEAD,
    FakeEngine,
    Reply,
    body_of,
    chat,
    chunked,
    opened,
    page,
    piece,
    sample,
    stream,
)


@pytest.fixture
async def fake() -> AsyncIterator[FakeEngine]:
    async with FakeEngine().serving() as server:
        yield server


@pytest.fixture
async def engine(fake: FakeEngine) -> AsyncIterator[HttpEngine]:
    async with opened(fake.url) as engine:
        yield engine


async def run_against(
    fake: FakeEngine, engine: HttpEngine, reply: bytes | Reply, job: Job | None = None
) -> EngineAnswer:
    """Run one chat request against a reply."""
    fake.replies["/v1/chat/completions"] = reply
    return await engine.run(job or chat(model="m"))


class TestAnswers:
    """What comes back from engines that behave, each in its own way."""

    @pytest.mark.parametrize("name", ["llamacpp", "vllm", "transformers"])
    async def test_a_recorded_stream_is_an_answer(self, fake: FakeEngine, engine: HttpEngine, name: str) -> None:
        """Three engines, of which transformers never sends [DONE]."""
        lines = [line for _, line in sample(f"{name}-chat-stream")["sse_lines"]]
        deltas: list[tuple[str, bytes]] = []
        fake.replies["/v1/chat/completions"] = STREAM_HEAD + "".join(f"{line}\r\n\r\n" for line in lines).encode()

        answer = await engine.run(chat(model="m"), lambda text, chunk: deltas.append((text, chunk)))

        chunks = [line.removeprefix("data: ").encode() for line in lines if "[DONE]" not in line]
        body = body_of(answer)
        assert chunks == [chunk for _, chunk in deltas]
        assert body["choices"][0]["message"]["content"] == "".join(text for text, _ in deltas)
        assert "" == deltas[0][0], "the chunk with the role has no text"
        assert (200, 12) == (answer.status_code, answer.usage.completion_tokens)
        assert json.loads(chunks[0])["id"] == answer.request_id

    async def test_a_stream_is_asked_for_with_its_usage(self, fake: FakeEngine, engine: HttpEngine) -> None:
        """Whatever the job asked for; its other fields are sent as they are."""
        job = chat(model="m", stream=False, stream_options={"x": 1}, unknown=[1, None])

        await run_against(fake, engine, stream(piece("a", "stop")), job)

        options = {"x": 1, "include_usage": True}
        expected = {**CHAT_BODY, "model": "m", "unknown": [1, None], "stream": True, "stream_options": options}
        assert expected == fake.body("/v1/chat/completions")

    @pytest.mark.parametrize("field", [{"prompt_logprobs": 1}, {"best_of": 2}, {"use_beam_search": True}])
    async def test_what_engines_refuse_to_stream_is_asked_for_whole(
        self, fake: FakeEngine, engine: HttpEngine, field: dict[str, Any]
    ) -> None:
        """Streaming is llmq's wish: it must not make the engine refuse what the caller asked for."""
        whole = {"id": "w", "choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]}
        fake.replies["/v1/completions"] = page(200, whole)

        answer = await engine.run(Job("/v1/completions", {"prompt": "x", "model": "m", "stream": True, **field}))

        assert {"prompt": "x", "model": "m", **field} == fake.body("/v1/completions")
        assert whole == body_of(answer)

    @pytest.mark.parametrize(
        ("model", "sent"),
        [({}, "m1"), ({"model": "default"}, "m1"), ({"model": None}, "m1"), ({"model": "other"}, "other")],
    )
    async def test_the_default_model_is_the_first_that_the_engine_lists(
        self, fake: FakeEngine, engine: HttpEngine, model: dict[str, Any], sent: str
    ) -> None:
        """Any other name is sent unchanged."""
        await run_against(fake, engine, stream(piece("a", "stop")), chat(**model))

        assert sent == fake.body("/v1/chat/completions")["model"]

    async def test_a_plain_body_in_answer_to_a_stream_request_is_accepted(
        self, fake: FakeEngine, engine: HttpEngine
    ) -> None:
        """It is handed on as the one chunk that it would have been."""
        whole = sample("vllm-chat")["body"]
        deltas: list[tuple[str, Any]] = []
        fake.replies["/v1/chat/completions"] = page(200, whole, X_Request_Id="r7")

        answer = await engine.run(chat(model="m"), lambda text, chunk: deltas.append((text, json.loads(chunk))))

        assert whole == body_of(answer)
        assert ("r7", Usage(39, 12)) == (answer.request_id, answer.usage)
        [(text, chunk), (_, usage)] = deltas
        assert ("se", "chat.completion.chunk") == (text, chunk["object"])
        assert whole["choices"][0]["message"] == chunk["choices"][0]["delta"]
        assert "usage" not in chunk, "it has a chunk of its own, which is taken out where nobody asked for it"
        assert ([], whole["usage"]) == (usage["choices"], usage["usage"])

    async def test_tool_calls_in_a_plain_body_have_their_places(self, fake: FakeEngine, engine: HttpEngine) -> None:
        """In a stream each says which one it is; the official clients look for that."""
        calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in "ab"]
        message = {"role": "assistant", "content": None, "tool_calls": calls}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        body = {"object": "chat.completion", "choices": [choice]}
        deltas: list[Any] = []
        fake.replies["/v1/chat/completions"] = page(200, body)

        answer = await engine.run(chat(model="m"), lambda text, chunk: deltas.append(json.loads(chunk)))

        assert body == body_of(answer)
        [chunk] = deltas
        expected = [{"index": place, **call} for place, call in enumerate(calls)]
        assert expected == chunk["choices"][0]["delta"]["tool_calls"]

    async def test_halves_of_a_character_are_said_as_one(self, fake: FakeEngine, engine: HttpEngine) -> None:
        """Engines that cut UTF-16 write half a surrogate pair into each chunk; the chunks pass as they are."""
        texts = ("a", "\ud83d", "\ude00b", "\ud83d", "c", "d\ud83d")
        said: list[str] = []
        chunks = [*map(piece, texts), piece("", "stop")]
        fake.replies["/v1/chat/completions"] = stream(*chunks)

        answer = await engine.run(chat(model="m"), lambda text, chunk: said.append(text))

        assert ["a", "", "\U0001f600b", "", "\ufffdc", "d", "\ufffd"] == said
        assert "".join(said) == body_of(answer)["choices"][0]["message"]["content"]

    async def test_a_large_prompt_is_sent(self, fake: FakeEngine, engine: HttpEngine) -> None:
        """A chat body may have 16 MiB."""
        messages = [{"role": "user", "content": "x" * 12 * 2**20}]

        await run_against(fake, engine, stream(piece("a", "stop")), chat(model="m", messages=messages))

        assert messages == fake.body("/v1/chat/completions")["messages"]

    async def test_embeddings_are_sent_whole(self, fake: FakeEngine, engine: HttpEngine) -> None:
        """There is no stream of them."""
        fake.replies["/v1/embeddings"] = page(200, sample("llamacpp-embeddings"))

        answer = await engine.run(Job("/v1/embeddings", {"input": ["a", "b"], "model": "m"}))

        assert {"input": ["a", "b"], "model": "m"} == fake.body("/v1/embeddings")
        assert sample("llamacpp-embeddings") == body_of(answer)
        assert Usage(4, 0) == answer.usage

    async def test_responses_end_with_their_last_event(self, fake: FakeEngine, engine: HttpEngine) -> None:
        """The engine may keep the connection open after it."""
        recorded = sample("transformers-responses")["body"]
        texts: list[str] = []

        async def reply(writer: asyncio.StreamWriter) -> None:
            writer.write(CHUNKED_HEAD + chunked(recorded))
            await fake.hung_up.wait()

        fake.replies["/v1/responses"] = reply
        answer = await engine.run(
            Job("/v1/responses", {"input": "x", "model": "m"}), lambda text, _: texts.append(text)
        )

        assert "completed" == body_of(answer)["status"]
        assert body_of(answer)["output"][0]["content"][0]["text"] == "".join(texts)

    async def test_the_key_is_sent_as_a_bearer_token(self, fake: FakeEngine) -> None:
        """With every request."""
        async with opened(f"{fake.url}/v1/", api_key="secret") as engine:
            await run_against(fake, engine, stream(piece("a", "stop")), chat())

        assert {"Bearer secret"} == {headers["authorization"] for _, headers, _ in fake.asked}

    async def test_separators_of_unicode_come_through(self, fake: FakeEngine, engine: HttpEngine) -> None:
        """F-135: U+2028, U+2029 and U+0085 inside an answer, unescaped, are text."""
        text = "a\u2028b\u2029c\u0085d"
        event = json.dumps(piece(text, "stop"), ensure_ascii=False)

        answer = await run_against(fake, engine, STREAM_HEAD + f"data: {event}\n\n{DONE}".encode())

        assert text == body_of(answer)["choices"][0]["message"]["content"]


class TestErrors:
    """Each row of the table of errors in docs/engines.md."""

    @pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 409, 413, 422, 501])
    async def test_the_callers_fault_is_an_answer(self, fake: FakeEngine, engine: HttpEngine, status: int) -> None:
        """F-116: never retried; status and body are the engine's."""
        answer = await run_against(fake, engine, page(status, {"error": {"message": "no"}}, X_Request_Id="r1"))

        assert (status, {"error": {"message": "no"}}, "r1") == (answer.status_code, body_of(answer), answer.request_id)

    @pytest.mark.parametrize(
        "name",
        [
            path.stem
            for path in sorted(SAMPLES.glob("*-err-*.json"))
            if 400 <= json.loads(path.read_text())["status"] < 500
        ],
    )
    async def test_recorded_refusals_are_answers(self, fake: FakeEngine, engine: HttpEngine, name: str) -> None:
        """F-116: error objects, detail strings and detail lists are kept as they came."""
        recorded = sample(name)

        answer = await run_against(fake, engine, page(recorded["status"], recorded["body"]))

        assert (recorded["status"], recorded["body"]) == (answer.status_code, body_of(answer))

    async def test_a_refusal_in_plain_text_becomes_a_json_string(self, fake: FakeEngine, engine: HttpEngine) -> None:
        """An answer's body is always JSON."""
        answer = await run_against(fake, engine, page(400, 'say "please"'))

        assert 'say "please"' == body_of(answer)

    async def test_a_refusal_is_bounded(self, fake: FakeEngine) -> None:
        """An engine that repeats the request in its error cannot fill Redis with it."""
        async with opened(fake.url, max_answer_bytes=1000) as engine:
            answer = await run_against(fake, engine, page(400, "x" * 5000))

        assert "x" * 1000 == body_of(answer)

    @pytest.mark.parametrize("status", [408, 425, 429, 503, 529])
    async def test_overload_is_overload(self, fake: FakeEngine, engine: HttpEngine, status: int) -> None:
        """Without Retry-After the worker chooses."""
        with pytest.raises(EngineOverloaded) as error:
            await run_against(fake, engine, page(status, "busy"))

        assert error.value.retry_after is None

    @pytest.mark.parametrize(
        ("header", "low", "high"),
        [
            ("7", 7, 7),
            ("0.5", 0.5, 0.5),
            (timedelta(seconds=600), 500, 600),
            (timedelta(seconds=-600), 0, 0),
        ],
        ids=["seconds", "half a second", "a date to come", "a date that is over"],
    )
    async def test_retry_after_is_read(
        self, fake: FakeEngine, engine: HttpEngine, header: str | timedelta, low: float, high: float
    ) -> None:
        """In seconds, or as a date."""
        if isinstance(header, timedelta):
            header = format_datetime(datetime.now(UTC) + header, usegmt=True)
        with pytest.raises(EngineOverloaded) as error:
            await run_against(fake, engine, page(429, "busy", Retry_After=header))

        assert error.value.retry_after is not None
        assert low <= error.value.retry_after <= high

    @pytest.mark.parametrize("header", ["soon", "-3", ""])
    async def test_a_retry_after_that_says_nothing_is_ignored(
        self, fake: FakeEngine, engine: HttpEngine, header: str
    ) -> None:
        """Nonsense is no reason to lose a job."""
        with pytest.raises(EngineOverloaded) as error:
            await run_against(fake, engine, page(429, "busy", Retry_After=header))

        assert error.value.retry_after is None

    @pytest.mark.parametrize(
        "reply",
        [
            pytest.param(page(500, "Internal Server Error"), id="plain 500"),
            pytest.param(page(502, "<html>Bad Gateway</html>"), id="a proxy's 502"),
            pytest.param(page(307, b"", Location="http://127.0.0.1:1/"), id="redirect"),
            pytest.param(page(200, "<html>welcome</html>"), id="a web page"),
            pytest.param(page(200, [1, 2]), id="no object"),
            pytest.param(page(204), id="no content"),
            pytest.param(page(200, {"choices": [{"index": 0, "finish_reason": None}]}), id="unfinished body"),
            pytest.param(stream(piece("a")), id="no finish_reason"),
            pytest.param(stream(piece("a"), end=""), id="no finish_reason, no [DONE]"),
            pytest.param(stream(), id="empty stream"),
            pytest.param(stream(piece("a", "abort")), id="aborted by the engine"),
            pytest.param(stream(piece("a"), end="data: {bro"), id="broken JSON"),
            pytest.param(stream([1, 2]), id="a chunk that is no object"),
            pytest.param(stream({"choices": [3]}), id="a choice that is no object"),
            pytest.param(stream(piece("a"), {"error": {"message": "x", "code": 500}}), id="error chunk"),
            pytest.param(stream({"error": "out of luck"}), id="error chunk of text"),
            pytest.param(b"SSH-2.0-OpenSSH_9.6\r\n", id="no HTTP"),
        ],
    )
    async def test_what_nobody_can_blame_is_unclear(self, fake: FakeEngine, engine: HttpEngine, reply: bytes) -> None:
        """Retried with backoff, in limited number; the engine still answers its health."""
        fake.replies["/health"] = page(200, {"status": "ok"})

        with pytest.raises(EngineUnclear) as error:
            await run_against(fake, engine, reply)

        assert error.value.body == b"" or json.loads(error.value.body) is not None
        assert 1 == sum(path == "/v1/chat/completions" for path, _, _ in fake.asked), "nothing is tried twice"

    async def test_an_unclear_error_keeps_status_and_body(self, fake: FakeEngine, engine: HttpEngine) -> None:
        """The last of several attempts shows them."""
        with pytest.raises(EngineUnclear) as error:
            await run_against(fake, engine, page(500, "Internal Server Error"))

        assert (500, b'"Internal Server Error"') == (error.value.status_code, error.value.body)

    @pytest.mark.parametrize(
        ("error", "kind"),
        [
            ({"message": "x", "type": "BadRequestError", "code": 400}, 400),
            ({"message": "x", "type": "exceed_context_size_error"}, 400),
            ({"message": "x", "type": "invalid_request_error", "code": "context_length_exceeded"}, 400),
            ({"message": "x", "code": "404"}, 404),
            ({"message": "x", "type": "overloaded_error"}, EngineOverloaded),
            ({"message": "x", "code": 429, "type": "BadRequestError"}, EngineOverloaded),
            ({"message": "bad request: invalid request", "type": "server_error"}, EngineUnclear),
        ],
    )
    async def test_an_error_in_a_stream_is_sorted_by_status_then_type(
        self, fake: FakeEngine, engine: HttpEngine, error: Any, kind: Any
    ) -> None:
        """Status first; never by the words of the message, which may be the caller's own."""
        reply = stream(piece("a"), {"error": error})

        if isinstance(kind, int):
            answer = await run_against(fake, engine, reply)
            assert (kind, {"error": error}) == (answer.status_code, body_of(answer))
        else:
            with pytest.raises(kind):
                await run_against(fake, engine, reply)

    async def test_an_error_in_a_whole_body_is_sorted_as_in_a_stream(
        self, fake: FakeEngine, engine: HttpEngine
    ) -> None:
        """HTTP 200 with an error object is no answer."""
        with pytest.raises(EngineOverloaded):
            await run_against(fake, engine, page(200, {"error": {"message": "x", "code": 503}}))

    async def test_the_recorded_death_of_vllm_is_an_engine_gone(self, fake: FakeEngine, engine: HttpEngine) -> None:
        """G7: HTTP 200, an error chunk and [DONE] are what a dying vLLM says to each request in flight."""
        lines = sample("vllm-engine-death")["stream"]["last_lines"]
        fake.replies["/health"] = page(200)

        with pytest.raises(EngineGone) as error:
            await run_against(fake, engine, STREAM_HEAD + "".join(f"{line}\n\n" for line in lines).encode())

        assert error.value.in_flight

    async def test_an_answer_about_the_death_of_engines_is_none(self, fake: FakeEngine, engine: HttpEngine) -> None:
        """G7: what a model says of it, in an answer that broke off, makes neither a dead engine nor a suspect."""
        fake.replies["/health"] = page(200)
        said = "vLLM then raises EngineDeadError: EngineCore encountered an issue"

        with pytest.raises(EngineUnclear):
            await run_against(fake, engine, stream(piece(said)))
        choice = {"index": 0, "message": {"content": said}, "finish_reason": "abort"}
        with pytest.raises(EngineUnclear):
            await run_against(fake, engine, page(200, {"choices": [choice]}))

    @pytest.mark.parametrize("health", [page(503), page(502, "<html>")])
    async def test_an_internal_error_of_an_engine_without_health_is_its_death(
        self, fake: FakeEngine, engine: HttpEngine, health: bytes
    ) -> None:
        """G7: the request is a suspect, and spends no attempt."""
        fake.replies["/health"] = health

        with pytest.raises(EngineGone) as error:
            await run_against(fake, engine, stream({"error": {"message": "x", "code": 500}}))

        assert error.value.in_flight

    async def test_an_internal_error_of_an_engine_that_is_gone_by_then_is_its_death(
        self, fake: FakeEngine, engine: HttpEngine
    ) -> None:
        """G7: nobody listens any more."""

        async def reply(writer: asyncio.StreamWriter) -> None:
            fake.stop_listening()
            writer.write(page(500, "Internal Server Error"))

        with pytest.raises(EngineGone) as error:
            await run_against(fake, engine, reply)

        assert error.value.in_flight

    async def test_a_slow_health_is_not_death(
        self, fake: FakeEngine, engine: HttpEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """llama.cpp took 7.8 s for its health under load."""
        monkeypatch.setattr("llmq.workers.engines.http.LIFE_SIGN_TIMEOUT", 0.05)

        async def never(writer: asyncio.StreamWriter) -> None:
            await fake.hung_up.wait()

        fake.replies["/health"] = never
        with pytest.raises(EngineUnclear):
            await run_against(fake, engine, page(500, "Internal Server Error"))

    async def test_a_refused_connection_has_nothing_in_flight(self, fake: FakeEngine, engine: HttpEngine) -> None:
        """The job is handed back as if it had never been claimed."""
        fake.stop_listening()

        with pytest.raises(EngineGone, match="no connection") as error:
            await engine.run(chat(model="m"))

        assert not error.value.in_flight

    async def test_a_refused_connection_while_the_model_is_asked_for_has_nothing_in_flight(
        self, fake: FakeEngine, engine: HttpEngine
    ) -> None:
        """The default model is looked up before anything is sent."""
        fake.stop_listening()

        with pytest.raises(EngineGone) as error:
            await engine.run(chat())

        assert not error.value.in_flight

    @pytest.mark.parametrize(
        "sent",
        [
            pytest.param(b"", id="before the answer"),
            pytest.param(b"HTTP/1.1 200 OK\r\nContent-", id="in the head"),
            pytest.param(CHUNKED_HEAD + chunked(f"data: {json.dumps(piece('a'))}\n\n"), id="in the stream"),
            pytest.param(page(200, {"choices": []})[:-3], id="in the body"),
        ],
    )
    async def test_a_cut_in_mid_request_has_it_in_flight(
        self, fake: FakeEngine, engine: HttpEngine, sent: bytes
    ) -> None:
        """G7: the request is a suspect, and the engine is probed."""
        with pytest.raises(EngineGone) as error:
            await run_against(fake, engine, sent)

        assert error.value.in_flight

    async def test_a_reset_in_mid_request_has_it_in_flight(self, fake: FakeEngine, engine: HttpEngine) -> None:
        """G7: a crash sends RST rather than FIN where data was left unread."""

        async def reset(writer: asyncio.StreamWriter) -> None:
            writer.write(CHUNKED_HEAD)
            await writer.drain()
            sock = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            writer.transport.abort()

        with pytest.raises(EngineGone) as error:
            await run_against(fake, engine, reset)

        assert error.value.in_flight

    async def test_an_engine_that_falls_silent_is_given_up(self, fake: FakeEngine) -> None:
        """With an idle timeout; without one silence is patience."""
        async with opened(fake.url, idle_timeout=0.05) as engine:

            async def silent(writer: asyncio.StreamWriter) -> None:
                writer.write(CHUNKED_HEAD + chunked(f"data: {json.dumps(piece('a'))}\n\n"))
                await fake.hung_up.wait()

            with pytest.raises(EngineUnclear, match="silent"):
                await run_against(fake, engine, silent)


class TestBounds:
    """What an engine may make a worker hold."""

    async def test_an_answer_that_grows_too_large_is_aborted(self, fake: FakeEngine) -> None:
        """The connection is closed, so that the engine stops."""
        async with opened(fake.url, max_answer_bytes=10_000) as engine:

            async def endless(writer: asyncio.StreamWriter) -> None:
                writer.write(STREAM_HEAD)
                with contextlib.suppress(ConnectionError):
                    while True:
                        writer.write(f"data: {json.dumps(piece('x' * 1000))}\n\n".encode())
                        await writer.drain()
                fake.hung_up.set()

            with pytest.raises(AnswerTooLarge, match="10,000"):
                await run_against(fake, engine, endless)
            await asyncio.wait_for(fake.hung_up.wait(), 5)

    async def test_a_long_stream_of_a_short_answer_is_not_too_large(self, fake: FakeEngine) -> None:
        """The answer is measured, not its chunks, which repeat their envelope with every token."""
        async with opened(fake.url, max_answer_bytes=20_000) as engine:
            events = [piece("x", system_fingerprint="f" * 100) for _ in range(10_000)]

            answer = await run_against(fake, engine, stream(*events, piece("", "stop")))

        assert "x" * 10_000 == body_of(answer)["choices"][0]["message"]["content"]

    @pytest.mark.parametrize(
        "reply",
        [
            pytest.param(page(200, {"choices": [], "x": "y" * 2000}), id="whole"),
            pytest.param(stream(piece("x" * 2000, "stop")), id="one chunk"),
            pytest.param(STREAM_HEAD + b"data: " + b"x" * 3 * 2**20, id="a line without end"),
        ],
    )
    async def test_every_form_of_an_answer_is_bounded(self, fake: FakeEngine, reply: bytes) -> None:
        """A job with such an answer ends with `result_too_large`."""
        async with opened(fake.url, max_answer_bytes=1000) as engine:
            with pytest.raises(AnswerTooLarge):
                await run_against(fake, engine, reply)

    async def test_cancelling_closes_the_connection_at_once(self, fake: FakeEngine, engine: HttpEngine) -> None:
        """G14: an engine aborts a stream whose client has gone."""
        started = asyncio.Event()

        async def slow(writer: asyncio.StreamWriter) -> None:
            writer.write(CHUNKED_HEAD + chunked(f"data: {json.dumps(piece('a'))}\n\n"))
            await fake.hung_up.wait()

        fake.replies["/v1/chat/completions"] = slow
        run = asyncio.create_task(engine.run(chat(model="m"), lambda *_: started.set()))
        await started.wait()
        run.cancel()

        await asyncio.wait_for(fake.hung_up.wait(), 1)
        with pytest.raises(asyncio.CancelledError):
            await run

    async def test_hundreds_of_streams_run_side_by_side(self, fake: FakeEngine, engine: HttpEngine) -> None:
        """No limit but the worker's slots: all of them are open before the first one ends."""
        count, opened, all_open = 300, 0, asyncio.Event()

        async def wait_for_all(writer: asyncio.StreamWriter) -> None:
            nonlocal opened
            opened += 1
            if opened == count:
                all_open.set()
            await all_open.wait()
            writer.write(stream(piece("a", "stop")))

        fake.replies["/v1/chat/completions"] = wait_for_all
        answers = await asyncio.gather(*(engine.run(chat(model="m")) for _ in range(count)))

        assert [200] * count == [answer.status_code for answer in answers]
