"""The blocking client: the same API as `client.py`, for programs without asyncio.

A thin facade: every call is handed to an `AsyncClient` that lives on an event loop in a thread of this client's own.
Calls may come from several threads. Ctrl-C ends a call at once, and with it only the waiting; a process that ends ends
the thread. After a fork the child gets a thread and connections of its own, at its first call.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Mapping
from types import TracebackType
from typing import Any, TypeVar

from llmq.scheduler.batch_handle import AsyncBatchHandle
from llmq.scheduler.batch_record import BatchRecord
from llmq.scheduler.client import AsyncClient, OnFeed
from llmq.scheduler.deltas import DeltaView
from llmq.scheduler.errors import UsageError
from llmq.scheduler.handles import AsyncJobHandle
from llmq.scheduler.inspect import QueueStatus
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.job_record import JobRecord
from llmq.scheduler.prompts import Prompts
from llmq.scheduler.queue import CancelResult
from llmq.scheduler.result import LineResult, Result

T = TypeVar("T")

#: How long closing waits for the thread: its last act is to close sockets.
CLOSE_S = 5.0


class Client:
    """A client of the queue `queue`, for the tenant `tenant`; as `AsyncClient`, without asyncio.

    Close it: `with`, or `close()`.
    """

    def __init__(self, url: str | None = None, *, queue: str | None = None, tenant: str | None = None) -> None:
        self._arguments = {"url": url, "queue": queue, "tenant": tenant}
        self._lock = threading.Lock()
        self._closed = False
        self._inherited: list[_Portal] = []
        self._portal = _Portal(AsyncClient(**self._arguments))

    def __repr__(self) -> str:
        return repr(self._portal.client).replace("AsyncClient", type(self).__name__, 1)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections and end the thread. Jobs and batches go on; waits for them end with an LLMQError."""
        self._closed = True
        self._portal.close()

    def submit(
        self,
        body: Mapping[str, Any],
        *,
        cls: TrafficClass | str = TrafficClass.INTERACTIVE,
        url: str = "/v1/chat/completions",
        queue: str | None = None,
        tenant: str | None = None,
        timeout: float | None = None,
        key: str | None = None,
    ) -> JobHandle:
        """Submit one request and return its handle; see `AsyncClient.submit`."""
        portal = self._current()
        job = portal.run(
            portal.client.submit(body, cls=cls, url=url, queue=queue, tenant=tenant, timeout=timeout, key=key)
        )
        return JobHandle(portal, job)

    def job(self, job_id: str, *, queue: str | None = None) -> JobHandle:
        """Return a handle of a job that was submitted before, by whomever. Raises NotFoundError."""
        portal = self._current()
        return JobHandle(portal, portal.run(portal.client.job(job_id, queue=queue)))

    def submit_batch(
        self,
        prompts: Prompts,
        *,
        queue: str | None = None,
        tenant: str | None = None,
        model: str | None = None,
        window: float | str | None = None,
        name: str | None = None,
        skip_bad: bool = False,
        wait: bool = True,
        on_progress: OnFeed = None,
    ) -> BatchHandle:
        """Submit a file of prompts and return the batch's handle; see `AsyncClient.submit_batch`."""
        portal = self._current()
        batch = portal.run(
            portal.client.submit_batch(
                prompts,
                queue=queue,
                tenant=tenant,
                model=model,
                window=window,
                name=name,
                skip_bad=skip_bad,
                wait=wait,
                on_progress=on_progress,
            )
        )
        return BatchHandle(portal, batch)

    def batch(self, batch_id: str, *, queue: str | None = None) -> BatchHandle:
        """Return a handle of a batch that was submitted before, by whomever. Raises NotFoundError."""
        portal = self._current()
        return BatchHandle(portal, portal.run(portal.client.batch(batch_id, queue=queue)))

    def status(self, *, queue: str | None = None) -> QueueStatus:
        """Return what a queue and its workers are doing now."""
        portal = self._current()
        return portal.run(portal.client.status(queue=queue))

    def _current(self) -> _Portal:
        """Return this process's portal: after a fork, the child's own."""
        if self._closed:
            raise UsageError("the client is closed; make a new one")
        if not self._portal.here:
            with self._lock:
                if not self._portal.here:
                    # Kept, not closed: its sockets are the parent's as well.
                    self._inherited.append(self._portal)
                    self._portal = _Portal(AsyncClient(**self._arguments))
        return self._portal


