"""Handles: a job or a batch that was submitted, as its owner holds it.

A handle waits, streams, looks and cancels; it holds no answer of its own that Redis would not give again. Only
`cancel()` cancels: leaving a stream, a timeout or losing the handle changes nothing for the job.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from llmq.scheduler.connection import redis_errors
from llmq.scheduler.deltas import DeltaView
from llmq.scheduler.errors import JobInterrupted
from llmq.scheduler.job_record import JobRecord
from llmq.scheduler.queue import CancelResult
from llmq.scheduler.result import Result, ended_error, lost, result_of
from llmq.scheduler.state import JobState
from llmq.scheduler.waiting import Listener
from llmq.scheduler.watch import Watch


class AsyncJobHandle:
    """One job; made by `AsyncClient.submit` and `AsyncClient.job`."""

    def __init__(self, url: str, listener: Listener, watch: Watch) -> None:
        self._url = url
        self._listener = listener
        self._watch = watch

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of queue {self._listener.queue.name}>"

    @property
    def id(self) -> str:
        """The job's id; `AsyncClient.job` makes a handle of it again, in any process."""
        return self._watch.job_id

    async def result(self, timeout: float | None = None) -> Result:
        """Return the answer; may be called again.

        Raises TimeoutError after `timeout` seconds (the job goes on), or the JobEnded that says why there is no answer:
        JobFailed (with the engine's `status_code` and `body`), JobCancelled, JobExpired, JobInterrupted, JobLost. While
        Redis is away this goes on waiting.
        """
        if not self._watch.streams:
            self._watch.order.give_up()
        try:
            async with asyncio.timeout(timeout):
                record = await self._listener.wait(self._watch)
        except TimeoutError:
            raise TimeoutError(
                f"job {self.id} has not ended within {timeout:g} s; it goes on: call result() again, or cancel()"
            ) from None
        if record is None:
            raise lost(self.id)
        return result_of(record)

    async def stream(self) -> AsyncGenerator[DeltaView, None]:
        """Yield the answer piece by piece as the engine makes it, whether or not the body asks for streaming.

        Leaving early does not cancel the job; called again, it goes on where it was left. Where pieces did not come,
        the rest follows in one piece at the end. Raises as `result` does, after what was yielded.
        """
        watch = self._watch
        watch.streams += 1
        try:
            with self._listener.waiting(watch):
                while not watch.over:
                    watch.news.clear()
                    for delta in watch.order.take():
                        yield delta
                    if not watch.over:
                        await watch.news.wait()
                record = await watch.ended()
            for delta in watch.order.take():
                yield delta
            if (rest := self._rest(record)) is not None:
                yield rest
        finally:
            watch.streams -= 1

    async def status(self) -> JobRecord:
        """Return where the job stands now. Raises NotFoundError where its record is kept no longer."""
        with redis_errors(self._url):
            return await self._listener.queue.job(self.id)

    async def cancel(self) -> CancelResult:
        """Cancel the job: it never starts, or its worker aborts it in the engine within a second."""
        with redis_errors(self._url):
            return await self._listener.queue.cancel_job(self.id)

    def _rest(self, record: JobRecord | None) -> DeltaView | None:
        if record is None:
            raise lost(self.id)
        if record.state is not JobState.COMPLETED:
            raise ended_error(record)
        try:
            return self._watch.order.rest(record.body)
        except ValueError:
            raise JobInterrupted(
                self.id,
                f"a part of the answer of job {self.id} was lost on its way, or another worker began it again; "
                "its whole answer is in result()",
            ) from None
