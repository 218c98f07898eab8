"""The HTTP engine against a real engine: llama.cpp, serving a tiny model of random weights."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import orjson
import pytest

from llmq.scheduler.errors import EngineUnavailable
from llmq.scheduler.job import Job
from llmq.scheduler.kept import Kept
from llmq.workers.continuing import continued, joined
from llmq.workers.engines.base import Continues, EngineAnswer, EngineGone, EngineLoad, OnDelta
from llmq.workers.engines.http import HttpEngine
from tests.engine import LlamaServer, llama_server
from tests.engine.fake import body_of, chat, opened


@pytest.fixture(scope="module")
def llama() -> Iterator[LlamaServer]:
    with llama_server(slots=2) as server:
        yield server


@pytest.fixture
async def real(llama: LlamaServer) -> AsyncIterator[HttpEngine]:
    async with opened(llama.url) as engine:
        yield engine


class TestLlamaCpp:
    """A real engine, serving a tiny model of random weights."""

    async def test_a_probe_finds_kind_models_and_slots(self, llama: LlamaServer, real: HttpEngine) -> None:
        """What the worker prints when it is ready."""
        info = await real.probe()

        assert ("llama.cpp", ("tiny",), 2, llama.url) == (info.kind, info.models, info.slots, info.url)
        assert EngineLoad(0, 0) == await real.load()

    @pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
    async def test_every_endpoint_streams_and_counts(self, real: HttpEngine, url: str) -> None:
        """The text that was told on the way is the text of the answer, and its tokens are counted."""
        question = "Tell me about the sea."
        prompt = {"messages": [{"role": "user", "content": question}]}
        body = {
            "/v1/chat/completions": {**prompt, "max_tokens": 20},
            "/v1/completions": {"prompt": question, "max_tokens": 20},
            "/v1/responses": {"input": question, "max_output_tokens": 20},
            "/v1/messages": {**prompt, "max_tokens": 20},
        }[url]
        texts: list[str] = []

        answer = await real.run(
            Job(url, {**body, "ignore_eos": True, "temperature": 0}), lambda text, _: texts.append(text)
        )

        whole = body_of(answer)
        said = {
            "/v1/chat/completions": lambda: whole["choices"][0]["message"]["content"],
            "/v1/completions": lambda: whole["choices"][0]["text"],
            "/v1/responses": lambda: whole["output"][0]["content"][0]["text"],
            "/v1/messages": lambda: whole["content"][0]["text"],
        }[url]()
        assert said == "".join(texts)
        assert 20 == answer.usage.completion_tokens
        assert answer.usage.prompt_tokens > 10
        assert whole["id"] == answer.request_id

    async def test_exactly_the_tokens_that_were_asked_for(self, real: HttpEngine) -> None:
        """ignore_eos with max_tokens: what benchmarks rest on. Repeated, since temperature 0 repeats."""
        job = chat(max_tokens=33, ignore_eos=True, temperature=0)

        first, second = await real.run(job), await real.run(job)

        assert 33 == first.usage.completion_tokens
        assert body_of(first)["choices"] == body_of(second)["choices"]
        assert "length" == body_of(first)["choices"][0]["finish_reason"]

    async def test_choices_of_several_prompts_are_kept_apart(self, real: HttpEngine) -> None:
        """Their chunks come mixed, with a `null` where a slot has nothing to say."""
        job = Job("/v1/completions", {"prompt": ["the sea", "a ship"], "grammar": 'root ::= "red green"'})

        body = body_of(await real.run(job))

        assert [(0, "red green"), (1, "red green")] == [(choice["index"], choice["text"]) for choice in body["choices"]]

    async def test_an_answer_stops_where_it_was_told_to(self, real: HttpEngine) -> None:
        """The finish reason says so, and what came before is kept."""
        body = body_of(await real.run(chat(grammar='root ::= "red green blue"', stop=["green"])))

        choice = body["choices"][0]
        assert ("stop", "red ") == (choice["finish_reason"], choice["message"]["content"])

    async def test_a_refusal_is_the_callers_fault(self, real: HttpEngine) -> None:
        """F-116: a prompt that is too long, and an endpoint for which the server was not started."""
        long = await real.run(chat(model="tiny", messages=[{"role": "user", "content": "sea " * 5000}]))
        embeddings = await real.run(Job("/v1/embeddings", {"input": "x"}))

        assert (400, "exceed_context_size_error") == (long.status_code, body_of(long)["error"]["type"])
        assert 501 == embeddings.status_code

    async def test_cancelling_frees_the_slot_within_a_second(self, llama: LlamaServer, real: HttpEngine) -> None:
        """G14: in the engine, not only here; also for a job that did not ask for a stream."""
        started = asyncio.Event()
        run = asyncio.create_task(real.run(chat(max_tokens=1900, ignore_eos=True), lambda *_: started.set()))
        await started.wait()
        assert 1 == await busy_slots(real)

        run.cancel()
        began = time.monotonic()
        while await busy_slots(real):
            assert time.monotonic() - began < 1.0, "the slot is still busy"
        with pytest.raises(asyncio.CancelledError):
            await run

    async def test_a_killed_server_is_gone_with_the_request_in_flight(self) -> None:
        """G7: then nobody listens, and nothing is in flight; a server that comes back is used again."""
        with llama_server(slots=1) as server:
            async with opened(server.url) as engine:
                started = asyncio.Event()
                run = asyncio.create_task(engine.run(chat(max_tokens=1900, ignore_eos=True), lambda *_: started.set()))
                await started.wait()
                server.kill()
                with pytest.raises(EngineGone) as cut:
                    await run
                with pytest.raises(EngineGone) as refused:
                    await engine.run(chat(max_tokens=1))
                with pytest.raises(EngineUnavailable, match="refused"):
                    await engine.probe()
                with llama_server(slots=1, port=int(server.url.rpartition(":")[2])):
                    answer = await engine.run(chat(max_tokens=1))

        assert (True, False, 200) == (cut.value.in_flight, refused.value.in_flight, answer.status_code)

    async def test_a_server_with_a_key_wants_it(self) -> None:
        """With the right one it answers; the refusal of a wrong one is an answer too."""
        with llama_server(slots=1, api_key="right") as server:
            async with opened(server.url, api_key="right") as right, opened(server.url, api_key="wrong") as wrong:
                info = await right.probe()
                answers = [await engine.run(chat(model="tiny", max_tokens=1)) for engine in (right, wrong)]

        assert 1 == info.slots
        assert [200, 401] == [answer.status_code for answer in answers]


async def busy_slots(engine: HttpEngine) -> int:
    return (await engine.load()).running or 0


async def test_a_cut_off_answer_is_gone_on_from(real: HttpEngine) -> None:
    """A real engine makes the rest and nothing of the beginning again; greedy answers of both ways are compared.

    Word for word the same they need not be: this model's tokenizer reads its own words as letters, and its weights are
    noise, so the smallest difference grows.
    """
    info = await real.probe()
    assert Continues.PREFILL is info.continues
    words_only = [[token, -100] for token in range(259)]  # a byte of a character would be no text to go on from
    same = 0
    for prompt in ("hello", "tell me of the sea", "a ship", "the wave of the sea"):
        messages = [{"role": "user", "content": prompt}]
        limits = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "logit_bias": words_only}
        job = Job("/v1/chat/completions", {"messages": messages, **limits})
        pieces: list[str] = []
        whole = await real.run(job, keep_text(pieces))
        kept = Kept("".join(pieces[:16]), 16, info.models[0])
        rest = continued(job, kept, info)
        assert rest is not None
        more: list[str] = []
        answer = joined(await real.run(rest, keep_text(more)), kept)
        assert (8, 24) == (len(more), answer.usage.completion_tokens)
        assert kept.text + "".join(more) == text_of(answer)
        same += text_of(whole) == text_of(answer)
    print(f"{same} of 4 greedy answers are the same")


def keep_text(pieces: list[str]) -> OnDelta:
    """Return a listener that collects the texts of an answer's tokens."""
    return lambda text, chunk: pieces.append(text) if text else None


def text_of(answer: EngineAnswer) -> str:
    """Return what an answer says."""
    return str(orjson.loads(answer.body)["choices"][0]["message"]["content"])
