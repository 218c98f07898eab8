"""What every engine must do, asked of each in the same words: simulated, over HTTP, and started by llmq itself.

A new engine gets a line in `ENGINES`; what it may refuse is in `docs/engines.md`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llmq.scheduler.errors import EngineUnavailable
from llmq.scheduler.job import Job
from llmq.workers.engines import llamacpp_server
from llmq.workers.engines.base import Engine, EngineGone
from llmq.workers.engines.http import HttpEngine
from llmq.workers.engines.launch import Launch
from llmq.workers.engines.local import launch_of_local
from llmq.workers.engines.managed import ManagedEngine
from llmq.workers.engines.sim import SimEngine
from tests.engine import llama_server, tiny_model
from tests.engine.fake import body_of, chat
from tests.redis.serving import until

#: Of each engine here; small, so that a prompt that is too long for it is short.
SLOTS, CONTEXT = 2, 2048

POISON = "poison"

#: As long as it may be: it is ended by something else.
ENDLESS = {"max_tokens": 1900, "ignore_eos": True}


#: A real engine of random weights says these words, where it would else say half of a character; a simulation does not.
WORDS = {"max_tokens": 40, "grammar": 'root ::= "red green blue"'}


@dataclass
class Subject:
    """An engine that runs; `die` ends it as a crash would, `back` returns when it can be used again."""

    engine: Engine
    die: Callable[[], Awaitable[object]]
    back: Callable[[], Awaitable[object]]


@contextlib.asynccontextmanager
async def simulated(tmp_path: Path) -> AsyncIterator[Subject]:
    """A simulated GPU, which dies of poison and is back at once."""
    url = f"sim://?slots={SLOTS}&kv_tokens={SLOTS * CONTEXT}&decode_tps=200&down=1&poison={POISON}"
    engine = SimEngine.from_url(url)

    async def die() -> None:
        with contextlib.suppress(EngineGone):
            await engine.run(chat(messages=[{"role": "user", "content": POISON}]))

    yield Subject(engine, die, lambda: _healthy(engine))
    await engine.close()


@contextlib.asynccontextmanager
async def over_http(tmp_path: Path) -> AsyncIterator[Subject]:
    """llama.cpp's server, which somebody else started."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(llama_server(slots=SLOTS, context=CONTEXT))
        engine = HttpEngine(server.url)

        async def die() -> None:
            await asyncio.to_thread(server.kill)

        async def back() -> None:
            stack.enter_context(llama_server(slots=SLOTS, context=CONTEXT, port=int(server.url.rpartition(":")[2])))

        yield Subject(engine, die, back)
        await engine.close()


@contextlib.asynccontextmanager
async def local(tmp_path: Path, *, query: str = "") -> AsyncIterator[Subject]:
    """A model file that llmq serves."""
    launch = launch_of_local(f"local:{tiny_model()}?slots={SLOTS}&context={CONTEXT}&threads=1{query}", "0")
    http = HttpEngine(launch.url, api_key=launch.api_key)
    pids = tmp_path / "pids"
    engine = ManagedEngine(_noting_pids(launch, pids), http, lambda line: None, log=tmp_path / "log")

    async def die() -> None:
        os.kill(int(pids.read_text().split()[-1]), signal.SIGKILL)

    try:
        await engine.start()
        yield Subject(engine, die, lambda: _healthy(engine))
    finally:
        await engine.close()


Opened = Callable[[Path], AbstractAsyncContextManager[Subject]]
ENGINES: dict[str, Opened] = {"sim": simulated, "http": over_http, "local": local}


@pytest.fixture(params=ENGINES)
async def subject(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Subject]:
    """Each engine in turn."""
    async with ENGINES[request.param](tmp_path) as opened:
        yield opened


@pytest.fixture
def engine(subject: Subject) -> Engine:
    """The engine as a worker sees it."""
    return subject.engine


