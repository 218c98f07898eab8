"""The executor: a lease in, an outcome out, whatever the engine does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from llmq.scheduler.job import Job, TrafficClass
from llmq.scheduler.kept import Kept
from llmq.scheduler.lease import (
    Abandoned,
    Answered,
    Ended,
    ErrorCode,
    Fence,
    HandedBack,
    Lease,
    Outcome,
    Reason,
    Retry,
    Usage,
    Why,
)
from llmq.scheduler.live import LiveSettings
from llmq.workers.engines.base import AnswerTooLarge, Continues, EngineGone, EngineInfo, EngineOverloaded, EngineUnclear
from llmq.workers.executor import Executor, Stop, retry_delay
from llmq.workers.gate import Gate
from tests.engine.scripted import Request, ScriptedEngine


class Deltas:
    """What stands in for the sender of deltas: it remembers."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.flushes: list[Fence] = []
        self.forgotten: list[Fence] = []

    def outlet(self, lease: Lease) -> Callable[[str, bytes], None]:
        """Take deltas."""
        return lambda text, chunk: self.sent.append(text)

    async def flushed(self, fence: Fence) -> None:
        """Nothing is under way."""
        self.flushes.append(fence)

    def forget(self, fence: Fence) -> None:
        """The attempt is over."""
        self.forgotten.append(fence)


class Counter:
    """Counts tokens, as the governor does."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.thrown_away: list[int] = []

    def begun(self, lease: Lease) -> Callable[[], None]:
        """Take a first token; return what takes the others."""
        self.tokens.append("first")
        return lambda: self.tokens.append("another")

    def cut_off(self, kept: int, wasted: int) -> None:
        """Take what a preemption cost."""
        self.thrown_away.append(wasted)


class Bench:
    """An executor, its engine and its gate."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine()
        self.gate = Gate(4)
        self.deltas = Deltas()
        self.begun: list[Lease] = []
        self.counter = Counter()
        self.info = EngineInfo("scripted", "", ("model",), 4)
        settings = LiveSettings.from_hash({})
        self.executor = Executor(
            self.engine,
            self.gate,
            self.deltas,  # type: ignore[arg-type]  # it has the three methods that the executor calls
            lambda: settings,
            lambda: self.info,
            self.counter,
            self.begun.append,
        )

    async def start(self, lease: Lease) -> tuple[asyncio.Task[Outcome], Request]:
        """Run a lease until it is in the engine."""
        task = asyncio.create_task(self.executor.run(lease))
        return task, await self.engine.next()

    async def outcome_of(self, lease: Lease, error: Exception, said: str = "") -> Outcome:
        """Return what becomes of a lease whose request fails, after the engine `said` something."""
        task, request = await self.start(lease)
        if said:
            request.say(said)
        request.fail(error)
        return await task


@pytest.fixture
async def bench() -> Bench:
    """Return a new bench, in the running loop."""
    return Bench()


