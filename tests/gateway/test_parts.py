"""Parts of the gateway by themselves: no server, no Redis."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from llmq.gateway.answers import EngineAnswer, answer_of, engine_error, failure_of
from llmq.gateway.body_guard import BodyGuard, Pace
from llmq.gateway.call import CHAT, RESPONSES
from llmq.gateway.contact import SILENCE_S, Contact
from llmq.gateway.errors import ApiError
from llmq.gateway.events import Events
from llmq.gateway.translation import api_error
from llmq.scheduler.deltas import DeltaView
from llmq.scheduler.errors import EncodingError, LLMQError, RedisFull, RedisUnavailable, UsageError
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.job_record import JobRecord
from llmq.scheduler.state import JobState
from tests.gateway.serving import chunk, usage_chunk


def record(state: JobState, status: int | None = None, body: bytes = b"", code: str = "") -> JobRecord:
    """Return the record of a job that ended."""
    return JobRecord(
        "j", TrafficClass.INTERACTIVE, "t", "i:t", "1-0", "c", state, 0.0, status_code=status, body=body, code=code
    )


class TestAnswers:
    """What a client is told of a job that ended."""

    @pytest.mark.parametrize(
        ("ended", "status", "code", "retries"),
        [
            (None, 503, "request_lost", True),
            (record(JobState.EXPIRED), 503, "queue_timeout", True),
            (record(JobState.INTERRUPTED), 503, "interrupted", True),
            (record(JobState.CANCELLED), 409, "cancelled", False),
            (record(JobState.FAILED, code="worker_lost"), 500, "worker_lost", False),
            (record(JobState.FAILED, code="result_too_large"), 400, "result_too_large", False),
            (record(JobState.FAILED, code="engine_error"), 502, "engine_error", True),
        ],
    )
    def test_an_end_without_an_answer(self, ended: JobRecord | None, status: int, code: str, retries: bool) -> None:
        """Official clients try again where that helps, and not where it does not."""
        failure = failure_of(ended, 7.0)
        assert (status, code) == (failure.status, failure.code)
        assert retries == (failure.headers.get("x-should-retry") != "false")
        with pytest.raises(ApiError):
            answer_of(ended, 7.0)

    @pytest.mark.parametrize(
        ("body", "message"),
        [
            (b'{"error":"no"}', "no"),
            (b'{"detail":"no"}', "no"),
            (b'"no"', "no"),
            (b"no", "no"),
            (b'{"detail":[1]}', '{"detail":[1]}'),
        ],
    )
    def test_a_refusal_as_an_event_is_in_openais_shape(self, body: bytes, message: str) -> None:
        """Clients look for `error.message`; a body that has it is sent as it is."""
        assert message == json.loads(engine_error(EngineAnswer(400, body, "")))["error"]["message"]
        whole = b'{"error": {"message": "no", "odd": 1}}'
        assert whole == engine_error(EngineAnswer(400, whole, ""))


class TestEvents:
    """What a stream is made of."""

    def test_only_the_usage_chunk_is_taken_out(self) -> None:
        """A text that speaks of usage, and a chunk that has it beside a choice, stay."""
        told, beside = chunk('about "usage"'), chunk("x", usage={"total_tokens": 1})
        chunks = [told, usage_chunk(), beside]
        expected = b"".join(b"data: " + kept + b"\n\n" for kept in (told, beside))
        assert expected == Events(CHAT, wants_usage=False).of(chunks)
        assert usage_chunk() in Events(CHAT, wants_usage=True).of(chunks)

    def test_an_error_of_responses_is_an_event_of_its_own(self) -> None:
        """With the fields that its clients read, and those that all others do."""
        event = Events(RESPONSES, wants_usage=False).error(ApiError(503, "broke off", code="interrupted"))
        name, data = event.decode().strip().split("\n")
        told = json.loads(data.removeprefix("data: "))
        assert ("event: error", "error", "interrupted") == (name, told["type"], told["code"])
        assert "broke off" == told["message"] == told["error"]["message"]

    def test_the_rest_of_a_response_is_its_last_event(self) -> None:
        """Where its events did not come, the whole one does."""
        rest = DeltaView("", b'{"status":"incomplete","output":[]}')
        event = Events(RESPONSES, wants_usage=False).of_rest(rest)
        assert event.startswith(b"event: response.incomplete\ndata: ")
        assert b"[DONE]" not in event + Events(RESPONSES, wants_usage=False).end()


class TestTranslation:
    """What goes wrong, as its client is told."""

    @pytest.mark.parametrize(
        ("error", "status", "retry_after"),
        [
            (EncodingError("body.x", "is odd"), 400, None),
            (UsageError("no"), 400, None),
            (RedisUnavailable("redis://secret is away"), 503, "2"),
            (RedisFull("redis://secret is full"), 503, "30"),
            (LLMQError("secret"), 500, None),
            (ZeroDivisionError("secret"), 500, None),
        ],
    )
    def test_an_error(self, error: Exception, status: int, retry_after: str | None) -> None:
        """Addresses, and what nobody foresaw, are for the log."""
        answer = api_error(error)
        assert (status, retry_after) == (answer.status, answer.headers.get("retry-after"))
        assert "secret" not in answer.message


class TestContact:
    """How long a reply of Redis is waited for."""

    async def test_silence_is_noticed_within_a_second(self) -> None:
        """And what was asked is given up."""
        asked = asyncio.Event()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(SILENCE_S + 0.5):
                await Contact().within(_wait(asked))
        assert asked.is_set()

    async def test_while_others_are_answered_a_late_reply_is_waited_for(self) -> None:
        """Then Redis is there, and this host is busy."""
        contact, asked = Contact(), asyncio.Event()
        late = asyncio.create_task(contact.within(asyncio.sleep(2 * SILENCE_S, "late")))
        for _ in range(20):  # often: one of them may be late
            await asyncio.sleep(SILENCE_S / 10)
            await contact.within(asyncio.sleep(0))
        assert "late" == await late
        assert not asked.is_set()


class TestBodyGuard:
    """How a body may come."""

    async def test_time_in_which_nobody_reads_is_not_the_clients(self) -> None:
        """A slow disk is no slow client."""
        messages = [{"type": "http.request", "body": b"x", "more_body": more} for more in (True, True, False)]
        guard = BodyGuard(_receiving(messages), None, 100, Pace(silence_s=0.05, grace_s=0.05, bytes_per_second=1000))
        for _ in range(3):
            await asyncio.sleep(0.06)
            await guard()

    async def test_the_end_of_a_request_is_waited_for_without_hurry(self) -> None:
        """Once the body has come, what follows is the client's leaving."""
        messages: list[dict[str, Any]] = [{"type": "http.request", "body": b"", "more_body": False}]
        guard = BodyGuard(_receiving(messages, 0.1), 0, 100, Pace(0.05, 0.05, 1000))
        await guard()
        assert "http.disconnect" == (await guard())["type"]


async def _wait(asked: asyncio.Event) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        asked.set()


def _receiving(messages: list[dict[str, Any]], leaves_after: float = 0.0) -> Any:
    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop(0)
        await asyncio.sleep(leaves_after)
        return {"type": "http.disconnect"}

    return receive
