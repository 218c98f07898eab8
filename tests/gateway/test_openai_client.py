"""The official Python client, unchanged, against the gateway: over a simulated GPU, and over a real engine."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import openai
import pytest
from redis.asyncio import Redis

from llmq.workers.engines.base import EngineGone
from llmq.workers.engines.http import HttpEngine
from llmq.workers.engines.sim import SimEngine
from tests.conftest import OwnServer
from tests.engine import LETTERS, LlamaServer, llama_server
from tests.engine.scripted import ScriptedEngine
from tests.gateway.serving import Gateway, chunk, gateway, say_all
from tests.redis.serving import KEYS, configure, serving, until

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Tell me of the sea."}]


@pytest.fixture(scope="module")
def llama() -> Iterator[LlamaServer]:
    """A real engine with a tiny model."""
    with llama_server(slots=2) as server:
        yield server


@pytest.fixture(params=["sim", "llama.cpp"])
async def served(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[Gateway]:
    """A gateway in front of each of the two engines."""
    if request.param == "sim":
        engine: SimEngine | HttpEngine = SimEngine.from_url("sim://?instant=1")
    else:
        engine = HttpEngine(request.getfixturevalue("llama").url)
    async with serving(redis_url, engine, concurrency=2, reserve=0), gateway(redis_url) as front:
        yield front
    await engine.close()


class TestEveryEngine:
    """What holds whichever engine is behind it."""

    async def test_chat(self, served: Gateway) -> None:
        """A whole completion, with its usage."""
        async with served.openai() as client:
            done = await client.chat.completions.create(
                model="default", messages=MESSAGES, max_tokens=5, logit_bias=LETTERS
            )
        assert done.choices[0].message.content
        assert done.usage is not None
        assert 5 == done.usage.completion_tokens

    @pytest.mark.parametrize("usage", [True, False])
    async def test_streamed_chat(self, served: Gateway, usage: bool) -> None:
        """Piece by piece, ended by a reason; usage only where it was asked for."""
        async with served.openai() as client:
            stream = await client.chat.completions.create(
                model="default",
                messages=MESSAGES,
                max_tokens=5,
                logit_bias=LETTERS,
                stream=True,
                stream_options={"include_usage": True} if usage else openai.omit,
            )
            chunks = [piece async for piece in stream]
        assert 1 < len(chunks)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert "length" in [c.choices[0].finish_reason for c in chunks if c.choices]
        assert usage == any(c.usage for c in chunks)

    async def test_the_client_without_asyncio(self, served: Gateway) -> None:
        """The same, from a thread."""

        def ask() -> tuple[str | None, int]:
            with openai.OpenAI(base_url=f"{served.base}/v1", api_key="none", max_retries=0) as client:
                done = client.chat.completions.create(
                    model="default", messages=MESSAGES, max_tokens=5, logit_bias=LETTERS
                )
                stream = client.chat.completions.create(
                    model="default", messages=MESSAGES, max_tokens=5, logit_bias=LETTERS, stream=True
                )
                return done.choices[0].message.content, len(list(stream))

        text, chunks = await asyncio.to_thread(ask)
        assert text
        assert 1 < chunks

    async def test_completions(self, served: Gateway) -> None:
        """Whole and streamed."""
        async with served.openai() as client:
            done = await client.completions.create(model="default", prompt="The sea", max_tokens=16, logit_bias=LETTERS)
            stream = await client.completions.create(
                model="default", prompt="The sea", max_tokens=16, logit_bias=LETTERS, stream=True
            )
            pieces = [piece async for piece in stream]
        assert done.choices[0].text
        assert done.choices[0].text == "".join(piece.choices[0].text for piece in pieces if piece.choices)

    async def test_responses(self, served: Gateway) -> None:
        """Whole, and as events of which the last one is the whole response."""
        async with served.openai() as client:
            done = await client.responses.create(
                model="default", input="The sea", max_output_tokens=16, extra_body={"logit_bias": LETTERS}
            )
            stream = await client.responses.create(
                model="default", input="The sea", max_output_tokens=16, extra_body={"logit_bias": LETTERS}, stream=True
            )
            events = [event async for event in stream]
        assert done.output_text
        assert "response.created" == events[0].type
        assert events[-1].type in ("response.completed", "response.incomplete")

    async def test_models(self, served: Gateway) -> None:
        """The list, and each one of it."""
        async with served.openai() as client:
            models = [model.id async for model in client.models.list()]
            assert models
            assert models[0] == (await client.models.retrieve(models[0])).id
            with pytest.raises(openai.NotFoundError):
                await client.models.retrieve("org/no-such-model")

    async def test_a_stream_that_is_left_stops_the_engine(self, served: Gateway, redis: Redis) -> None:
        """The client closes it after the first piece; within a second nothing runs any more (G14)."""
        async with served.openai() as client:
            stream = await client.chat.completions.create(
                model="default", messages=MESSAGES, max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
            )
            async for _ in stream:
                break
            await stream.close()
            await until(lambda: _nothing_runs(redis), within=5)


class TestSimulated:
    """What the simulated GPU can show."""

    @pytest.fixture
    async def front(self, redis_url: str) -> AsyncIterator[Gateway]:
        """A gateway in front of it."""
        engine = SimEngine.from_url("sim://?instant=1")
        async with serving(redis_url, engine, concurrency=2, reserve=0), gateway(redis_url) as front:
            yield front

    @pytest.mark.parametrize("form", ["float", "base64"])
    async def test_embeddings(self, front: Gateway, form: Literal["float", "base64"]) -> None:
        """The client asks for base64 by itself, and takes numbers too."""
        async with front.openai() as client:
            done = await client.embeddings.create(model="default", input=["a", "b"], encoding_format=form)
        assert [0, 1] == [one.index for one in done.data]
        assert len(done.data[0].embedding) > 1

    async def test_a_picture_passes(self, front: Gateway) -> None:
        """As the client writes it into the body."""
        url = f"data:image/png;base64,{base64.b64encode(b'x' * 200_000).decode()}"
        async with front.openai() as client:
            done = await client.chat.completions.create(
                model="default",
                messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}],
                max_tokens=3,
            )
        assert done.choices[0].message.content


class TestErrors:
    """Errors become the client's own."""

    async def test_bad_input(self, front: Gateway) -> None:
        """With the field at fault."""
        async with front.openai() as client:
            with pytest.raises(openai.BadRequestError) as raised:
                await client.chat.completions.create(model="default", messages=[])
        assert "messages" == raised.value.param

    async def test_a_full_queue_is_tried_again(self, redis_url: str, redis: Redis, engine: ScriptedEngine) -> None:
        """After the time that it is told; the caller notices nothing."""
        await configure(redis, cap_interactive="1")
        answer = b'{"id":"c","object":"chat.completion","created":1,"model":"m","choices":[]}'
        async with (
            serving(redis_url, engine, concurrency=1, reserve=0),
            gateway(redis_url) as front,
            front.openai() as client,
        ):
            first = asyncio.create_task(client.chat.completions.create(model="m", messages=MESSAGES))
            request = await engine.next()
            with pytest.raises(openai.RateLimitError):
                await client.chat.completions.create(model="m", messages=MESSAGES)
            patient = client.with_options(max_retries=3)
            second = asyncio.create_task(patient.chat.completions.create(model="m", messages=MESSAGES))
            request.answer(body=answer)
            await first
            (await engine.next()).answer(body=answer)
            assert "c" == (await second).id

    async def test_an_outage_of_redis_is_sat_out(self, own_server: OwnServer, engine: ScriptedEngine) -> None:
        """503 with Retry-After: the client comes again when it is told to, and its caller notices nothing."""
        server = own_server()
        engine.on_request = lambda request: say_all(request, "hello")
        told: list[tuple[int, str | None]] = []

        async def look(response: Any) -> None:
            told.append((response.status_code, response.headers.get("retry-after")))
            if len(told) == 1:
                server.start()

        async with (
            serving(server.url, engine, concurrency=1, reserve=0),
            gateway(server.url) as front,
            openai.DefaultAsyncHttpxClient(event_hooks={"response": [look]}) as http,
        ):
            client = openai.AsyncOpenAI(base_url=f"{front.base}/v1", api_key="none", max_retries=5, http_client=http)
            server.kill()
            done = await client.chat.completions.create(model="m", messages=MESSAGES)
        assert "hello" == done.choices[0].message.content
        assert (503, "2") == told[0]
        assert 200 == told[-1][0]

    async def test_a_time_limit_of_the_client_takes_its_job_back(self, front: Gateway, engine: ScriptedEngine) -> None:
        """APITimeoutError; the engine is spared what nobody waits for (G14)."""
        async with front.openai(timeout=0.5) as client:
            asked = asyncio.create_task(client.chat.completions.create(model="m", messages=MESSAGES))
            request = await engine.next()
            with pytest.raises(openai.APITimeoutError):
                await asked
            await request.aborted.wait()

    async def test_raw_responses_show_the_headers(self, front: Gateway, engine: ScriptedEngine) -> None:
        """The client's own request id, the job's, and the parsed answer behind them; also of a stream."""
        engine.on_request = lambda request: say_all(request, "hello")
        async with front.openai(default_headers={"x-request-id": "mine-1"}) as client:
            raw = await client.chat.completions.with_raw_response.create(model="m", messages=MESSAGES)
            assert ("mine-1", "mine-1") == (raw.headers["x-request-id"], raw.request_id)
            assert raw.headers["x-llmq-job-id"]
            assert "hello" == raw.parse().choices[0].message.content
            async with client.chat.completions.with_streaming_response.create(
                model="m", messages=MESSAGES, stream=True
            ) as streamed:
                assert "text/event-stream; charset=utf-8" == streamed.headers["content-type"]
                assert "data: [DONE]" == [line async for line in streamed.iter_lines() if line][-1]

    async def test_a_stream_that_breaks_off_raises(self, front: Gateway, engine: ScriptedEngine) -> None:
        """It does not look like a short answer."""
        engine.on_request = lambda request: request.say("half", chunk("half"))
        async with front.openai() as client:
            stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
            engine.running[0].fail(EngineGone("died", in_flight=True))
            with pytest.raises(openai.APIError) as raised:
                async for _ in stream:
                    pass
        assert "interrupted" == raised.value.code


async def _nothing_runs(redis: Redis) -> bool:
    return not await redis.hlen(KEYS.lanes)