def lease(
    cls: TrafficClass = TrafficClass.BATCH,
    *,
    attempts: int = 0,
    crashes: int = 0,
    reply_to: str = "",
    data: bytes = b"",
    kept: bytes = b"",
) -> Lease:
    """Return a lease of a chat job."""
    job = Job("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
    lane = "batch:b" if cls is TrafficClass.BATCH else "i:team"
    return Lease(
        Fence(lane, "1-0", 1),
        cls,
        Why.BUCKET,
        "team",
        "c1",
        data or job.encode(),
        10,
        attempts,
        crashes,
        0,
        reply_to,
        kept=kept,
    )


def chat(*, attempts: int = 0) -> Lease:
    """Return a lease of an interactive job that a client waits for."""
    return lease(TrafficClass.INTERACTIVE, reply_to="client", attempts=attempts)


async def test_an_answer_is_passed_on_whole(bench: Bench) -> None:
    """Status, body, request id and usage are the engine's."""
    task, request = await bench.start(lease())
    request.answer()
    assert Answered(200, b'{"ok":true}', "request-1", Usage(3, 4)) == await task
    assert {} == bench.executor.running


async def test_the_engines_refusal_is_an_answer_and_never_retried(bench: Bench) -> None:
    """F-116: status 400 ends the job with that status, in its first attempt."""
    task, request = await bench.start(lease())
    request.answer(400)
    outcome = await task
    assert isinstance(outcome, Answered)
    assert (400, False) == (outcome.status_code, outcome.dead)


async def test_a_job_that_cannot_be_read_never_reaches_the_engine(bench: Bench) -> None:
    """G16: it is a dead letter at once."""
    outcome = await bench.executor.run(lease(data=b"\xc1"))
    assert isinstance(outcome, Ended)
    assert (ErrorCode.MALFORMED, True) == (outcome.code, outcome.dead)
    assert [] == bench.engine.started


async def test_the_end_of_an_answer_waits_for_its_deltas(bench: Bench) -> None:
    """Deltas go to the sender as they come; the first one that says something is the time to the first token."""
    asked = chat()
    task, request = await bench.start(asked)
    request.say("")
    assert [] == bench.begun
    request.say("Hel")
    request.say("lo")
    request.answer()
    await task
    assert ["", "Hel", "lo"] == bench.deltas.sent
    assert [asked] == bench.begun
    assert [asked.fence] == bench.deltas.flushes
    assert [asked.fence] == bench.deltas.forgotten


async def test_the_pieces_of_a_batch_line_are_counted_and_not_sent(bench: Bench) -> None:
    """Nobody waits for them, but the governor has to know when the prompt was read, and what a preemption costs."""
    task, request = await bench.start(lease())
    request.say("x")
    request.say("y")
    request.answer()
    await task
    assert [] == bench.deltas.sent
    assert ["first", "another"] == bench.counter.tokens


async def test_what_a_preemption_throws_away_is_reported(bench: Bench) -> None:
    """Waste is bounded by whoever counts it: here two tokens of an answer that cannot be continued."""
    several = Job("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 2})
    task, request = await bench.start(lease(data=several.encode()))
    request.say("x")
    request.say("y")
    assert bench.executor.stop(lease().fence, Stop.PREEMPTED)
    assert HandedBack(Reason.PREEMPTED) == await task
    assert [2] == bench.counter.thrown_away


async def test_overload_hands_back_with_the_pause_of_the_gate(bench: Bench) -> None:
    """No attempt is spent; `Retry-After` is the delay where it was given."""
    assert HandedBack(Reason.OVERLOAD, 0.5) == await bench.outcome_of(lease(), EngineOverloaded("busy"))
    assert HandedBack(Reason.OVERLOAD, 9.0) == await bench.outcome_of(lease(), EngineOverloaded("busy", 9.0))
    assert not bench.gate.gone


async def test_an_engine_that_was_gone_before_costs_nothing(bench: Bench) -> None:
    """The request was never sent: handed back, no suspect; the gate knows."""
    assert HandedBack(Reason.ENGINE_GONE) == await bench.outcome_of(lease(), EngineGone("refused", in_flight=False))
    assert bench.gate.gone


async def test_an_engine_that_died_in_flight_makes_a_suspect(bench: Bench) -> None:
    """G7: one crash more and no attempt, until the third, which is a dead letter."""
    death = EngineGone("died", in_flight=True)
    assert Retry(0.0, "died", crashed=True) == await bench.outcome_of(lease(crashes=1, attempts=4), death)
    outcome = await bench.outcome_of(lease(crashes=2), death)
    assert isinstance(outcome, Ended)
    assert (ErrorCode.WORKER_LOST, True) == (outcome.code, outcome.dead)


async def test_unclear_errors_are_tried_again_as_often_as_the_settings_say(bench: Bench) -> None:
    """2 attempts for interactive, 5 for batch; the last keeps the engine's status and body where it has them."""
    unclear = EngineUnclear("HTTP 500", 500, b'{"error":1}')
    for attempts in range(4):
        outcome = await bench.outcome_of(lease(attempts=attempts), unclear)
        assert isinstance(outcome, Retry)
        assert 0.5 * 2**attempts <= outcome.delay <= 0.75 * 2**attempts
    assert Answered(500, b'{"error":1}', "", dead=True) == await bench.outcome_of(lease(attempts=4), unclear)
    assert isinstance(await bench.outcome_of(chat(attempts=0), unclear), Retry)
    last = await bench.outcome_of(chat(attempts=1), EngineUnclear("broke off"))
    assert isinstance(last, Ended)
    assert (ErrorCode.ENGINE_ERROR, True) == (last.code, last.dead)


@pytest.mark.parametrize("status", [200, 301, 700])
async def test_what_is_no_answer_never_counts_as_one(bench: Bench, status: int) -> None:
    """G2: a garbled stream came with HTTP 200, and its job did not complete."""
    last = await bench.outcome_of(lease(attempts=4), EngineUnclear("no chunk", status, b'{"garbage": "x"}'))
    assert isinstance(last, Ended)
    assert (ErrorCode.ENGINE_ERROR, True) == (last.code, last.dead)


@pytest.mark.parametrize(
    "error", [EngineUnclear("x"), EngineGone("x", in_flight=True), EngineOverloaded("x"), ValueError("x")]
)
async def test_an_interactive_answer_that_has_begun_is_interrupted(bench: Bench, error: Exception) -> None:
    """G18: whatever the error, it is not run a second time."""
    outcome = await bench.outcome_of(chat(), error, said="Hel")
    assert isinstance(outcome, Ended)
    assert ErrorCode.INTERRUPTED == outcome.code


async def test_a_fault_of_the_engine_module_is_an_unclear_error(bench: Bench) -> None:
    """It does not take the worker down."""
    outcome = await bench.outcome_of(lease(), KeyError("choices"))
    assert isinstance(outcome, Retry)
    assert "KeyError" in outcome.error


async def test_an_answer_that_is_too_large_is_not_tried_again(bench: Bench) -> None:
    """It would be as large again."""
    outcome = await bench.outcome_of(lease(), AnswerTooLarge("8 MiB"))
    assert Ended(ErrorCode.RESULT_TOO_LARGE, "8 MiB") == outcome


async def test_messages_are_bounded_and_can_be_encoded(bench: Bench) -> None:
    """Half of a surrogate pair is replaced, a page is cut."""
    outcome = await bench.outcome_of(lease(), EngineUnclear("\udcff" + "x" * 10**6))
    assert isinstance(outcome, Retry)
    assert "?" + "x" * 1999 == outcome.error


@pytest.mark.parametrize(
    ("why", "expected"),
    [
        (Stop.PREEMPTED, HandedBack(Reason.PREEMPTED)),
        (Stop.SHUTDOWN, HandedBack(Reason.SHUTDOWN)),
        (Stop.OVERDUE, HandedBack(Reason.SHUTDOWN)),
        (Stop.LOST, Abandoned()),
        (Stop.CANCELLED, Ended(ErrorCode.CANCELLED, "the job was cancelled while it ran")),
    ],
)
async def test_a_request_is_stopped_in_the_engine(bench: Bench, why: Stop, expected: Outcome) -> None:
    """Why it is stopped decides what becomes of the job; a second stop changes nothing."""
    asked = lease()
    task, request = await bench.start(asked)
    assert bench.executor.stop(asked.fence, why)
    assert not bench.executor.stop(asked.fence, Stop.LOST)
    assert expected == await task
    assert request.aborted.is_set()
    assert not bench.executor.stop(asked.fence, why)


@pytest.mark.parametrize("why", [Stop.SHUTDOWN, Stop.OVERDUE])
async def test_stopping_an_answer_that_has_begun_interrupts_it(bench: Bench, why: Stop) -> None:
    """G18: at a shutdown as well."""
    asked = chat()
    task, request = await bench.start(asked)
    request.say("Hel")
    bench.executor.stop(asked.fence, why)
    outcome = await task
    assert isinstance(outcome, Ended)
    assert ErrorCode.INTERRUPTED == outcome.code


async def test_a_slot_goes_on_after_a_stop(bench: Bench) -> None:
    """The task that ran a stopped request can run, and be stopped, again."""

    async def slot() -> list[Outcome]:
        return [await bench.executor.run(lease()), await bench.executor.run(lease())]

    task = asyncio.create_task(slot())
    for _ in range(2):
        await bench.engine.next()
        bench.executor.stop(lease().fence, Stop.PREEMPTED)
    assert [HandedBack(Reason.PREEMPTED)] * 2 == await task
    assert 0 == task.cancelling()


async def test_the_cancel_of_the_process_is_not_an_outcome(bench: Bench) -> None:
    """F-031: a cancel that nobody announced by `stop` passes through."""
    task, request = await bench.start(lease())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert request.aborted.is_set()


def test_retries_never_come_before_their_time() -> None:
    """F-114: 0.5 s doubling to 60 s, and up to half of it more."""
    assert [0.5, 1, 2, 60] == [retry_delay(attempts, lambda: 0.0) for attempts in (0, 1, 2, 50)]
    assert 90 == retry_delay(50, lambda: 1.0)


CHAT_LINE = Job("/v1/chat/completions", {"model": "model", "messages": [{"role": "user", "content": "x"}]})


async def test_a_preempted_line_keeps_its_text_and_goes_on_from_it(bench: Bench) -> None:
    """Nothing is thrown away: the next attempt asks for the rest, and the answer is whole."""
    bench.info = EngineInfo("scripted", "", ("model",), 4, continues=Continues.PREFILL)
    task, request = await bench.start(lease(data=CHAT_LINE.encode()))
    request.say("Once")
    request.say(" upon")
    assert bench.executor.stop(lease().fence, Stop.PREEMPTED)
    outcome = await task
    assert isinstance(outcome, HandedBack)
    assert Kept("Once upon", 2, "model") == Kept.decode(outcome.kept)
    assert [0] == bench.counter.thrown_away

    task, request = await bench.start(lease(data=CHAT_LINE.encode(), kept=outcome.kept))
    assert {"role": "assistant", "content": "Once upon"} == request.job.body["messages"][-1]
    request.answer(body=b'{"choices": [{"message": {"content": " a time"}}]}')
    answered = await task
    assert isinstance(answered, Answered)
    assert b'"content":"Once upon a time"' in answered.body


async def test_an_engine_that_refuses_the_rest_is_asked_for_the_whole(bench: Bench) -> None:
    """What was put behind the request may be what it refuses: the line itself gets its own answer."""
    bench.info = EngineInfo("scripted", "", ("model",), 4, continues=Continues.PREFILL)
    task, request = await bench.start(lease(data=CHAT_LINE.encode(), kept=Kept("Once", 1, "model").encode()))
    request.answer(400)
    whole = await bench.engine.next()
    assert CHAT_LINE.body == whole.job.body
    whole.answer()
    outcome = await task
    assert isinstance(outcome, Answered)
    assert 200 == outcome.status_code


async def test_text_that_was_kept_outlives_an_attempt_that_made_none(bench: Bench) -> None:
    """A line that goes on is read again first; where chat comes meanwhile, it makes way with what it had."""
    bench.info = EngineInfo("scripted", "", ("model",), 4, continues=Continues.PREFILL)
    task, _ = await bench.start(lease(data=CHAT_LINE.encode(), kept=Kept("Once", 1, "model").encode()))
    bench.executor.stop(lease().fence, Stop.PREEMPTED)
    outcome = await task
    assert isinstance(outcome, HandedBack)
    assert Kept("Once", 1, "model") == Kept.decode(outcome.kept)


async def test_a_drained_worker_keeps_text_too(bench: Bench) -> None:
    """A deploy need not cost the tokens of all that ran."""
    task, request = await bench.start(lease(data=CHAT_LINE.encode()))
    request.say("Once")
    bench.executor.stop(lease().fence, Stop.SHUTDOWN)
    outcome = await task
    assert isinstance(outcome, HandedBack)
    assert Kept("Once", 1, "model") == Kept.decode(outcome.kept)


async def test_batch_is_behind_chat_inside_an_engine_that_has_priorities(bench: Bench) -> None:
    """Lower first: chat has 0, and a job that says its own keeps it. An engine without priorities gets none."""

    async def sent(cls: TrafficClass, job: Job) -> object:
        task, request = await bench.start(lease(cls, data=job.encode()))
        request.answer()
        await task
        return request.job.body.get("priority")

    own = Job(CHAT_LINE.url, {**CHAT_LINE.body, "priority": -3})
    assert None is await sent(TrafficClass.BATCH, CHAT_LINE)
    bench.info = EngineInfo("scripted", "", ("model",), 4, prioritises=True)
    assert 1 == await sent(TrafficClass.BATCH, CHAT_LINE)
    assert -3 == await sent(TrafficClass.BATCH, own)
    assert None is await sent(TrafficClass.INTERACTIVE, CHAT_LINE)
