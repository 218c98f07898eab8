"""What every engine must do, asked of each in the same words: simulated, over HTTP, started by llmq, and recorded.

A new engine gets a line in `ENGINES` and a column in `docs/engines.md`. What engines may do differently stands in the
cells of that table (`questions.py`), and each of them is what the engine did here.
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
from llmq.workers.engines import llamacpp_server
from llmq.workers.engines.base import Engine, EngineGone
from llmq.workers.engines.http import HttpEngine
from llmq.workers.engines.launch import Launch
from llmq.workers.engines.local import launch_of_local
from llmq.workers.engines.managed import ManagedEngine
from llmq.workers.engines.sim import SimEngine
from tests.engine import llama_server, tiny_model
from tests.engine.fake import body_of, chat, sample
from tests.engine.questions import QUESTIONS, WORDS
from tests.engine.recorded import RecordedEngine
from tests.engine.support import NOT_RECORDED, supported
from tests.redis.serving import until

#: Of each engine here; small, so that a prompt that is too long for it is short.
SLOTS, CONTEXT = 2, 2048

POISON = "poison"

#: As long as it may be: it is ended by something else.
ENDLESS = {"max_tokens": 1900, "ignore_eos": True}


@dataclass
class Subject:
    """An engine that runs; `die` ends it as a crash would, `back` returns when it can be used again.

    `running` tells how many requests it works on. `slots` and `models` are what a probe finds.
    """

    engine: Engine
    die: Callable[[], Awaitable[object]]
    back: Callable[[], Awaitable[object]]
    running: Callable[[], Awaitable[int | None]]
    kind: str
    slots: int | None = SLOTS
    models: int = 1


async def load_of(engine: Engine) -> int | None:
    """Return how many requests an engine says that it runs."""
    return (await engine.load()).running


@contextlib.asynccontextmanager
async def simulated(tmp_path: Path) -> AsyncIterator[Subject]:
    """A simulated GPU, which dies of poison and is back at once."""
    url = f"sim://?slots={SLOTS}&kv_tokens={SLOTS * CONTEXT}&decode_tps=200&down=1&poison={POISON}"
    engine = SimEngine.from_url(url)

    async def die() -> None:
        with contextlib.suppress(EngineGone):
            await engine.run(chat(messages=[{"role": "user", "content": POISON}]))

    yield Subject(engine, die, lambda: _healthy(engine), lambda: load_of(engine), "sim")
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

        yield Subject(engine, die, back, lambda: load_of(engine), "llama.cpp")
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
        yield Subject(engine, die, lambda: _healthy(engine), lambda: load_of(engine), "llama.cpp")
    finally:
        await engine.close()


def recorded(name: str, models: int) -> Opened:
    """Return an engine that was recorded, played over HTTP; how many slots it has was not to be seen."""

    @contextlib.asynccontextmanager
    async def opened(tmp_path: Path) -> AsyncIterator[Subject]:
        async with RecordedEngine(name).serving() as played:
            engine = HttpEngine(played.url)

            async def die() -> None:
                played.die()

            async def running() -> int:
                return len(played.running)

            yield Subject(engine, die, played.start, running, name, None, models)
            await engine.close()

    return opened


Opened = Callable[[Path], AbstractAsyncContextManager[Subject]]
ENGINES: dict[str, Opened] = {
    "sim": simulated,
    "llama.cpp": over_http,
    "local:": local,
    "vLLM": recorded("vllm", models=1),
    "transformers": recorded("transformers", models=0),
}

#: Each cell of the table in the documents.
CELLS = [
    pytest.param(engine, question, cell, id=f"{engine}: {question}")
    for question, cells in supported().items()
    for engine, cell in cells.items()
    if cell != NOT_RECORDED
]


@pytest.mark.parametrize(("name", "question", "cell"), CELLS)
async def test_an_engine_does_what_the_documents_say_of_it(tmp_path: Path, name: str, question: str, cell: str) -> None:
    """What it supports, what it passes over, and with which status it refuses; never anything unsaid."""
    async with ENGINES[name](tmp_path) as opened:
        assert cell == await QUESTIONS[question](opened.engine)


def test_the_documents_say_something_of_every_question_and_every_engine() -> None:
    """No row without a question, no question without a row; only recorded engines have gaps."""
    table = supported()
    assert list(QUESTIONS) == list(table)
    assert {tuple(ENGINES)} == {tuple(cells) for cells in table.values()}
    gaps = {engine for cells in table.values() for engine, cell in cells.items() if cell == NOT_RECORDED}
    assert gaps <= {"vLLM", "transformers"}


async def test_vllm_was_recorded_to_queue_what_is_more_than_its_slots() -> None:
    """A measurement in words: 12 requests on 4 sequences, all of them answered with 200."""
    (line,) = [line for line in sample("vllm-disconnect-and-overload") if line.startswith("C [")]
    assert 12 == line.count(", 200, ")


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

    async def test_a_probe_tells_models_and_slots(self, subject: Subject) -> None:
        """What the worker's card says, and how many requests it sends at once."""
        info = await subject.engine.probe()
        assert (subject.kind, subject.slots, subject.models) == (info.kind, info.slots, len(info.models))
        assert info.url

    async def test_a_stream_says_what_the_whole_answer_says(self, engine: Engine) -> None:
        """Piece by piece, in order, and then all of it with its finish reason."""
        texts: list[str] = []
        answer = await engine.run(chat(max_tokens=12, ignore_eos=True), lambda text, _: texts.append(text))
        choice = body_of(answer)["choices"][0]
        assert (200, "length") == (answer.status_code, choice["finish_reason"])
        assert choice["message"]["content"] == "".join(texts)
        assert choice["message"]["content"]
        assert len(texts) > 1

    async def test_nobody_need_listen(self, engine: Engine) -> None:
        """The answer is as whole without a listener, and whatever the job says of streams."""
        for fields in ({}, {"stream": True}, {"stream": False}):
            answer = await engine.run(chat(**WORDS, **fields))
            assert "chat.completion" == body_of(answer)["object"]
            assert body_of(answer)["choices"][0]["message"]["content"]

    async def test_usage_is_counted(self, engine: Engine) -> None:
        """The tokens of prompt and answer, for the bucket, as they stand in the body."""
        answer = await engine.run(chat(max_tokens=12, ignore_eos=True))
        usage = body_of(answer)["usage"]
        assert 12 == answer.usage.completion_tokens == usage["completion_tokens"]
        assert 0 < answer.usage.prompt_tokens == usage["prompt_tokens"]

    async def test_what_was_refused_harms_nothing(self, engine: Engine) -> None:
        """F-116: the engine is well after whatever it makes of a prompt that is too long, and answers the next one."""
        await QUESTIONS["prompt too long"](engine)
        assert 200 == (await engine.run(chat(max_tokens=1))).status_code

    async def test_cancelling_frees_the_slot(self, subject: Subject) -> None:
        """G14: within a second, in the engine itself; one that was recorded sees at least that nobody listens."""
        runs = [await begun(subject.engine) for _ in range(SLOTS)]
        assert SLOTS == await subject.running()
        for run in runs:
            run.cancel()

        async def idle() -> bool:
            return await subject.running() == 0

        await until(idle, within=1.0)
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
        assert subject.slots == (await engine.probe()).slots
        assert 200 == (await engine.run(chat(max_tokens=1))).status_code


async def test_a_local_model_gives_embeddings_when_it_is_asked_to(tmp_path: Path) -> None:
    """`local:model.gguf?embeddings=1`."""
    async with local(tmp_path, query="&embeddings=1") as subject:
        assert "yes" == await QUESTIONS["`/v1/embeddings`"](subject.engine)


async def begun(engine: Engine) -> asyncio.Task[Any]:
    """Start a request that has no end, and wait for its first piece."""
    first = asyncio.Event()
    run = asyncio.create_task(engine.run(chat(**ENDLESS), lambda *_: first.set()))
    async with asyncio.timeout(20):
        await first.wait()
    return run


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