class JobHandle:
    """One job; made by `Client.submit` and `Client.job`."""

    def __init__(self, portal: _Portal, job: AsyncJobHandle) -> None:
        self._portal = portal
        self._job = job

    def __repr__(self) -> str:
        return repr(self._job).replace("AsyncJobHandle", type(self).__name__, 1)

    @property
    def id(self) -> str:
        """The job's id; `Client.job` makes a handle of it again, in any process."""
        return self._job.id

    def result(self, timeout: float | None = None) -> Result:
        """Return the answer, or raise what there is in its place; see `AsyncJobHandle.result`."""
        return self._portal.run(self._job.result(timeout))

    def stream(self) -> Iterator[DeltaView]:
        """Yield the answer piece by piece; see `AsyncJobHandle.stream`."""
        return self._portal.iterate(self._job.stream())

    def status(self) -> JobRecord:
        """Return where the job stands now. Raises NotFoundError where its record is kept no longer."""
        return self._portal.run(self._job.status())

    def cancel(self) -> CancelResult:
        """Cancel the job: it never starts, or its worker aborts it in the engine within a second."""
        return self._portal.run(self._job.cancel())


class BatchHandle:
    """One batch; made by `Client.submit_batch` and `Client.batch`."""

    def __init__(self, portal: _Portal, batch: AsyncBatchHandle) -> None:
        self._portal = portal
        self._batch = batch

    def __repr__(self) -> str:
        return repr(self._batch).replace("AsyncBatchHandle", type(self).__name__, 1)

    @property
    def id(self) -> str:
        """The batch's id; `Client.batch` makes a handle of it again, in any process."""
        return self._batch.id

    def status(self) -> BatchRecord:
        """Return where the batch stands now. Raises NotFoundError where it is kept no longer."""
        return self._portal.run(self._batch.status())

    def results(self, *, follow: bool = True) -> Iterator[LineResult]:
        """Yield the results of all lines in the order in which they end; see `AsyncBatchHandle.results`."""
        return self._portal.iterate(self._batch.results(follow=follow))

    def wait(self, timeout: float | None = None) -> BatchRecord:
        """Return the record of the batch once it has ended. Raises TimeoutError; the batch then goes on."""
        return self._portal.run(self._batch.wait(timeout))

    def pause(self) -> BatchRecord:
        """Let no line of the batch start; those that run go on."""
        return self._portal.run(self._batch.pause())

    def resume(self) -> BatchRecord:
        """Let the lines of a paused batch start again, in the batch's old place."""
        return self._portal.run(self._batch.resume())

    def cancel(self) -> BatchRecord:
        """End the batch: lines that wait at once, lines that run within a second."""
        return self._portal.run(self._batch.cancel())


class _Portal:
    """An event loop in a thread, with the client that lives on it, and the way in from other threads.

    Clients, handles and iterators hold it; when none does any more, or the process ends, the thread ends. The thread
    itself holds only what it runs.
    """

    def __init__(self, client: AsyncClient) -> None:
        self.client = client
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=_serve, args=(self._loop,), name="llmq-client", daemon=True)
        self._thread.start()
        # Runs once, whoever calls it first: `close`, the garbage collector, or the end of the process.
        self.close = weakref.finalize(self, _end, self._pid, self._loop, self._thread, client)

    @property
    def here(self) -> bool:
        """Whether this is the process that the thread runs in; threads do not survive a fork."""
        return self._pid == os.getpid()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and return what it returns. What interrupts this call cancels it."""
        if not self.here or not self.close.alive:
            work.close()
            raise UsageError(
                "this handle's client is closed, or was made before a fork; make a new handle by its id: client.job(ID)"
            )
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def iterate(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """Iterate over an asynchronous generator; leaving early closes it."""
        try:
            while (item := self.run(_next(items))) is not None:
                yield item[0]
        finally:
            # The garbage collector may come by in any thread, the loop's own too: there is nothing to wait for.
            if self.here and self.close.alive:
                asyncio.run_coroutine_threadsafe(items.aclose(), self._loop)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """Run a loop in this thread until it is stopped, then end what is left on it."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        loop.run_until_complete(_end_tasks())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def _end(pid: int, loop: asyncio.AbstractEventLoop, thread: threading.Thread, client: AsyncClient) -> None:
    """Close a client and end its thread; in a forked child nothing: all of it is the parent's."""
    if pid != os.getpid() or not thread.is_alive():
        return
    closing = asyncio.run_coroutine_threadsafe(client.aclose(), loop)
    closing.add_done_callback(lambda _: loop.call_soon_threadsafe(loop.stop))
    if threading.current_thread() is not thread:
        thread.join(CLOSE_S)  # what cannot be closed in time ends with the process


async def _end_tasks() -> None:
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def _next(items: AsyncIterator[T]) -> tuple[T] | None:
    """Return the next item, boxed; None at the end."""
    async for item in items:
        return (item,)
    return None
