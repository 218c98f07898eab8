"""The stream: one answer on its way to its client, event by event, as the engine makes it.

The answer begins with the engine's first token, or with a sign of life where that takes long; until then a refusal of
the engine is still a plain HTTP error with the engine's status. What comes together is written together. This is the
path that every token takes: once the answer has begun, whoever hears its deltas writes them, and no task is woken for
them as long as the client keeps up.
"""

from __future__ import annotations

import time

from llmq.gateway.answers import answer_of, engine_error, failure_of
from llmq.gateway.boundary import Exchange
from llmq.gateway.errors import ApiError
from llmq.gateway.events import KEEP_ALIVE, Events
from llmq.gateway.jobs import OpenJob
from llmq.gateway.vigil import Vigil
from llmq.scheduler.deltas import DeltaOrder
from llmq.scheduler.job_record import JobRecord
from llmq.scheduler.state import JobState

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx would keep the events to itself
}


class Stream:
    """Sends one answer; `keep_alive` is the longest silence in seconds, as far as the vigil's ticks allow."""

    def __init__(self, exchange: Exchange, events: Events, job: OpenJob, keep_alive: float) -> None:
        self._exchange = exchange
        self._events = events
        self._job = job
        self._keep_alive = 0.9 * keep_alive  # so that a tick that comes a moment early counts
        self._silent_since = time.monotonic()
        self._vigil: Vigil | None = None
        # The deltas of a job that was joined go to the request that made it: its answer comes whole.
        self._order = DeltaOrder() if job.joined else job.watch.order

    async def run(self, vigil: Vigil) -> None:
        """Send what comes until the job has ended, or the vigil is over."""
        watch, news, self._vigil = self._job.watch, self._job.watch.news, vigil
        while True:
            news.clear()
            if vigil.over:
                return
            if data := self._come():
                await self._write(data)
            elif watch.over:
                return
            else:
                if time.monotonic() - self._silent_since >= self._keep_alive:
                    await self._write(KEEP_ALIVE)
                await self._wait()

    async def _wait(self) -> None:
        """Wait for what has to be decided; deltas that come meanwhile are written as they do."""
        watch = self._job.watch
        if not self._job.joined:
            watch.on_deltas = self._write_at_once
        try:
            await watch.news.wait()
        finally:
            if not self._job.joined:
                watch.on_deltas = None

    def _come(self) -> bytes:
        """Return the events of what has come since this was asked last."""
        chunks = self._order.take_chunks()
        if chunks and self._vigil is not None:
            self._vigil.pieces += len(chunks)
        return self._events.of(chunks) if chunks else b""

    def _write_at_once(self) -> bool:
        writer = self._exchange.writer()
        if writer is None:
            return False
        if data := self._come():
            writer.write(data)
        self._silent_since = time.monotonic()
        return True

    async def finish(self, record: JobRecord | None, retry_after: float) -> None:
        """Send the end of a job that has ended. Raises ApiError where nothing was sent yet and there is no answer."""
        if record is None or record.state is not JobState.COMPLETED:
            await self._finish_without_answer(record, retry_after)
            return
        try:
            rest = self._order.rest(record.body)
        except ValueError:  # another worker began it again after some of it was sent, or some of it did not come
            message = "the answer broke off: a part of it was lost on its way; send the request again"
            await self.fail(ApiError(503, message, code="interrupted", retry_after=1))
            return
        data = self._events.of_rest(rest) if rest is not None else b""
        await self._end(data + self._events.end())

    async def fail(self, failure: ApiError) -> None:
        """End with an error, and without the end of an answer. Raises it where nothing was sent yet."""
        if not self._exchange.begun:
            raise failure
        await self._end(self._events.error(failure))

    async def _finish_without_answer(self, record: JobRecord | None, retry_after: float) -> None:
        if record is None or record.status_code is None:
            await self.fail(failure_of(record, retry_after))
            return
        answer = answer_of(record, retry_after)
        if self._exchange.begun:
            await self._end(self._events.error_event(engine_error(answer)))
        else:
            await self._exchange.answer(answer.status, answer.body, {}, answer.content_type)

    async def _write(self, data: bytes) -> None:
        if not self._exchange.begun:
            await self._exchange.begin(200, HEADERS)
        await self._exchange.write(data)
        self._silent_since = time.monotonic()

    async def _end(self, data: bytes) -> None:
        if not self._exchange.begun:
            await self._exchange.begin(200, HEADERS)
        await self._exchange.write(data, more=False)
