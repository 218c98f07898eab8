"""The client: submits jobs and batches and waits for them, for programs that use asyncio.

    async with AsyncClient("redis://...") as llmq:
        job = await llmq.submit({"messages": [...]})
        async for delta in job.stream(): ...
        result = await job.result(timeout=30)

The beginning and the end of a job's way: what is submitted here comes back here. It holds a small pool of connections
for commands and one ear for each queue, however many jobs it waits for. `blocking.py` has the same without asyncio.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from redis.asyncio import Redis

from llmq.scheduler.batch_handle import AsyncBatchHandle
from llmq.scheduler.batch_record import new_batch_id
from llmq.scheduler.batches import Batches
from llmq.scheduler.calling import ScriptCalls
from llmq.scheduler.connection import check_server, connect, redis_errors
from llmq.scheduler.direct import DirectLine
from llmq.scheduler.embedded import ensure_server
from llmq.scheduler.errors import LLMQError, UsageError
from llmq.scheduler.feeding import FeedProgress
from llmq.scheduler.handles import AsyncJobHandle
from llmq.scheduler.inspect import QueueStatus, read_status
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.lines import check, read_lines
from llmq.scheduler.outage import REDIS_ERRORS
from llmq.scheduler.prompts import Prompts, open_prompts
from llmq.scheduler.queue import Queue, new_job_id
from llmq.scheduler.redis_url import redact
from llmq.scheduler.requests import checked_request
from llmq.scheduler.settings import Settings, check_tenant, load_settings
from llmq.scheduler.units import parse_duration
from llmq.scheduler.waiting import BLOCK_S, Listener

#: Connections for commands: waits need none, and 10,000 submits at once are no faster through more.
MAX_CONNECTIONS = 32

#: Seconds that a submit of a batch, when it is cancelled, takes to cancel what it has queued.
TAKE_BACK_S = 2.0

OnFeed = Callable[[FeedProgress], None] | None


class AsyncClient:
    """A client of the queue `queue`, for the tenant `tenant`.

    What is not given is taken from the settings (LLMQ_REDIS_URL, LLMQ_QUEUE, llmq.toml, ...); without any Redis it is
    the embedded server, started if need be. It connects with its first call. Use it within one event loop, and close
    it: `async with`, or `aclose()`. Raises SettingsError.
    """

    def __init__(self, url: str | None = None, *, queue: str | None = None, tenant: str | None = None) -> None:
        self._settings = load_settings({"redis_url": url, "queue": queue, "tenant": tenant}).settings
        self._id = secrets.token_urlsafe(12)  # is stored with each of its jobs
        self._connected: _Connected | None = None
        self._connecting = asyncio.Lock()
        self._closed = False

    def __repr__(self) -> str:
        url = self._settings.redis_url
        return f"<{type(self).__name__} of {redact(url) if url else 'the embedded server'}>"

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close all connections. Jobs and batches go on; waits for them end with an LLMQError."""
        self._closed = True
        async with self._connecting:
            connected, self._connected = self._connected, None
            if connected is not None:
                await connected.close()

    # --- jobs -------------------------------------------------------------------------------------------------------

    async def submit(
        self,
        body: Mapping[str, Any],
        *,
        cls: TrafficClass | str = TrafficClass.INTERACTIVE,
        url: str = "/v1/chat/completions",
        queue: str | None = None,
        tenant: str | None = None,
        timeout: float | None = None,
        key: str | None = None,
    ) -> AsyncJobHandle:
        """Submit one request, `body` being the JSON object for the endpoint `url`; return its handle.

        `timeout` is the longest time in seconds that the job may wait for its start (None: the setting `queue_ttl` for
        interactive jobs, for ever for batch; 0: for ever). The same `key` of the same tenant is the same job, so that
        what submits twice runs once. When this returns, the job is not lost while Redis keeps its data.

        Raises UsageError (EncodingError names the field at fault), QueueFull, RedisUnavailable.
        """
        tenant = check_tenant(tenant or self._settings.tenant)
        job, traffic = checked_request(body, url, cls)
        job_id = new_job_id(tenant, key)
        connected = await self._connect()
        with redis_errors(connected.url):
            opened, listener = await connected.queue(queue or self._settings.queue)
            # It listens before the job is sent: no delta can come too early. A job with a key may be another client's.
            watch = listener.watch(job_id, foreign=key is not None, ttl=timeout)
            await opened.submit(job, cls=traffic, tenant=tenant, ttl=timeout, job_id=job_id, reply_to=self._id)
        return AsyncJobHandle(connected.url, listener, watch)

    async def job(self, job_id: str, *, queue: str | None = None) -> AsyncJobHandle:
        """Return a handle of a job that was submitted before, by whomever. Raises NotFoundError."""
        connected = await self._connect()
        with redis_errors(connected.url):
            opened, listener = await connected.queue(queue or self._settings.queue)
            record = await opened.job(job_id)
            watch = listener.watch(record.id, foreign=record.client != self._id)
        return AsyncJobHandle(connected.url, listener, watch)

    # --- batches ----------------------------------------------------------------------------------------------------

    async def submit_batch(
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
    ) -> AsyncBatchHandle:
        """Submit a file of prompts (its path, or its lines as objects or texts) as one batch; return its handle.

        Returns when the last line is queued. `model` takes the place of the lines' own; `window` is how long lines may
        wait for their start (seconds, or "24h"); `skip_bad` makes error lines of bad lines, which are refused before
        anything is queued otherwise (InputFileError names them). While the queue is full it waits for room; with `wait`
        False it raises QueueFull and queues nothing. Cancelled, it cancels what it has queued. `tenant`, `queue` and
        errors as for `submit`.
        """
        settings, tenant = self._settings, check_tenant(tenant or self._settings.tenant)
        window_s = _window(window)
        connected = await self._connect()
        file = await asyncio.to_thread(open_prompts, prompts, max_line_bytes=settings.max_line_bytes)
        with file:
            checked = await asyncio.to_thread(check, file, model=model, skip_bad=skip_bad)
            with redis_errors(connected.url):
                opened, _ = await connected.queue(queue or settings.queue)
                batches, batch_id = Batches(opened), new_batch_id()
                try:
                    await batches.open(
                        name=name or file.name,
                        digest=file.digest,
                        tenant=tenant,
                        window=window_s,
                        need=0 if wait else checked.good,
                        batch_id=batch_id,
                    )
                    await batches.feed(batch_id, read_lines(file, checked), wait=wait, on_progress=on_progress)
                except asyncio.CancelledError:
                    await _take_back(batches, batch_id)
                    raise
        return AsyncBatchHandle(connected.url, batches, batch_id)

    async def batch(self, batch_id: str, *, queue: str | None = None) -> AsyncBatchHandle:
        """Return a handle of a batch that was submitted before, by whomever. Raises NotFoundError."""
        connected = await self._connect()
        with redis_errors(connected.url):
            opened, _ = await connected.queue(queue or self._settings.queue)
            batches = Batches(opened)
            record = await batches.show(batch_id)
        return AsyncBatchHandle(connected.url, batches, record.id)

    # --- the queue --------------------------------------------------------------------------------------------------

    async def status(self, *, queue: str | None = None) -> QueueStatus:
        """Return what a queue and its workers are doing now."""
        opened = await self.queue(queue)
        with redis_errors(self._url()):
            return await read_status(opened)

    async def queue(self, name: str | None = None) -> Queue:
        """Return a queue, to look at it or to change its live settings; it lives as long as the client."""
        connected = await self._connect()
        with redis_errors(connected.url):
            opened, _ = await connected.queue(name or self._settings.queue)
        return opened

    async def _direct_line(self, queue: str | None = None) -> DirectLine:
        """Return the way into a queue that the blocking client takes (`portal.py`), and closes."""
        connected = await self._connect()
        with redis_errors(connected.url):
            opened, listener = await connected.queue(queue or self._settings.queue)
            await opened.agree_on_key()
        listener.listen()
        return DirectLine(connected.url, listener, self._id, self._settings.tenant, max_connections=MAX_CONNECTIONS)

    def _url(self) -> str:
        return self._connected.url if self._connected else ""

    async def _connect(self) -> _Connected:
        if self._connected is not None:
            return self._connected
        async with self._connecting:
            if self._closed:
                raise UsageError("the client is closed; make a new one")
            if self._connected is None:
                self._connected = await _Connected.open(self._settings, self._id)
            return self._connected


