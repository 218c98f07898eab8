"""What llmq asks of an inference engine.

An engine module offers a class with the four calls of `Engine`. It runs one request to its end and says what came:
an `EngineAnswer` (also when the engine refused the request: 400, 404, ...), or one of the errors below, which the
executor turns into an outcome. An engine never retries, never sees Redis, and is aborted by cancelling `run`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from llmq.scheduler.job import Job
from llmq.scheduler.lease import NO_USAGE, Usage

#: Called with each piece of an answer as it comes: its text ("" where a chunk has none) and the raw chunk (JSON).
OnDelta = Callable[[str, bytes], None]


#: What batch requests are sent with where the engine has priorities: lower first, and 0 is what chat has.
BATCH_PRIORITY = 1


class Continues(StrEnum):
    """How an engine is asked to go on with an answer that was cut off."""

    PREFILL = "prefill"  # a last message of the assistant is continued as it is (llama.cpp)
    FLAG = "continue_final_message"  # the same, where it is asked for (vLLM, SGLang)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What a probe found: `kind` ("vllm", "llama.cpp", "sglang", "openai", "sim"), the models it lists, its slots.

    `slots` is None where the engine does not tell. `simulated` is said on every output. `continues` is how it goes on
    with an answer that was cut off (None: it was not seen to), `prioritises` whether it serves requests by the
    `priority` in their bodies, lower first.
    """

    kind: str
    url: str
    models: tuple[str, ...]
    slots: int | None = None
    simulated: bool = False
    continues: Continues | None = None
    prioritises: bool = False


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What runs and waits inside the engine, where it tells; None where it does not."""

    running: int | None = None
    waiting: int | None = None


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """A whole answer: HTTP status, JSON body with no field lost, the engine's request id, and counted LLM tokens.

    A status of 400 or above is the caller's fault (never retried); its body is kept as it came, bounded.
    """

    status_code: int
    body: bytes
    request_id: str
    usage: Usage = NO_USAGE


class EngineError(Exception):
    """The request got no answer that counts."""


class EngineOverloaded(EngineError):
    """The engine refuses work for now (408, 425, 429, 503); `retry_after` is what it asked for, in seconds."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineGone(EngineError):
    """The engine is not there. `in_flight` says whether the request had been sent: then the job is a suspect."""

    def __init__(self, message: str, *, in_flight: bool) -> None:
        super().__init__(message)
        self.in_flight = in_flight


class EngineUnclear(EngineError):
    """Something went wrong and nobody knows whose fault it is (other 5xx, a stream without `finish_reason`).

    `status_code` and `body` are the engine's where it gave them, so that the last attempt can show them.
    """

    def __init__(self, message: str, status_code: int | None = None, body: bytes = b"") -> None:
        super().__init__(message)
        self.status_code = status_code
        self.body = body


class AnswerTooLarge(EngineError):
    """The answer grew over the limit (8 MiB by default); the request was aborted."""


class Engine(Protocol):
    """One inference engine, as a worker sees it."""

    async def probe(self) -> EngineInfo:
        """Return what the engine is and lists; raises EngineUnavailable when it is none or does not answer."""
        ...

    async def run(self, job: Job, on_delta: OnDelta | None = None) -> EngineAnswer:
        """Run one request to its end. Cancelling the call aborts it in the engine. Raises EngineError."""
        ...

    async def load(self) -> EngineLoad:
        """Return what runs and waits in the engine."""
        ...

    async def close(self) -> None:
        """Close the connections to the engine."""
        ...