class TestEveryEngine:
    """The contract of `Engine` (`base.py`)."""

    async def test_a_probe_tells_models_and_slots(self, engine: Engine) -> None:
        """What the worker's card says, and how many requests it sends at once."""
        info = await engine.probe()
        assert SLOTS == info.slots
        assert info.kind
        assert info.url
        assert 1 == len(info.models)

    async def test_a_stream_says_what_the_whole_answer_says(self, engine: Engine) -> None:
        """Piece by piece, in order, and then all of it with its finish reason."""
        texts: list[str] = []
        answer = await engine.run(chat(max_tokens=64, ignore_eos=True), lambda text, _: texts.append(text))
        choice = body_of(answer)["choices"][0]
        assert (200, "length") == (answer.status_code, choice["finish_reason"])
        assert choice["message"]["content"] == "".join(texts)
        assert len([text for text in texts if text]) > 1

    async def test_nobody_need_listen(self, engine: Engine) -> None:
        """The answer is as whole without a listener, and whatever the job says of streams."""
        for fields in ({}, {"stream": True}, {"stream": False}):
            answer = await engine.run(chat(**WORDS, **fields))
            assert "chat.completion" == body_of(answer)["object"]
            assert body_of(answer)["choices"][0]["message"]["content"]

    async def test_usage_is_counted(self, engine: Engine) -> None:
        """The tokens of prompt and answer, in the body and for the bucket; exactly those that were asked for."""
        answer = await engine.run(chat(max_tokens=17, ignore_eos=True))
        usage = body_of(answer)["usage"]
        assert 17 == answer.usage.completion_tokens == usage["completion_tokens"]
        assert 0 < answer.usage.prompt_tokens == usage["prompt_tokens"]

    async def test_several_choices_are_kept_apart(self, engine: Engine) -> None:
        """n=2: two answers, each whole, with its index."""
        answer = await engine.run(chat(n=2, **WORDS), lambda text, chunk: None)
        choices = body_of(answer)["choices"]
        assert [0, 1] == [choice["index"] for choice in choices]
        assert {choice["finish_reason"] for choice in choices} <= {"stop", "length"}
        assert all(choice["message"]["content"] for choice in choices)

    async def test_embeddings_come_or_are_refused_clearly(self, engine: Engine) -> None:
        """A vector for each input; or a status that says whose fault it is, with the engine's own words."""
        answer = await engine.run(Job("/v1/embeddings", {"input": ["the sea", "a ship"]}))
        if answer.status_code == 200:
            assert two_vectors(body_of(answer))
        else:
            assert answer.status_code in (400, 404, 501)
            assert body_of(answer)["error"]["message"]

    async def test_a_bad_request_keeps_its_status_and_its_body(self, engine: Engine) -> None:
        """F-116: an answer, not an error: nobody tries it again. The engine is well and answers the next one."""
        refused = await engine.run(chat(messages=[{"role": "user", "content": "the sea " * 4 * CONTEXT}]))
        assert 400 == refused.status_code
        assert "token" in body_of(refused)["error"]["message"]
        assert 200 == (await engine.run(chat(max_tokens=1))).status_code

    async def test_cancelling_frees_the_slot(self, engine: Engine) -> None:
        """G14: within a second, in the engine itself."""
        runs = [await begun(engine) for _ in range(SLOTS)]
        assert SLOTS == (await engine.load()).running
        for run in runs:
            run.cancel()
        await until(lambda: _idle(engine), within=1.0)
        assert {asyncio.CancelledError} == {
            type(ended) for ended in await asyncio.gather(*runs, return_exceptions=True)
        }

    async def test_more_requests_than_slots_are_all_answered(self, engine: Engine) -> None:
        """Engines queue inside; llmq sends no more than there are slots, but it could."""
        answers = await asyncio.gather(*(engine.run(chat(max_tokens=4)) for _ in range(3 * SLOTS)))
        assert {200} == {answer.status_code for answer in answers}

    async def test_death_in_mid_answer_is_told_from_death_before(self, subject: Subject) -> None:
        """G7: who was in flight is a suspect, who comes later is not; a probe tells when it is back."""
        engine = subject.engine
        run = await begun(engine)
        await subject.die()
        with pytest.raises(EngineGone) as cut:
            await run
        with pytest.raises(EngineGone) as refused:
            await engine.run(chat(max_tokens=1))
        with pytest.raises(EngineUnavailable):
            await engine.probe()
        assert (True, False) == (cut.value.in_flight, refused.value.in_flight)
        await subject.back()
        assert SLOTS == (await engine.probe()).slots
        assert 200 == (await engine.run(chat(max_tokens=1))).status_code


async def test_a_local_model_gives_embeddings_when_it_is_asked_to(tmp_path: Path) -> None:
    """`local:model.gguf?embeddings=1`."""
    async with local(tmp_path, query="&embeddings=1") as subject:
        answer = await subject.engine.run(Job("/v1/embeddings", {"input": ["the sea", "a ship"]}))
    assert 200 == answer.status_code
    assert two_vectors(body_of(answer))


def two_vectors(body: Any) -> bool:
    """Tell whether a body holds an embedding for each of two inputs."""
    return [0, 1] == [item["index"] for item in body["data"]] and all(item["embedding"] for item in body["data"])


async def begun(engine: Engine) -> asyncio.Task[Any]:
    """Start a request that has no end, and wait for its first piece."""
    first = asyncio.Event()
    run = asyncio.create_task(engine.run(chat(**ENDLESS), lambda *_: first.set()))
    async with asyncio.timeout(20):
        await first.wait()
    return run


async def _idle(engine: Engine) -> bool:
    return (await engine.load()).running == 0


async def _healthy(engine: Engine) -> None:
    async def answers() -> bool:
        try:
            await engine.probe()
        except EngineUnavailable:
            return False
        return True

    await until(answers)


def _noting_pids(launch: Launch, pids: Path) -> Launch:
    """Let the server write its number down when it begins, so that a test can kill it."""
    assert sys.executable == launch.command[0]
    assert llamacpp_server.__file__ in launch.command
    noting = ("sh", "-c", 'echo $$ >> "$0"; exec "$@"', str(pids))
    return Launch(launch.name, (*noting, *launch.command), launch.url, launch.environment, launch.api_key)
