"""A worker on a real server, its engine in the hands of the test: what it claims, hands back and survives."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError, ResponseError, TimeoutError

from llmq.scheduler import scripts
from llmq.scheduler.connection import connect
from llmq.scheduler.tuned import field_of
from llmq.workers import contact as contact_module
from llmq.workers import desk as desk_module
from llmq.workers import keeper as keeper_module
from llmq.workers import reading as reading_module
from llmq.workers.chat_signal import BLIND_AFTER
from llmq.workers.engines.base import EngineGone, EngineOverloaded, EngineUnclear
from llmq.workers.governing import STEP_S
from tests.conftest import OwnServer
from tests.engine.scripted import Request, ScriptedEngine
from tests.redis.serving import (
    BATCH,
    CHAT_LANE,
    KEYS,
    LANE,
    batch_ended,
    configure,
    each_line_ended_once,
    entries,
    entry_of,
    job_ended,
    pending,
    results,
    serving,
    submit_batch,
    submit_chat,
    tries,
    until,
)


@pytest.fixture
def short_contact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let workers reclaim after one lease of contact, however short."""
    monkeypatch.setattr(contact_module, "LEAST_CONTACT_S", 0.0)


def answer(request: Request) -> None:
    """Answer at once."""
    request.answer()


def answer_after(seconds: float) -> Callable[[Request], None]:
    """Answer after a while."""

    def later(request: Request) -> None:
        asyncio.get_running_loop().call_later(seconds, request.answer)

    return later


class TestServing:
    async def test_a_batch_is_drained_and_each_line_ends_once(self, redis_url: str, redis: Redis) -> None:
        """G16: a batch of more lines than slots ends with one result a line, and nothing without a TTL is left."""
        await submit_batch(redis, 300)
        async with serving(redis_url, ScriptedEngine(8, answer)):
            assert "completed" == (await batch_ended(redis))["status"]
        await each_line_ended_once(redis, 300)

    async def test_until_empty_ends_when_the_last_lane_has_gone(self, redis_url: str, redis: Redis) -> None:
        """`--until-empty`: the worker stays while a line waits for its retry, and ends by itself after the last."""
        failed: list[str] = []

        def fail_once(request: Request) -> None:
            if request.prompt == "line 2" and not failed:
                failed.append(request.prompt)
                request.fail(EngineUnclear("once"))
            else:
                request.answer()

        await submit_batch(redis, 3)
        async with serving(redis_url, ScriptedEngine(2, fail_once), until_empty=True) as served:
            report = await served.stopped()
        assert 3 == report.ended
        assert 0 == await redis.exists(KEYS.lanes)
        await each_line_ended_once(redis, 3)

    async def test_until_empty_waits_for_an_open_batch(self, redis_url: str, redis: Redis) -> None:
        """`--until-empty`: a batch that is not sealed may get lines yet, so the queue is not empty."""
        opened = scripts.open_batch(KEYS, BATCH, lane=LANE, tenant="team", window_ms=0, need=0, record={"name": "x"})
        await scripts.run(redis, opened)
        async with serving(redis_url, ScriptedEngine(2, answer), until_empty=True) as served:
            await asyncio.sleep(0.5)
            assert not served.task.done()
            await scripts.run(redis, scripts.seal_batch(KEYS, BATCH, lane=LANE, next_line=1))
            await served.stopped()

    async def test_a_job_that_runs_for_many_leases_runs_once(
        self, redis_url: str, redis: Redis, short_contact: None
    ) -> None:
        """G4, F-002, F-006, F-009, F-019: a job of 10 leases is renewed, and no other worker gets it."""
        await configure(redis, lease="1000")
        await submit_batch(redis, 1)
        first, second = ScriptedEngine(1), ScriptedEngine(1)
        async with serving(redis_url, first), serving(redis_url, second):
            request = await _either(first, second)
            await asyncio.sleep(10)
            request.answer()
            await batch_ended(redis)
        assert ["line 1"] == first.prompts + second.prompts
        await each_line_ended_once(redis, 1)

    async def test_a_blocked_event_loop_loses_no_lease(self, redis_url: str, redis: Redis, short_contact: None) -> None:
        """G4, F-010, F-011: while the loop is blocked for 3 leases the thread renews, and the heartbeat goes on."""
        await configure(redis, lease="1000")
        await submit_batch(redis, 1)
        engine = ScriptedEngine(1)
        async with serving(redis_url, engine) as served:
            request = await engine.next()
            client = connect(redis_url)
            await client.ping()
            time.sleep(3)  # noqa: ASYNC251  # the blocked loop is what is tested
            row: Any = (await client.xpending_range(KEYS.lane(LANE), "workers", "-", "+", 1))[0]
            beat = await client.hget(KEYS.worker(served.worker.id), "seen_at")
            await client.aclose()
            assert row["time_since_delivered"] < 1000
            assert time.time() - int(beat or 0) / 1000 < 1
            request.answer()
            await batch_ended(redis)
        assert ["line 1"] == engine.prompts
        await each_line_ended_once(redis, 1)

    async def test_a_malformed_job_harms_no_other(self, redis_url: str, redis: Redis) -> None:
        """G16: an entry that cannot be decoded ends as malformed, in the dead letters; the others are answered."""
        opened = scripts.open_batch(KEYS, BATCH, lane=LANE, tenant="team", window_ms=0, need=0, record={"name": "x"})
        await scripts.run(redis, opened)
        good = scripts.SubmitLine(2, "c2", _encoded("line 2"), 10)
        lines = [scripts.SubmitLine(1, "c1", b"\xc1garbage", 10), good]
        await scripts.run(redis, scripts.submit_lines(KEYS, BATCH, lane=LANE, first=1, after=3, lines=lines))
        await scripts.run(redis, scripts.seal_batch(KEYS, BATCH, lane=LANE, next_line=3))
        async with serving(redis_url, ScriptedEngine(2, answer)):
            await batch_ended(redis)
        assert {"c1": "malformed_job", "c2": ""} == {row["k"]: row["e"] for row in await results(redis)}
        assert 1 == await redis.xlen(KEYS.dead)

    async def test_what_an_engine_says_can_always_be_stored(self, redis_url: str, redis: Redis) -> None:
        """G16: a message of half a surrogate pair and a megabyte ends its own line only."""

        def fail(request: Request) -> None:
            if request.prompt == "line 1":
                request.fail(EngineGone("\ud800" + "x" * 2**20, in_flight=True))
            else:
                request.answer()

        await submit_batch(redis, 2)
        async with serving(redis_url, ScriptedEngine(1, fail)):
            await batch_ended(redis)
        rows = {row["k"]: row for row in await results(redis)}
        assert "worker_lost" == rows["c1"]["e"]
        assert len(rows["c1"]["m"]) < 3000
        assert "completed" == rows["c2"]["s"]


