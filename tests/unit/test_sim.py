"""The simulated engine, on a clock of its own: its times are exact and cost the test none."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from llmq.scheduler.errors import EngineUnavailable, UsageError
from llmq.scheduler.job import ENDPOINTS, Job
from llmq.scheduler.kept import Kept
from llmq.workers.continuing import continued, joined
from llmq.workers.engines.assembly import assembler_for
from llmq.workers.engines.base import EngineAnswer, EngineGone, EngineLoad, EngineOverloaded, EngineUnclear
from llmq.workers.engines.sim import SimEngine, SimOptions
from tests.governing.virtual_time import run_virtually

T = TypeVar("T")

#: 100 characters of JSON and more are 25 tokens and more; what counts here is that it is one chunk.
SHORT = "hello " * 20


def simulate(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main` on virtual time."""
    return run_virtually(main())


def now() -> float:
    return asyncio.get_running_loop().time()


def chat(text: str = SHORT, **fields: Any) -> Job:
    return Job("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})


def job_for(url: str, **fields: Any) -> Job:
    value = [{"role": "user", "content": SHORT}] if ENDPOINTS[url] == "messages" else SHORT
    return Job(url, {ENDPOINTS[url]: value, **fields})


def body_of(answer: EngineAnswer) -> Any:
    return json.loads(answer.body)


def simulated(query: str = "") -> SimEngine:
    return SimEngine.from_url(f"sim://?{query}")


def exactly(tokens: int) -> dict[str, Any]:
    return {"max_tokens": tokens, "ignore_eos": True}


def test_one_request_alone_takes_its_prefill_and_its_tokens() -> None:
    """The documented times: the prompt's step makes the first token, then one comes each 1 / decode_tps."""

    async def main() -> tuple[EngineAnswer, float]:
        answer = await simulated("prefill_tps=1000&decode_tps=10").run(chat(**exactly(11)))
        return answer, now()

    answer, seconds = simulate(main)

    prompt = answer.usage.prompt_tokens
    assert pytest.approx(prompt / 1000 + 10 / 10) == seconds
    assert 11 == answer.usage.completion_tokens


def test_each_request_of_a_full_gpu_decodes_at_about_half_the_speed() -> None:
    """The rate falls with the number running, and what all of them get together grows."""

    async def main() -> float:
        engine = simulated("slots=10&prefill_tps=1000000000&decode_tps=10")
        await asyncio.gather(*(engine.run(chat(**exactly(11))) for _ in range(10)))
        return now()

    # The first one decodes a token alone while the others read their prompts, and is done a token before them.
    assert pytest.approx(1 / 10 + 9 * (1 + 9 / 10) / 10 + (1 + 8 / 10) / 10, rel=1e-3) == simulate(main)


def test_requests_above_the_slots_wait_inside() -> None:
    """An engine refuses no work: it queues, as real ones do, and tells of it."""

    async def main() -> tuple[EngineLoad, float]:
        engine = simulated("slots=1&prefill_tps=1000000000&decode_tps=10")
        running = [asyncio.create_task(engine.run(chat(**exactly(11)))) for _ in range(3)]
        await asyncio.sleep(0.5)
        load = await engine.load()
        await asyncio.gather(*running)
        return load, now()

    load, seconds = simulate(main)

    assert EngineLoad(running=1, waiting=2) == load
    assert pytest.approx(3.0, rel=1e-3) == seconds


def test_requests_that_do_not_fit_into_the_kv_memory_wait_inside() -> None:
    """Slots are free, memory is not."""

    async def main() -> EngineLoad:
        engine = simulated("slots=8&kv_tokens=1000")
        running = [asyncio.create_task(engine.run(chat(**exactly(600)))) for _ in range(2)]
        await asyncio.sleep(0.5)
        load = await engine.load()
        await asyncio.gather(*running)
        return load

    assert EngineLoad(running=1, waiting=1) == simulate(main)


def test_what_fits_no_memory_is_the_callers_fault() -> None:
    """As vLLM answers a prompt that is longer than its context."""
    answer = simulate(lambda: simulated("kv_tokens=100").run(chat(**exactly(600))))

    assert (400, 400) == (answer.status_code, body_of(answer)["error"]["code"])


def test_a_long_prompt_slows_down_the_tokens_of_others() -> None:
    """Prefill and decode share the steps: this is what the governor has to see."""

    async def main() -> tuple[float, float]:
        engine = simulated("prefill_tps=5000&decode_tps=100")
        times: list[float] = []
        watched = asyncio.create_task(engine.run(chat(**exactly(100)), lambda text, chunk: times.append(now())))
        await asyncio.sleep(0.5)
        await engine.run(chat("x" * 40_000, max_tokens=1))
        await watched
        gaps = [b - a for a, b in itertools.pairwise(times[1:-3])]
        return min(gaps), max(gaps)

    fastest, slowest = simulate(main)

    assert pytest.approx(1 / 100) == fastest
    assert pytest.approx(1 / 100 + 512 / 5000) == slowest


def test_a_request_that_its_own_token_ends_stops_nobody_else() -> None:
    """G9: a first token may be what makes the worker preempt that very request; the GPU goes on with the others."""

    async def main() -> EngineAnswer:
        engine = simulated()

        def give_up(text: str, chunk: bytes) -> None:
            given_up.cancel()

        given_up = asyncio.create_task(engine.run(chat(max_tokens=1), give_up))
        other = asyncio.create_task(engine.run(chat(**exactly(20)), lambda text, chunk: None))
        with pytest.raises(asyncio.CancelledError):
            await given_up
        return await other

    assert 200 == simulate(main).status_code


def test_an_arrival_ends_what_was_computed_ahead() -> None:
    """Nobody watches the first request, so its steps are one timer: the second one still starts with the next step."""

    async def main() -> float:
        engine = simulated("prefill_tps=1000000000&decode_tps=10")
        first = asyncio.create_task(engine.run(chat(**exactly(100))))
        await asyncio.sleep(2.05)
        began = now()
        await engine.run(chat(max_tokens=1))
        waited = now() - began
        await first
        return waited

    # Half a step until the one under way ends, then one of its own.
    assert pytest.approx(0.15, abs=1e-3) == simulate(main)


def test_cancelling_frees_the_slot_at_once() -> None:
    """Preemption counts on it."""

    async def main() -> tuple[EngineLoad, float]:
        engine = simulated("slots=1&prefill_tps=1000000000&decode_tps=10")
        victim = asyncio.create_task(engine.run(chat(**exactly(1000))))
        await asyncio.sleep(1.0)
        victim.cancel()
        await asyncio.gather(victim, return_exceptions=True)
        load = await engine.load()
        began = now()
        await engine.run(chat(max_tokens=1))
        return load, now() - began

    load, seconds = simulate(main)

    assert EngineLoad(0, 0) == load
    assert seconds < 0.11


@pytest.mark.parametrize("instant", [0, 1])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("url", [url for url in ENDPOINTS if url != "/v1/embeddings"])
def test_the_chunks_of_an_answer_are_its_whole_body(url: str, n: int, instant: int) -> None:
    """For every endpoint: what is streamed, put together as any engine's stream is, equals what is returned."""
    chunks: list[tuple[str, bytes]] = []
    job = job_for(url, **({"n": n} if "completions" in url else {}))

    answer = simulate(
        lambda: simulated(f"instant={instant}").run(job, lambda text, chunk: chunks.append((text, chunk)))
    )

    assembler = assembler_for(url)
    texts = [assembler.feed(json.loads(chunk)) for _, chunk in chunks]
    assert body_of(answer) == json.loads(assembler.body())
    assert texts == [text for text, _ in chunks]
    assert 64 == len("".join(texts).split())
    assert assembler.finished
    assert answer.usage == assembler.usage()


def test_every_output_says_that_it_is_simulated() -> None:
    """A simulation never passes for an engine."""
    info = simulate(lambda: simulated().probe())
    body = body_of(simulate(lambda: simulated("instant=1").run(chat(model="llama-70b"))))

    assert (True, "sim", ("sim",), 32) == (info.simulated, info.kind, info.models, info.slots)
    assert ("sim", "simulated") == (body["model"], body["system_fingerprint"])


@pytest.mark.parametrize(
    ("fields", "tokens", "reason"),
    [
        ({}, 64, "stop"),
        ({"max_tokens": 7}, 7, "length"),
        ({"max_completion_tokens": 7, "max_tokens": 9}, 7, "length"),
        ({"max_tokens": 500}, 64, "stop"),
        (exactly(500), 500, "length"),
        (exactly(5000), 5000, "length"),
    ],
)
def test_the_limit_of_an_answer_is_kept(fields: dict[str, Any], tokens: int, reason: str) -> None:
    """An answer ends by itself at 64 tokens, at its limit before that, and exactly there with ignore_eos."""
    answer = simulate(lambda: simulated("instant=1").run(chat(**fields)))

    choice = body_of(answer)["choices"][0]
    assert (tokens, reason) == (answer.usage.completion_tokens, choice["finish_reason"])
    assert tokens == len(choice["message"]["content"].split())


def test_the_same_seed_gives_the_same_answers() -> None:
    """And another seed, or another question, others."""

    def text(query: str, question: str) -> str:
        answer = simulate(lambda: simulated(f"instant=1&{query}").run(chat(question)))
        return str(body_of(answer)["choices"][0]["message"]["content"])

    assert text("seed=1", "a") == text("seed=1", "a")
    assert 3 == len({text("seed=1", "a"), text("seed=2", "a"), text("seed=1", "b")})


def test_embeddings_are_small_and_one_an_input() -> None:
    """Deterministic, too: the same text has the same vector."""
    job = Job("/v1/embeddings", {"input": ["a", "b"]})

    first, second = (body_of(simulate(lambda: simulated().run(job))) for _ in range(2))

    assert [8, 8] == [len(item["embedding"]) for item in first["data"]]
    assert first == second


def outcomes(query: str, count: int) -> list[str]:
    async def main() -> list[str]:
        engine = simulated(f"instant=1&{query}")
        ended = await asyncio.gather(*(engine.run(chat()) for _ in range(count)), return_exceptions=True)
        return [type(outcome).__name__ for outcome in ended]

    return simulate(main)


def test_faults_come_as_often_as_asked_and_the_same_again() -> None:
    """The same seed draws the same luck; a request that is tried again draws anew."""
    ended = outcomes("fail=0.2&overload=0.1&seed=3", 1000)

    assert outcomes("fail=0.2&overload=0.1&seed=3", 1000) == ended
    assert 150 < ended.count(EngineUnclear.__name__) < 230
    assert 70 < ended.count(EngineOverloaded.__name__) < 130


def test_death_takes_those_in_flight_and_comes_back_when_told_to() -> None:
    """G7: those in flight are suspects, those that come later were never begun."""

    async def main() -> list[Any]:
        engine = simulated("die_after=3&down=5")
        first = await asyncio.gather(*(engine.run(chat()) for _ in range(4)), return_exceptions=True)
        with pytest.raises(EngineUnavailable):
            await engine.probe()
        await asyncio.sleep(5)
        await engine.probe()
        return [*first, await engine.run(chat())]

    *ended, last = simulate(main)

    assert [True, True, True, False] == [error.in_flight for error in ended]
    assert 200 == last.status_code


def test_a_poisoned_request_kills_the_engine_each_time() -> None:
    """G7: for the tests of suspects."""

    async def main() -> list[bool]:
        engine = simulated("poison=arsenic&down=1")
        deaths = []
        for _ in range(2):
            with pytest.raises(EngineGone) as error:
                await engine.run(chat("with arsenic"))
            deaths.append(error.value.in_flight)
            await asyncio.sleep(1)
            await engine.run(chat("without"))
        return deaths

    assert [True, True] == simulate(main)


def test_a_listener_that_raises_ends_its_own_request_only() -> None:
    """The timer that everybody lives on goes on."""

    def broken(text: str, chunk: bytes) -> None:
        raise RuntimeError("the listener is broken")

    async def main() -> list[Any]:
        engine = simulated()
        return list(await asyncio.gather(engine.run(chat(), broken), engine.run(chat()), return_exceptions=True))

    broken_off, answered = simulate(main)

    assert "the listener is broken" == str(broken_off)
    assert 200 == answered.status_code


@pytest.mark.parametrize("name", list(SimOptions.__dataclass_fields__))
def test_a_parameter_that_cannot_be_is_named(name: str) -> None:
    """A wrong value says which one, and what was expected."""
    if name == "poison":
        assert "nan" == simulated("poison=nan").options.poison
        return
    with pytest.raises(UsageError, match=name):
        simulated(f"{name}=nan")


def test_an_unknown_parameter_lists_those_that_exist() -> None:
    """So that nobody has to look them up."""
    with pytest.raises(
        UsageError, match=r"no parameter 'slot'; it takes slots, prefill_tps, .*down.* as in sim://\?slots"
    ):
        simulated("slot=3")


def test_a_negative_number_of_slots_is_refused() -> None:
    """Numbers are checked for their sense, not only their form."""
    with pytest.raises(UsageError, match="above 0 for slots, got -1"):
        simulated("slots=-1")


async def test_a_cut_off_answer_goes_on_as_if_it_had_not_been() -> None:
    """Simulated answers can be continued, so that what preemption keeps is seen without a GPU."""
    engine = SimEngine(SimOptions(instant=1))
    info = await engine.probe()
    job = Job("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20})
    pieces: list[str] = []
    whole = await engine.run(job, lambda text, chunk: pieces.append(text))
    said = body_of(whole)["choices"][0]["message"]["content"]
    kept = Kept(" ".join(said.split(" ")[:7]), 7, "sim")
    rest = continued(job, kept, info)
    assert rest is not None
    answer = joined(await engine.run(rest), kept)
    assert said == body_of(answer)["choices"][0]["message"]["content"]
    assert whole.usage == answer.usage
