"""The blocking client: the same API as `client.py`, for programs without asyncio.

A thin facade: calls are handed to an `AsyncClient` that lives on an event loop in a thread of this client's own; only
single jobs are sent from the caller's thread (`direct.py`).
Calls may come from several threads. Ctrl-C ends a call at once, and with it only the waiting; a process that ends ends
the thread. After a fork the child gets a thread and connections of its own, at its first call.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

from llmq.scheduler.batch_handle import AsyncBatchHandle
from llmq.scheduler.batch_record import BatchRecord
from llmq.scheduler.client import AsyncClient, OnFeed
from llmq.scheduler.deltas import DeltaView
from llmq.scheduler.errors import UsageError
from llmq.scheduler.handles import AsyncJobHandle
from llmq.scheduler.inspect import QueueStatus
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.job_record import JobRecord
from llmq.scheduler.portal import Portal
from llmq.scheduler.prompts import Prompts
from llmq.scheduler.queue import CancelResult
from llmq.scheduler.requests import checked_request
from llmq.scheduler.result import LineResult, Result


class Client:
    """A client of the queue `queue`, for the tenant `tenant`; as `AsyncClient`, without asyncio.

    Close it: `with`, or `close()`.
    """

    def __init__(self, url: str | None = None, *, queue: str | None = None, tenant: str | None = None) -> None:
        self._arguments = {"url": url, "queue": queue, "tenant": tenant}
        self._lock = threading.Lock()
        self._closed = False
        self._inherited: list[Portal] = []
        self._portal = Portal(AsyncClient(**self._arguments))

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
        if key is not None:
            work = portal.client.submit(body, cls=cls, url=url, queue=queue, tenant=tenant, timeout=timeout, key=key)
            return JobHandle(portal, portal.run(work))
        job, traffic = checked_request(body, url, cls)
        line = portal.direct_line(queue)
        return JobHandle(portal, line.submit(job, cls=traffic, tenant=tenant, timeout=timeout))

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

    def _current(self) -> Portal:
        """Return this process's portal: after a fork, the child's own."""
        if self._closed:
            raise UsageError("the client is closed; make a new one")
        if not self._portal.here:
            with self._lock:
                if not self._portal.here:
                    # Kept, not closed: its sockets are the parent's as well.
                    self._inherited.append(self._portal)
                    self._portal = Portal(AsyncClient(**self._arguments))
        return self._portal


class JobHandle:
    """One job; made by `Client.submit` and `Client.job`."""

    def __init__(self, portal: Portal, job: AsyncJobHandle) -> None:
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

    def __init__(self, portal: Portal, batch: AsyncBatchHandle) -> None:
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