class TestForgottenClaims:
    """A server without its last writes: a claim that it has forgotten is made again, with the same number (G12)."""

    async def _forget(self, redis: Redis, prompts: list[str]) -> None:
        """Have the server be as it was before any claim: as a replica that had not heard of one yet."""
        await redis.flushall()
        await submit_batch(redis, len(prompts), prompts=prompts)

    async def test_the_attempt_that_runs_goes_on_under_the_new_claim(
        self, redis_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """G3, G12, F-072: the job is in the engine already; it is asked once, and its answer is the line's."""
        # A renewal between the loss and the new claim would be told that the lease is lost: that is the other way out.
        monkeypatch.setattr(keeper_module, "LONGEST_INTERVAL_S", 60.0)
        await configure(redis, lease="240000")
        await submit_batch(redis, 1)
        engine = ScriptedEngine(2)
        async with serving(redis_url, engine, reserve=0) as served:
            request = await engine.next()
            await self._forget(redis, ["line 1"])
            await until(lambda: _claimed(redis, 1))
            request.answer()
            await batch_ended(redis)
            assert not served.task.done()
        assert ["line 1"] == engine.prompts
        await each_line_ended_once(redis, 1)

    async def test_another_job_in_its_place_gets_an_answer_of_its_own(self, redis_url: str, redis: Redis) -> None:
        """G3, G12: the entry is another one's by now: what runs is aborted, and its answer is nobody's."""
        await submit_batch(redis, 1)
        engine = ScriptedEngine(2)
        async with serving(redis_url, engine, reserve=0):
            old = await engine.next()
            await self._forget(redis, ["another line"])
            new = await engine.next()
            assert old.aborted.is_set()
            assert "another line" == new.prompt
            new.answer()
            await batch_ended(redis)
        await each_line_ended_once(redis, 1)


class TestChatAndBatch:
    async def test_chat_preempts_the_youngest_batch_request(self, redis_url: str, redis: Redis) -> None:
        """G9: chat that finds no free slot starts at once; the youngest batch request is aborted and handed back."""
        await submit_batch(redis, 2)
        engine = ScriptedEngine(2)
        async with serving(redis_url, engine, reserve=0):
            oldest, youngest = await engine.next(), await engine.next()
            began = time.monotonic()
            await submit_chat(redis, "chat")
            asked = await engine.next()
            assert time.monotonic() - began < 0.5
            assert "chat" == asked.prompt
            assert youngest.aborted.is_set()
            assert not oldest.aborted.is_set()
            await until(lambda: _tried(redis, "2-0", (0, 0, 1)))
            asked.answer()
            assert youngest.prompt == (await engine.next()).prompt
            for request in engine.running:
                request.answer()
            await batch_ended(redis)
        await each_line_ended_once(redis, 2)

    async def test_a_request_that_was_preempted_three_times_is_protected(self, redis_url: str, redis: Redis) -> None:
        """A batch line is preempted 3 times at most; the fourth chat waits for a slot."""
        await submit_batch(redis, 1)
        engine = ScriptedEngine(1)
        async with serving(redis_url, engine, reserve=0):
            for number in range(3):
                line = await engine.next()
                await submit_chat(redis, f"chat {number}")
                asked = await engine.next()
                assert line.aborted.is_set()
                asked.answer()
            line = await engine.next()
            await submit_chat(redis, "chat 3")
            await asyncio.sleep(1.5)
            assert not line.aborted.is_set()
            line.answer()
            assert "chat 3" == (await engine.next()).prompt
            engine.running[0].answer()
            await job_ended(redis, "chat 3")
        await each_line_ended_once(redis, 1)

    async def test_preemption_can_be_turned_off(self, redis_url: str, redis: Redis) -> None:
        """With `preempt off`, chat waits for a slot that gets free."""
        await configure(redis, preempt="off")
        await submit_batch(redis, 1)
        engine = ScriptedEngine(1)
        async with serving(redis_url, engine):
            line = await engine.next()
            await submit_chat(redis, "chat")
            await asyncio.sleep(1.2)
            assert not line.aborted.is_set()
            line.answer()
            (await engine.next()).answer()
            await job_ended(redis, "chat")

    async def test_a_long_prompt_that_is_being_read_makes_way_for_chat(
        self, redis_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With an objective: chat does not wait for thousands of batch tokens to be read; the line runs after it."""
        monkeypatch.setattr(reading_module, "YIELD_S", 3.0)  # time to look before the line may be begun beside it
        await configure(redis, ttft_p95="1000")
        long, other = "word " * 1000, "other " * 1000
        await submit_batch(redis, 2, prompts=[long, other])
        engine = ScriptedEngine(8)
        async with serving(redis_url, engine, reserve=0):
            answering, line = await engine.next(), await engine.next()
            assert (long, other) == (answering.prompt, line.prompt)
            answering.say("its prompt is read")
            await until(lambda: _governor(redis, "idle"))
            await asyncio.sleep(3.0)  # being read for that long does not bring it back before the chat has its token
            await submit_chat(redis, "chat")
            asked = await engine.next()
            await until(line.aborted.is_set)
            assert not answering.aborted.is_set()
            await until(lambda: _tried(redis, "2-0", (0, 0, 1)))
            answering.answer()
            await until(lambda: _has_results(redis, 1))  # a slot is free, and what may be claimed was looked at again
            assert [asked] == engine.running
            asked.answer()
            again = await engine.next()
            assert other == again.prompt
            again.answer()
            await batch_ended(redis)
        await each_line_ended_once(redis, 2)

    @pytest.mark.parametrize("why", ["short", "no objective", "no preemption", "three times before"])
    async def test_other_prompts_do_not(self, redis_url: str, redis: Redis, why: str) -> None:
        """What is read in one step, what nobody asked for, what is turned off, and what has made way often enough."""
        await configure(
            redis,
            ttft_p95="0" if why == "no objective" else "1000",
            preempt="off" if why == "no preemption" else "on",
        )
        await submit_batch(redis, 1, prompts=["short" if why == "short" else "word " * 1000])
        engine = ScriptedEngine(8)
        async with serving(redis_url, engine, reserve=0):
            line = await engine.next()
            await until(lambda: _governor(redis, "fixed" if why == "no objective" else "idle"))
            for number in range(3 if why == "three times before" else 0):
                await submit_chat(redis, f"earlier {number}")
                asked = await engine.next()
                await until(line.aborted.is_set)
                asked.answer()
                line = await engine.next()
            await submit_chat(redis, "chat")
            asked = await engine.next()
            asked.answer()
            await job_ended(redis, "chat")
            assert not line.aborted.is_set()
            line.answer()
            await batch_ended(redis)

    @pytest.mark.parametrize(("status", "state"), [(400, "holds"), (200, "fixed")])
    async def test_only_answers_without_a_token_say_that_chat_cannot_be_measured(
        self, redis_url: str, redis: Redis, status: int, state: str
    ) -> None:
        """Chat that an engine refuses, or takes along when it dies, makes the governor forget nothing."""
        tuned = '{"batch": 5, "prefill_tps": 1e6, "alone_s": 0.1, "chat_rate": 1.0, "at": 0.0, "chat": 3.0}'
        await configure(redis, ttft_p95="1000", **{field_of("scripted", ["model"]): tuned})
        engine = ScriptedEngine(8)
        async with serving(redis_url, engine, reserve=0):
            for number in range(BLIND_AFTER):
                await submit_chat(redis, f"chat {number}")
                (await engine.next()).answer(status, b'{"error": {"message": "no"}}')
                await job_ended(redis, f"chat {number}")
            await until(lambda: _governor(redis, state))

    async def test_chat_does_not_count_against_a_batch_cap(self, redis_url: str, redis: Redis) -> None:
        """With a limit of 9 and `--batch-cap 1`, batch runs beside three chat requests, and so does the next one."""
        tuned = '{"batch": 5, "prefill_tps": 1e6, "alone_s": 0.1, "chat_rate": 1.0, "at": 0.0, "chat": 3.0}'
        await configure(redis, ttft_p95="1000", **{field_of("scripted", ["model"]): tuned})
        engine = ScriptedEngine(8)
        async with serving(redis_url, engine, reserve=0, batch_cap=1):
            for number in range(3):
                await submit_chat(redis, f"chat {number}")
                (await engine.next()).say("Hello")
            await until(lambda: _governor(redis, "holds"))
            for batch in ("first", "second"):
                await submit_batch(redis, 1, batch=batch)
                line = await engine.next()
                assert 4 == len(engine.running)
                await asyncio.sleep(3 * STEP_S)  # the governor looks at it
                line.answer()
                await batch_ended(redis, batch)
                await asyncio.sleep(3 * STEP_S)  # and at what is left
            for request in list(engine.running):
                request.answer()

    async def test_the_reserve_is_kept_free_of_batch(self, redis_url: str, redis: Redis) -> None:
        """Of 4 slots with a reserve of 1, batch takes 3; chat starts in the fourth, and nothing is preempted."""
        await submit_batch(redis, 10)
        engine = ScriptedEngine(4)
        async with serving(redis_url, engine, reserve=1):
            for _ in range(3):
                await engine.next()
            await submit_chat(redis, "chat")
            asked = await engine.next()
            assert "chat" == asked.prompt
            assert not any(request.aborted.is_set() for request in engine.started)
            engine.on_request = answer
            for request in list(engine.running):
                request.answer()
            await batch_ended(redis)

    async def test_the_deadline_starts_batch_in_a_reserved_slot(self, redis_url: str, redis: Redis) -> None:
        """G10: with all free slots reserved for chat, batch starts one job after the deadline, and it is protected."""
        await configure(redis, deadline="1000")
        await submit_batch(redis, 1)
        engine = ScriptedEngine(1)
        async with serving(redis_url, engine, reserve=1):
            line = await engine.next()
            await submit_chat(redis, "chat")
            await asyncio.sleep(1.2)
            assert not line.aborted.is_set()
            engine.on_request = answer
            line.answer()
            await job_ended(redis, "chat")

    async def test_the_deadline_protects_a_line_that_runs(self, redis_url: str, redis: Redis) -> None:
        """G10: preempted starts cannot put the deadline off for ever; once it is due, the line that runs stays."""
        await configure(redis, deadline="2000")
        engine = ScriptedEngine(1)
        async with serving(redis_url, engine, reserve=0):
            await submit_batch(redis, 2)  # only now: what waits for a worker that starts slowly is due when it starts
            preempted = await engine.next()
            await submit_chat(redis, "first")
            (await engine.next()).answer()
            assert preempted.aborted.is_set()
            line = await engine.next()
            await until(lambda: _protected_start(redis))  # the deadline itself brings a trip
            await submit_chat(redis, "second")
            await asyncio.sleep(0.5)
            assert not line.aborted.is_set()
            engine.on_request = answer
            line.answer()
            await job_ended(redis, "second")
            await batch_ended(redis)

    async def test_a_slot_that_got_free_hears_the_bell(self, redis_url: str, redis: Redis) -> None:
        """A worker that was full of chat starts the next chat at once, in the middle of a wait that was deaf to it."""
        engine = ScriptedEngine(1)
        waits = []
        async with serving(redis_url, engine):
            for number in range(3):
                await submit_chat(redis, f"full {number}")
                request = await engine.next()
                await asyncio.sleep(1.2)  # longer than a wait: the one that is under way now began without room
                request.answer()
                await job_ended(redis, f"full {number}")
                await asyncio.sleep(0.06)
                began = time.monotonic()
                await submit_chat(redis, f"next {number}")
                request = await engine.next()
                waits.append(time.monotonic() - began)
                request.answer()
                await job_ended(redis, f"next {number}")
        assert max(waits) < 0.3

    async def test_never_more_is_held_than_there_are_slots(self, redis_url: str, redis: Redis) -> None:
        """Under random load a worker holds its slots and what replaces preempted requests, and runs its slots."""
        rng = random.Random(5)
        engine = ScriptedEngine(4, lambda request: answer_after(rng.random() / 20)(request))
        over: list[int] = []
        async with serving(redis_url, engine) as served:
            desk, executor = served.worker._desk, served.worker._executor

            async def watch() -> None:
                while True:
                    stopping = sum(1 for running in executor.running.values() if running.stop is not None)
                    if len(desk.held) > 4 + stopping:
                        over.append(len(desk.held))
                    await asyncio.sleep(0)

            watching = asyncio.create_task(watch())
            for number in range(60):
                if number % 20 == 0:
                    await submit_batch(redis, 30, batch=f"b{number}")
                await submit_chat(redis, f"chat {number}")
                await asyncio.sleep(rng.random() / 50)
            for number in range(0, 60, 20):
                await batch_ended(redis, f"b{number}")
            for number in range(60):  # where submits are slow, the last chat outlives the last batch
                await job_ended(redis, f"chat {number}")
            watching.cancel()
        assert [] == over
        assert engine.most_running <= 4
        for number in range(0, 60, 20):
            await each_line_ended_once(redis, 30, f"b{number}")


class TestCancel:
    async def test_a_running_job_is_aborted_by_the_control_list(self, redis_url: str, redis: Redis) -> None:
        """G14: a cancelled running job is aborted in the engine within 1 s, and ends as cancelled."""
        engine = ScriptedEngine(1)
        async with serving(redis_url, engine):
            await submit_chat(redis, "chat")
            request = await engine.next()
            consumer = await _cancel(redis, "chat")
            entry = await entry_of(redis, "chat")
            await redis.rpush(KEYS.control(consumer), f"cancel {CHAT_LANE} {entry}")
            async with asyncio.timeout(1):
                await request.aborted.wait()
            assert "cancelled" == (await job_ended(redis, "chat"))["state"]

    async def test_a_lost_command_is_made_up_for_by_the_renewal(self, redis_url: str, redis: Redis) -> None:
        """G14, F-082, F-126: without the control list, the next renewal aborts the request."""
        await configure(redis, lease="1000")
        engine = ScriptedEngine(1)
        async with serving(redis_url, engine):
            await submit_chat(redis, "chat")
            request = await engine.next()
            await _cancel(redis, "chat")
            async with asyncio.timeout(1):
                await request.aborted.wait()
            assert "cancelled" == (await job_ended(redis, "chat"))["state"]

    async def test_a_claimed_job_that_no_slot_has_begun_is_cancelled_too(self, redis_url: str, redis: Redis) -> None:
        """G14: chat that waits at the desk for the slot of a preempted request never starts after its cancel."""
        await submit_batch(redis, 1)
        engine = _StubbornEngine(1)
        async with serving(redis_url, engine, reserve=0) as served:
            await engine.next()
            await submit_chat(redis, "chat")
            await until(lambda: len(served.worker._desk.held) == 2)
            entry = await entry_of(redis, "chat")
            await _cancel(redis, "chat")
            await redis.rpush(KEYS.control(served.worker.id), f"cancel {CHAT_LANE} {entry}")
            assert "cancelled" == (await job_ended(redis, "chat"))["state"]
            engine.let_go.set()
            engine.on_request = answer
            await batch_ended(redis)
        assert "chat" not in engine.prompts

    async def test_a_command_that_overtakes_the_claim_s_reply_is_not_lost(
        self, redis_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """G14: Redis knows who runs the job before its worker does, and tells it on another connection."""
        engine = ScriptedEngine(1)
        async with serving(redis_url, engine) as served:
            calls = served.worker._desk._calls
            at_once = calls.run_all

            async def late(some: Sequence[scripts.Call[Any]]) -> list[Any]:
                replies = await at_once(some)
                await asyncio.sleep(0.3)
                return replies

            monkeypatch.setattr(calls, "run_all", late)
            await submit_chat(redis, "chat")
            await until(lambda: pending(redis, CHAT_LANE))
            consumer = await _cancel(redis, "chat")
            entry = await entry_of(redis, "chat")
            await redis.rpush(KEYS.control(consumer), f"cancel {CHAT_LANE} {entry}")
            async with asyncio.timeout(1):
                await (await engine.next()).aborted.wait()
            assert "cancelled" == (await job_ended(redis, "chat"))["state"]

    async def test_all_lines_of_a_cancelled_batch_are_aborted(self, redis_url: str, redis: Redis) -> None:
        """G14: `cancel-lane` aborts every running line of the batch; each line ends once, as cancelled."""
        await configure(redis, lease="1000")
        await submit_batch(redis, 20)
        engine = ScriptedEngine(4)
        async with serving(redis_url, engine, reserve=0) as served:
            running = [await engine.next() for _ in range(4)]
            await scripts.run(redis, scripts.cancel_batch(KEYS, BATCH, lane=LANE))
            await redis.rpush(KEYS.control(served.worker.id), f"cancel-lane {LANE}")
            async with asyncio.timeout(1):
                await asyncio.gather(*(request.aborted.wait() for request in running))
            assert "cancelled" == (await batch_ended(redis))["status"]
        assert 4 == len(engine.started)
        await each_line_ended_once(redis, 20)


class TestEngineTrouble:
    @pytest.mark.parametrize("retry_after", [None, 0.7])
    async def test_overload_pauses_batch_and_spends_no_attempt(
        self, redis_url: str, redis: Redis, retry_after: float | None
    ) -> None:
        """Overload: batch pauses (`Retry-After` wins over 0.5 s), the cap halves, the line keeps all its attempts."""
        await submit_batch(redis, 6)
        engine = ScriptedEngine(4)
        async with serving(redis_url, engine, reserve=0) as served:
            requests = [await engine.next() for _ in range(4)]
            requests[0].fail(EngineOverloaded("busy", retry_after))
            began = time.monotonic()
            await until(lambda: _tried(redis, "1-0", (0, 0, 0)))
            assert 0 == served.worker._gate.batch_cap(began)  # by now the pause may be over
            for request in requests[1:]:
                request.answer()
            again = await engine.next()
            assert time.monotonic() - began >= (retry_after or 0.5)
            assert "line 1" in {again.prompt, (await engine.next()).prompt}
            assert 2 == len(engine.running)
            engine.on_request = answer
            for request in list(engine.running):
                request.answer()
            await batch_ended(redis)
        await each_line_ended_once(redis, 6)

    async def test_an_overloaded_engine_is_left_alone_past_the_deadline_too(self, redis_url: str, redis: Redis) -> None:
        """G10: a start that is refused is none, so the deadline stays due, and no line after line is sent for that."""
        await configure(redis, deadline="1000")
        await submit_batch(redis, 40)
        engine = ScriptedEngine(4, lambda request: request.fail(EngineOverloaded("busy")))
        async with serving(redis_url, engine, reserve=0):
            await until(lambda: len(engine.started) > 4)
            await asyncio.sleep(2.5)
            assert len(engine.started) < 12
            engine.on_request = answer
            await batch_ended(redis)
        await each_line_ended_once(redis, 40)

    async def test_a_line_that_is_always_refused_keeps_no_other_waiting(self, redis_url: str, redis: Redis) -> None:
        """G16: an engine that says 429 to one line, because it is too large for its limits, is not overloaded."""
        refusing = True

        def answer_others(request: Request) -> None:
            if refusing and request.prompt == "line 1":
                request.fail(EngineOverloaded("request too large"))
            else:
                request.answer()

        await submit_batch(redis, 12)
        async with serving(redis_url, ScriptedEngine(1, answer_others)):
            await until(lambda: _ended(redis, 11))
            refusing = False
            await batch_ended(redis)
        await each_line_ended_once(redis, 12)

    async def test_an_engine_that_is_gone_gets_nothing_until_a_probe_succeeds(
        self, redis_url: str, redis: Redis
    ) -> None:
        """Engine gone before the request was sent: handed back, nothing claimed, all runs after the probe."""
        await submit_batch(redis, 3)
        engine = ScriptedEngine(1)
        async with serving(redis_url, engine):
            request = await engine.next()
            engine.healthy = False
            request.fail(EngineGone("refused", in_flight=False))
            await until(lambda: engine.probes >= 2)
            await until(lambda: _tried(redis, "1-0", (0, 0, 0)))  # a probe that was due anyway may come before
            assert ["line 1"] == engine.prompts
            assert 0 == await pending(redis)
            assert {"1-0": (0, 0, 0)} == await tries(redis)
            engine.healthy = True
            engine.on_request = answer
            await batch_ended(redis)
        assert ["line 1", "line 1", "line 2", "line 3"] == engine.prompts
        await each_line_ended_once(redis, 3)

    async def test_a_line_in_flight_at_three_deaths_is_a_dead_letter(self, redis_url: str, redis: Redis) -> None:
        """G7, F-117: a line that kills the engine ends after 3 deaths; suspects run one at a time, others complete."""
        together: list[set[str]] = []
        engine = ScriptedEngine(4)

        def poison(request: Request) -> None:
            suspects = served.worker._desk.held
            together.append({lease.key for lease in suspects if lease.suspect})
            if request.prompt == "line 3":
                asyncio.get_running_loop().call_later(0.02, die)
            else:
                asyncio.get_running_loop().call_later(0.05, request.answer)

        def die() -> None:
            for request in list(engine.running):
                request.fail(EngineGone("died", in_flight=True))

        await submit_batch(redis, 12)
        engine.on_request = poison
        worker = serving(redis_url, engine, reserve=0)
        async with worker as served:
            record = await batch_ended(redis)
        assert ("11", "1") == (record["completed"], record["failed"])
        assert ["c3"] == [row["k"] for row in await results(redis) if row["e"] == "worker_lost"]
        assert 3 == engine.prompts.count("line 3")
        assert max(map(len, together)) <= 1
        assert ["c3"] == [letter["key"] for letter in await entries(redis, KEYS.dead)]

    async def test_a_server_that_forgot_a_script_gives_no_second_suspect(
        self, redis_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """G7, F-088: after SCRIPT FLUSH the claim of a trip may run before the end that it was sent with.

        Here it always does. Were the worker to die in between, both suspects would be held against it.
        """
        pending: list[int] = []

        async def backwards(client: Redis, calls: list[scripts.Call[Any]]) -> list[Any]:
            replies = []
            for call in reversed(calls):
                replies += await scripts.run_all(client, [call])
                found = []
                if await client.exists(lane):
                    found = await client.xpending_range(lane, "workers", "-", "+", 10)
                pending.append(sum(row["message_id"] in suspects for row in found))
            return replies[::-1]

        suspects: set[bytes] = set()
        lane = KEYS.lane(LANE)
        _intercept(monkeypatch, backwards)
        await submit_batch(redis, 6)
        engine = ScriptedEngine(3)
        async with serving(redis_url, engine, reserve=0):
            in_flight = [await engine.next() for _ in range(3)]
            for request in in_flight:
                request.fail(EngineGone("died", in_flight=True))
            await until(lambda: _tried(redis, "3-0", (0, 1, 0)))
            suspects.update({b"1-0", b"2-0", b"3-0"})
            pending.clear()
            engine.on_request = answer
            for request in engine.running:
                request.answer()
            await batch_ended(redis)
        assert 1 == max(pending)
        await each_line_ended_once(redis, 6)

    async def test_a_suspect_in_its_last_attempt_runs_beside_no_batch(self, redis_url: str, redis: Redis) -> None:
        """G7: in flight at two deaths that others may have caused, a line meets no third; chat goes on beside it."""
        engine = ScriptedEngine(3)
        await submit_batch(redis, 12)
        async with serving(redis_url, engine, reserve=0):
            for together in ({"line 1", "line 2", "line 3"}, {"line 1", "line 4", "line 5"}):
                in_flight = [await engine.next() for _ in together]
                assert together == {request.prompt for request in in_flight}
                for request in in_flight:
                    request.fail(EngineGone("died", in_flight=True))
            suspect = await engine.next()
            await submit_chat(redis, "chat")
            chat = await engine.next()
            assert ["line 1", "chat"] == [suspect.prompt, chat.prompt]
            chat.answer()
            await job_ended(redis, "chat")
            assert [suspect] == engine.running
            engine.on_request = answer
            suspect.answer()
            record = await batch_ended(redis)
        assert ("12", "0") == (record["completed"], record["failed"])

    async def test_a_suspect_in_its_last_attempt_leaves_slots_to_chat(self, redis_url: str, redis: Redis) -> None:
        """What the deadline starts meanwhile waits for it: one line, and not one in each slot (G10)."""
        engine = ScriptedEngine(3)
        await submit_batch(redis, 12)
        async with serving(redis_url, engine, reserve=0) as served:
            for together in (3, 3):
                for request in [await engine.next() for _ in range(together)]:
                    request.fail(EngineGone("died", in_flight=True))
            suspect = await engine.next()
            await configure(redis, deadline="1000")
            served.worker._keeper.beat_soon()
            await until(lambda: len(served.worker._desk.held) > 1)
            await asyncio.sleep(2.5)
            await submit_chat(redis, "chat")
            chat = await engine.next()
            assert "chat" == chat.prompt
            assert [suspect, chat] == engine.running
            engine.on_request = answer
            for request in (suspect, chat):
                request.answer()
            record = await batch_ended(redis)
        assert ("12", "0") == (record["completed"], record["failed"])

    async def test_an_interactive_answer_that_broke_off_is_not_begun_again(self, redis_url: str, redis: Redis) -> None:
        """G18: an engine error after the first delta ends the job as interrupted, without a second run."""
        engine = ScriptedEngine(1)
        async with serving(redis_url, engine):
            await submit_chat(redis, "chat")
            request = await engine.next()
            request.say("Hel")
            request.fail(EngineUnclear("broke off"))
            assert "interrupted" == (await job_ended(redis, "chat"))["state"]
        assert ["chat"] == engine.prompts

    async def test_an_interactive_job_without_a_delta_is_tried_again(self, redis_url: str, redis: Redis) -> None:
        """An error before the first delta costs an attempt, and the second answers."""
        engine = ScriptedEngine(1)
        async with serving(redis_url, engine):
            await submit_chat(redis, "chat")
            (await engine.next()).fail(EngineUnclear("at first"))
            (await engine.next()).answer()
            assert "completed" == (await job_ended(redis, "chat"))["state"]

    async def test_an_answer_ends_while_other_streams_go_on(self, redis_url: str, redis: Redis) -> None:
        """The end of an answer waits for its own deltas, not for a pause in those of all others."""
        engine = ScriptedEngine(2)
        async with serving(redis_url, engine):
            await submit_chat(redis, "talker")
            talker = await engine.next()
            talking = asyncio.create_task(_talk(talker))
            await submit_chat(redis, "brief")
            brief = await engine.next()
            brief.say("ok")
            began = time.monotonic()
            brief.answer()
            await job_ended(redis, "brief", within=2)
            assert time.monotonic() - began < 1
            talking.cancel()
            talker.answer()
            await job_ended(redis, "talker")


class TestShutdown:
    async def test_a_drain_loses_nothing_and_spends_nothing(self, redis_url: str, redis: Redis) -> None:
        """G6, F-028, F-030: asked to stop at 20 random moments, no line is lost and no attempt spent."""
        rng = random.Random(11)
        lines = 2000
        await submit_batch(redis, lines)
        for round_ in range(20):
            engine = ScriptedEngine(8, lambda request: answer_after(rng.random() / 100)(request))
            async with serving(redis_url, engine, grace=rng.choice([0.0, 0.005, 5.0])) as served:
                await asyncio.sleep(rng.random() / 10)
                served.shutdown.request()
                await served.stopped()
            assert 0 == await pending(redis), f"round {round_}"
            assert {(0, 0, 0)} >= set((await tries(redis)).values())
        async with serving(redis_url, ScriptedEngine(8, answer)):
            await batch_ended(redis)
        await each_line_ended_once(redis, lines)

    async def test_handed_back_lines_start_first(self, redis_url: str, redis: Redis) -> None:
        """G6, G17: what was handed back starts before what has not started, in the order of the file."""
        await submit_batch(redis, 6)
        first, second = ScriptedEngine(2), ScriptedEngine(1, answer)
        async with serving(redis_url, first, grace=0.0, reserve=0) as served:
            await first.next()
            await first.next()
            served.shutdown.request()
            report = await served.stopped()
        assert 2 == report.handed_back
        async with serving(redis_url, second):
            await batch_ended(redis)
        assert [f"line {number}" for number in range(1, 7)] == second.prompts

    async def test_running_requests_may_finish_within_the_grace(self, redis_url: str, redis: Redis) -> None:
        """G6, F-029: nothing new is claimed, and the answer that comes in the grace is written before the end."""
        await submit_batch(redis, 3)
        engine = ScriptedEngine(1)
        async with serving(redis_url, engine) as served:
            request = await engine.next()
            served.shutdown.request()
            await until(lambda: served.worker._desk.closed)
            request.answer()
            report = await served.stopped()
        assert (1, 0) == (report.ended, report.handed_back)
        assert ["c1"] == [row["k"] for row in await results(redis)]
        assert ["line 1"] == engine.prompts
        await redis.flushall()

    async def test_asked_twice_it_hands_back_at_once(self, redis_url: str, redis: Redis) -> None:
        """G6, F-031: the second request to stop ends the grace."""
        await submit_batch(redis, 1)
        engine = ScriptedEngine(1)
        async with serving(redis_url, engine, grace=60.0) as served:
            request = await engine.next()
            served.shutdown.request()
            await until(lambda: served.worker._desk.closed)
            served.shutdown.request()
            began = time.monotonic()
            await served.stopped()
            assert time.monotonic() - began < 2
        assert request.aborted.is_set()
        assert {"1-0": (0, 0, 0)} == await tries(redis)
        await redis.flushall()

    async def test_a_claim_in_flight_is_awaited_and_handed_back(
        self, redis_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """F-027: asked to stop while a claim's reply is under way, its jobs are handed back."""
        reached, go_on = asyncio.Event(), asyncio.Event()

        async def slowly(client: Redis, calls: list[scripts.Call[Any]]) -> list[Any]:
            replies = await scripts.run_all(client, calls)
            if any(isinstance(reply, scripts.Claimed) and reply.leases for reply in replies):
                reached.set()
                await go_on.wait()
            return replies

        _intercept(monkeypatch, slowly)
        engine = ScriptedEngine(2, answer)
        async with serving(redis_url, engine) as served:
            await submit_batch(redis, 2)
            async with asyncio.timeout(5):
                await reached.wait()
            served.shutdown.request()
            await until(lambda: served.worker._desk.closed)
            go_on.set()
            await served.stopped()
        assert [] == engine.prompts
        assert 0 == await pending(redis)
        await redis.flushall()

    async def test_a_worker_that_is_cancelled_hands_back(self, redis_url: str, redis: Redis) -> None:
        """F-031: cancelling the call itself is no crash of what runs."""
        await submit_batch(redis, 1)
        engine = ScriptedEngine(1)
        async with serving(redis_url, engine) as served:
            await engine.next()
            served.task.cancel()
            await asyncio.wait([served.task])
            assert served.task.cancelled()
            assert {"1-0": (0, 0, 0)} == await tries(redis)
            assert 0 == await pending(redis)
        await redis.flushall()

    async def test_a_loop_that_dies_ends_the_worker(
        self, redis_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """F-046: a part that dies of a fault of its own ends the worker with that error, and jobs are handed back."""
        await submit_batch(redis, 1)
        engine = ScriptedEngine(1)

        async def sweep() -> bool:
            raise ZeroDivisionError("a fault of llmq's own")

        async def serve_and_die() -> None:
            async with serving(redis_url, engine) as served:
                await engine.next()
                monkeypatch.setattr(served.worker._sweeper, "sweep", sweep)
                await asyncio.wait([served.task], timeout=20)

        with pytest.raises(ZeroDivisionError):
            await serve_and_die()
        assert {"1-0": (0, 0, 0)} == await tries(redis)
        await redis.flushall()

    async def test_the_drain_command_ends_a_worker(self, redis_url: str, redis: Redis) -> None:
        """`llmq drain WORKER`: the command on the control list is a request to stop."""
        async with serving(redis_url, ScriptedEngine(1)) as served:
            await redis.rpush(KEYS.control(served.worker.id), "drain")
            await served.stopped()
        assert 0 == await redis.exists(KEYS.worker(served.worker.id))


class TestTrips:
    @pytest.mark.parametrize(("brief_s", "settled"), [(0.0, [4, 4, 4]), (3600.0, [12])])
    async def test_requests_that_end_together_are_settled_in_parts_unless_they_were_brief(
        self, redis_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch, brief_s: float, settled: list[int]
    ) -> None:
        """The first slots run again while other outcomes are not written yet; never are more jobs held than slots."""
        parts: list[int] = []

        async def noting(client: Redis, calls: list[scripts.Call[Any]]) -> list[Any]:
            parts.extend(len(call.argv[2:]) // 16 for call in calls if call.script.name == "finish")
            return await scripts.run_all(client, calls)

        _intercept(monkeypatch, noting)
        monkeypatch.setattr(desk_module, "AT_ONCE", 4)
        monkeypatch.setattr(desk_module, "BRIEF_S", brief_s)
        await submit_batch(redis, 24)
        engine = ScriptedEngine(12)
        async with serving(redis_url, engine, reserve=0):
            for _ in range(12):
                await engine.next()
            engine.on_request = answer
            for request in list(engine.running):
                request.answer()
            await batch_ended(redis)
        assert settled == parts[: len(settled)]
        assert (12, 24) == (engine.most_running, sum(parts))
        await each_line_ended_once(redis, 24)


class TestLostReplies:
    async def test_jobs_of_a_claim_whose_reply_was_lost_run_at_once(
        self, redis_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A claim that Redis made and nobody heard of: its jobs are handed back, and are no suspects."""
        lost = _lose(monkeypatch, lambda replies: any(getattr(r, "leases", None) for r in replies))
        await submit_batch(redis, 4)
        engine = ScriptedEngine(2, answer)
        async with serving(redis_url, engine, reserve=0):
            await batch_ended(redis, within=5)
        assert 1 == len(lost)
        assert [f"line {number}" for number in range(1, 5)] == engine.prompts
        await each_line_ended_once(redis, 4)

    async def test_an_outcome_whose_reply_was_lost_counts_once(
        self, redis_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """F-084: a finish that Redis made and nobody heard of is sent again, and refused by its fence."""
        lost = _lose(monkeypatch, lambda replies: any(isinstance(reply, list) for reply in replies))
        await submit_batch(redis, 6)
        engine = ScriptedEngine(2, answer)
        async with serving(redis_url, engine):
            await batch_ended(redis)
        assert 1 == len(lost)
        await each_line_ended_once(redis, 6)
        assert 6 == len(engine.prompts)

    async def test_one_outcome_that_redis_refuses_holds_up_no_other(self, redis_url: str, redis: Redis) -> None:
        """G16: an outcome that cannot be written (its record has another type) stays alone; others are written."""
        await submit_chat(redis, "bad")
        await submit_batch(redis, 50)
        engine = ScriptedEngine(4)
        async with serving(redis_url, engine, reserve=0):
            bad = await engine.next()
            await redis.delete(KEYS.job("bad"))
            await redis.set(KEYS.job("bad"), "not a hash", ex=60)
            engine.on_request = answer
            for request in [bad, *engine.running]:
                request.answer()
            await batch_ended(redis, within=5)
        await each_line_ended_once(redis, 50)
        await redis.flushall()

    async def test_work_goes_on_through_random_losses(
        self, redis_url: str, redis: Redis, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """G3, G6: with one trip in five lost before or after Redis acted, every line ends once, none is dead."""
        rng = random.Random(3)

        async def unreliable(client: Redis, calls: list[scripts.Call[Any]]) -> list[Any]:
            dice = rng.random()
            if dice < 0.1:
                raise ConnectionError("lost on the way there")
            replies = await scripts.run_all(client, calls)
            if dice < 0.2:
                raise TimeoutError("lost on the way back")
            return replies

        _intercept(monkeypatch, unreliable)
        monkeypatch.setattr(desk_module, "FIRST_PAUSE_S", 0.001)
        await submit_batch(redis, 300)
        async with serving(redis_url, ScriptedEngine(4, answer)):
            await batch_ended(redis)
        await each_line_ended_once(redis, 300)
        assert 0 == await redis.xlen(KEYS.dead)


class TestRedisTrouble:
    async def test_a_lease_that_was_lost_aborts_its_request(self, redis_url: str, redis: Redis) -> None:
        """G3, F-012, F-013: the entry belongs to another delivery; the request is aborted, its outcome not written."""
        await configure(redis, lease="1000")
        await submit_batch(redis, 1)
        engine = ScriptedEngine(1)
        async with serving(redis_url, engine):
            request = await engine.next()
            await redis.xclaim(KEYS.lane(LANE), "workers", "thief", 0, ["1-0"])
            async with asyncio.timeout(2):
                await request.aborted.wait()
            row = (await redis.xpending_range(KEYS.lane(LANE), "workers", "-", "+", 1))[0]
            assert b"thief" == row["consumer"]
        assert [] == await results(redis)
        await redis.flushall()

    async def test_script_flush_harms_nothing(self, redis_url: str, redis: Redis) -> None:
        """G12, F-089, F-090: SCRIPT FLUSH 20 times under load; no line fails."""
        await submit_batch(redis, 1000)
        async with serving(redis_url, ScriptedEngine(8, answer_after(0.002))):
            for _ in range(20):
                await redis.script_flush()
                await asyncio.sleep(0.01)
            assert "0" == (await batch_ended(redis)).get("failed", "0")
        await each_line_ended_once(redis, 1000)

    async def test_flushall_under_load_is_survived(self, redis_url: str, redis: Redis) -> None:
        """G12, F-056, F-058: after FLUSHALL in the middle of a batch, the worker serves what comes next."""
        await submit_batch(redis, 1000)
        engine = ScriptedEngine(8, answer_after(0.01))
        async with serving(redis_url, engine) as served:
            await until(lambda: len(engine.started) > 100)
            await redis.flushall()
            await submit_batch(redis, 50, batch="next")
            await batch_ended(redis, "next", within=10)
            await until(lambda: _exists(redis, KEYS.worker(served.worker.id)))
        await each_line_ended_once(redis, 50, "next")

    async def test_killed_connections_are_made_again(self, redis_url: str, redis: Redis) -> None:
        """F-081, F-083: CLIENT KILL of all other clients, 10 times under load; every line ends once."""
        await submit_batch(redis, 600)
        async with serving(redis_url, ScriptedEngine(4, answer_after(0.002))):
            for _ in range(10):
                await redis.client_kill_filter(_type="normal", skipme=True)
                await asyncio.sleep(0.03)
            await batch_ended(redis)
        await each_line_ended_once(redis, 600)
        assert 0 == await redis.xlen(KEYS.dead)

    async def test_a_restarted_redis_gets_its_throughput_back(self, own_server: OwnServer, short_contact: None) -> None:
        """G4, G12, F-081: killed and started again 5 times under load, with its file: each line ends once."""
        server = own_server("--appendonly", "yes", "--appendfsync", "always", "--aof-use-rdb-preamble", "no")
        redis = connect(server.url)
        await submit_batch(redis, 400)
        engine = ScriptedEngine(4, answer_after(0.005))
        async with serving(server.url, engine):
            for round_ in range(1, 6):
                await until(lambda: len(engine.started) > 40 * round_)  # noqa: B023  # awaited within the round
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
            await redis.aclose()
            await batch_ended(redis)
        await each_line_ended_once(redis, 400)
        assert 0 == await redis.xlen(KEYS.dead)
        await redis.aclose()

    @pytest.mark.parametrize("how", ["frozen", "killed"])
    async def test_time_without_redis_is_not_held_against_a_lease(
        self, own_server: OwnServer, how: str, short_contact: None
    ) -> None:
        """G4: Redis away for 3 leases; nobody reclaims before one lease of contact, and the job ends once."""
        server = own_server()
        redis = connect(server.url)
        await configure(redis, lease="1000")
        await submit_batch(redis, 1)
        first, second = ScriptedEngine(1), ScriptedEngine(1)
        async with serving(server.url, first), serving(server.url, second):
            request = await _either(first, second)
            await asyncio.sleep(1.5)
            await asyncio.to_thread(server.freeze if how == "frozen" else server.kill)
            await asyncio.sleep(3)
            await asyncio.to_thread(server.thaw if how == "frozen" else server.start)
            await asyncio.sleep(2.5)
            assert ["line 1"] == first.prompts + second.prompts
            assert not request.aborted.is_set()
            request.answer()
            await redis.aclose()
            await batch_ended(redis)
        await each_line_ended_once(redis, 1)
        await redis.aclose()

    async def test_outcomes_are_kept_while_redis_is_away(self, own_server: OwnServer) -> None:
        """F-122: an answer that comes while Redis is away is written when it is back; the engine is not asked again."""
        server = own_server()
        redis = connect(server.url)
        await submit_batch(redis, 1)
        engine = ScriptedEngine(1)
        async with serving(server.url, engine):
            request = await engine.next()
            await asyncio.to_thread(server.freeze)
            request.answer()
            await asyncio.sleep(1)
            await asyncio.to_thread(server.thaw)
            await batch_ended(redis)
        assert ["line 1"] == engine.prompts
        await each_line_ended_once(redis, 1)
        await redis.aclose()

    async def test_a_full_redis_is_drained(self, own_server: OwnServer) -> None:
        """At `maxmemory` finishes, heartbeats, bells, sweeps and deltas go on, and the queue runs empty."""
        server = own_server("--appendonly", "no")
        redis = connect(server.url)
        await configure(redis, lease="1000")
        await submit_batch(redis, 200)
        await submit_chat(redis, "chat")
        engine = ScriptedEngine(4, answer_after(0.02))

        def talk(request: Request) -> None:
            if request.prompt == "chat":
                request.say("Hel")
                request.say("lo")
            answer_after(0.02)(request)

        engine.on_request = talk
        await redis.config_set("maxmemory", "1")
        async with serving(server.url, engine):
            assert "completed" == (await job_ended(redis, "chat"))["state"]
            await batch_ended(redis)
        await each_line_ended_once(redis, 200)
        await redis.aclose()


class TestIdle:
    async def test_an_idle_worker_is_quiet(self, redis_url: str, redis: Redis) -> None:
        """F-118, F-119: an idle worker sends fewer than 5 commands a second, and uses next to no processor."""
        async with serving(redis_url, ScriptedEngine(8)):
            await asyncio.sleep(1.5)
            before, cpu = await _commands(redis), time.process_time()
            await asyncio.sleep(5)
            after = await _commands(redis)
            used = time.process_time() - cpu
        sent = after - before
        assert sent / 5 < 5
        assert used < 0.5


class _StubbornEngine(ScriptedEngine):
    """An engine whose first request takes its time to be aborted."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.let_go = asyncio.Event()

    async def run(self, job: Any, on_delta: Any = None) -> Any:
        try:
            return await super().run(job, on_delta)
        except asyncio.CancelledError:
            await self.let_go.wait()
            raise


async def _talk(request: Request) -> None:
    while True:
        request.say("bla ")
        await asyncio.sleep(0.0005)


async def _claimed(redis: Redis, count: int) -> bool:
    """Whether so many lines of the batch are claimed."""
    try:
        return await pending(redis) == count
    except ResponseError:  # the lane has no group before its first claim
        return False


async def _either(first: ScriptedEngine, second: ScriptedEngine) -> Request:
    waiting = [asyncio.create_task(engine.next()) for engine in (first, second)]
    done, rest = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in rest:
        task.cancel()
    return done.pop().result()


async def _cancel(redis: Redis, job_id: str) -> str:
    from llmq.scheduler.lease import ErrorCode

    call = scripts.cancel_job(
        KEYS, job_id, lane=CHAT_LANE, client="me", state="cancelled", code=ErrorCode.CANCELLED, message="by the test"
    )
    verdict = await scripts.run(redis, call)
    assert "signalled" == verdict.word
    return verdict.value


async def _protected_start(redis: Redis) -> bool:
    return await redis.zcount(KEYS.starts, 1, "+inf") == 1


async def _tried(redis: Redis, entry: str, expected: tuple[int, int, int]) -> bool:
    return (await tries(redis)).get(entry) == expected


async def _has_results(redis: Redis, count: int) -> bool:
    return len(await results(redis)) == count


async def _governor(redis: Redis, state: str) -> bool:
    """Return whether the only worker says that its governor is in this state."""
    (worker,) = [key async for key in redis.scan_iter(match=KEYS.worker("*"))]
    return await redis.hget(worker, "governor") == state.encode()


async def _exists(redis: Redis, key: str) -> bool:
    return await redis.exists(key) == 1


async def _commands(redis: Redis) -> int:
    """Return how many commands clients sent; what scripts call is no traffic, and shares no name with these."""
    stats: dict[str, Any] = await redis.info("commandstats")
    sent = ("evalsha", "eval", "blpop", "info", "ping", "rpush", "zrange")
    return sum(int(stats[f"cmdstat_{name}"]["calls"]) for name in sent if f"cmdstat_{name}" in stats)


def _encoded(text: str) -> bytes:
    from tests.redis.serving import chat

    return chat(text).encode()


def _intercept(
    monkeypatch: pytest.MonkeyPatch, run_all: Callable[[Redis, list[scripts.Call[Any]]], Awaitable[list[Any]]]
) -> None:
    """Put a fault between the desk and Redis."""

    class Faulty:
        def __init__(self, client: Redis) -> None:
            self._client = client

        async def run_all(self, calls: list[scripts.Call[Any]]) -> list[Any]:
            return await run_all(self._client, calls)

    monkeypatch.setattr(desk_module, "ScriptCalls", Faulty)


def _lose(monkeypatch: pytest.MonkeyPatch, which: Callable[[list[Any]], bool]) -> list[list[Any]]:
    """Lose the first reply that `which` chooses; return the list of those that were lost."""
    lost: list[list[Any]] = []

    async def once(client: Redis, calls: list[scripts.Call[Any]]) -> list[Any]:
        replies = await scripts.run_all(client, calls)
        if not lost and which(replies):
            lost.append(replies)
            raise TimeoutError("the reply was lost")
        return replies

    _intercept(monkeypatch, once)
    return lost


async def _ended(redis: Redis, lines: int) -> bool:
    return await redis.xlen(KEYS.results("b1")) >= lines
