"""The batch handle: a batch that was submitted, as its owner holds it."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from llmq.scheduler.batch_record import BatchRecord
from llmq.scheduler.batches import Batches
from llmq.scheduler.connection import redis_errors
from llmq.scheduler.line_set import LineSet
from llmq.scheduler.result import LineResult, line_result
from llmq.scheduler.tasks import within


class AsyncBatchHandle:
    """One batch; made by `AsyncClient.submit_batch` and `AsyncClient.batch`. The batch goes on without it."""

    def __init__(self, url: str, batches: Batches, batch_id: str) -> None:
        self._url = url
        self._batches = batches
        self._id = batch_id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}>"

    @property
    def id(self) -> str:
        """The batch's id; `AsyncClient.batch` makes a handle of it again, in any process."""
        return self._id

    async def status(self) -> BatchRecord:
        """Return where the batch stands now. Raises NotFoundError where it is kept no longer."""
        with redis_errors(self._url):
            return await self._batches.show(self._id)

    async def results(self, *, follow: bool = True) -> AsyncGenerator[LineResult, None]:
        """Yield the results of all lines in the order in which they end, good and bad, each exactly once.

        Goes on until the batch has ended; with `follow` False it stops at what is there now. A Redis that goes away in
        between is waited for.
        """
        taken = LineSet()  # a line whose first result a failover lost has a second one
        with redis_errors(self._url):
            async for _, record in self._batches.results(self._id, follow=follow):
                if taken.add(record.line):
                    yield line_result(record)

    async def wait(self, timeout: float | None = None) -> BatchRecord:
        """Return the record of the batch once it has ended. Raises TimeoutError; the batch then goes on."""
        try:
            with redis_errors(self._url):
                return await within(timeout, self._batches.wait(self._id))
        except TimeoutError:
            raise TimeoutError(
                f"batch {self._id} has not ended within {timeout:g} s; it goes on: call wait() again, or cancel()"
            ) from None

    async def pause(self) -> BatchRecord:
        """Let no line of the batch start; those that run go on."""
        with redis_errors(self._url):
            return await self._batches.pause(self._id)

    async def resume(self) -> BatchRecord:
        """Let the lines of a paused batch start again, in the batch's old place."""
        with redis_errors(self._url):
            return await self._batches.resume(self._id)

    async def cancel(self) -> BatchRecord:
        """End the batch: lines that wait at once, lines that run within a second."""
        with redis_errors(self._url):
            return await self._batches.cancel(self._id)