class _Connected:
    """The connections of one client, and the queues that it has opened."""

    def __init__(self, url: str, redis: Redis, settings: Settings, client_id: str) -> None:
        self.url = url
        self._redis = redis
        self._settings = settings
        self._keyring = settings.keyring()
        self._client_id = client_id
        self._opening = asyncio.Lock()
        self._queues: dict[str, tuple[Queue, Listener]] = {}
        self._readers: list[Redis] = []
        self._calls = ScriptCalls(redis)

    @classmethod
    async def open(cls, settings: Settings, client_id: str) -> _Connected:
        """Find Redis, start it if it is the embedded one, and check that llmq can work on it."""
        url = settings.redis_url
        if url is None:
            url = await asyncio.to_thread(ensure_server, settings.home)
        redis = connect(url, max_connections=MAX_CONNECTIONS, client_name="llmq-client")
        try:
            with redis_errors(url):
                (await check_server(redis)).refuse_loss()
        except BaseException:
            await redis.aclose()
            raise
        return cls(url, redis, settings, client_id)

    async def queue(self, name: str) -> tuple[Queue, Listener]:
        """Return a queue and the ear in it."""
        if name not in self._queues:
            async with self._opening:
                if name not in self._queues:
                    self._queues[name] = await self._open(name)
        return self._queues[name]

    async def close(self) -> None:
        """Close the ears, then what they hear with."""
        for _, listener in self._queues.values():
            await listener.close()
        for client in (*self._readers, self._redis):
            await client.aclose()

    async def _open(self, name: str) -> tuple[Queue, Listener]:
        settings = self._settings
        queue = Queue(
            self._redis, name, max_body_bytes=settings.max_body_bytes, calls=self._calls, keyring=self._keyring
        )
        await queue.ensure_format()
        reader = connect(self.url, blocking_s=BLOCK_S, max_connections=1, client_name="llmq-inbox")
        self._readers.append(reader)
        return queue, Listener(queue, reader, self._client_id)


async def _take_back(batches: Batches, batch_id: str) -> None:
    """Cancel what was queued of a batch of which nobody has the id: it would stay open for ever."""
    with contextlib.suppress(TimeoutError, LLMQError, *REDIS_ERRORS):
        async with asyncio.timeout(TAKE_BACK_S):
            await batches.cancel(batch_id)


def _window(window: float | str | None) -> float | None:
    seconds = parse_duration(window) if isinstance(window, str) else window
    if seconds is not None and not seconds > 0:
        raise UsageError(f"expected a window above 0 seconds, got {window!r}")
    return seconds
