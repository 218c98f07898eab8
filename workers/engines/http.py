"""The engine behind an OpenAI-compatible HTTP server: vLLM, SGLang, llama.cpp, transformers serve, and others.

`run` sends one request, streamed wherever the engine can stream (so that closing the connection aborts it), hands the
chunks on as they come, and returns the whole answer put together. What went wrong is sorted as `sorting.py` says; it
never retries, and follows no redirect. How bytes come and go is in `wire.py`, what they mean in `answering.py`.
"""

from __future__ import annotations

import aiohttp

from llmq.scheduler.errors import EngineUnavailable, UsageError
from llmq.scheduler.job import Job
from llmq.workers.engines import probing
from llmq.workers.engines.answering import StreamReader, as_chunks, raised, too_large, whole_answer
from llmq.workers.engines.asking import Request, base_url, request_for, wants_default_model
from llmq.workers.engines.assembly import assembler_for
from llmq.workers.engines.base import EngineAnswer, EngineGone, EngineInfo, EngineLoad, EngineUnclear, OnDelta
from llmq.workers.engines.merge import load
from llmq.workers.engines.sorting import sort_status, speaks_of_death
from llmq.workers.engines.wire import Address, Wire, is_sayable

MAX_ANSWER_BYTES = 8 * 2**20

#: An engine is on this host or this network; a connection that takes longer will not come.
CONNECT_TIMEOUT = 5.0

#: After an unclear error: how long the engine may take to show that it lives. Slower is not dead.
LIFE_SIGN_TIMEOUT = 2.0


class HttpEngine:
    """One inference server at `url`, given with or without `/v1`.

    `api_key` is sent as a bearer token. `max_answer_bytes` bounds an answer as it is put together, `connect_timeout`
    and `idle_timeout` (between two pieces of an answer; None: no limit) are in seconds. Raises UsageError for a URL
    that cannot be used.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
        connect_timeout: float = CONNECT_TIMEOUT,
        idle_timeout: float | None = None,
    ) -> None:
        self.url = base_url(url)
        self._api_key = api_key
        self._max_answer_bytes = max_answer_bytes
        self._address = Address(self.url, connect_timeout, idle_timeout)
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            if not is_sayable(api_key):
                raise UsageError("the engine's API key: expected printable ASCII, as a header can hold it")
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None
        self._models: tuple[str, ...] | None = None

    async def probe(self) -> EngineInfo:
        """Return what the engine is and lists; raises EngineUnavailable with what was found at the URL instead."""
        info = await probing.probe(self._open_session(), self.url, self._api_key is not None)
        self._models = info.models
        return info

    async def load(self) -> EngineLoad:
        """Return what runs and waits in the engine, as far as it tells."""
        return await probing.load(self._open_session(), self.url)

    async def run(self, job: Job, on_delta: OnDelta | None = None) -> EngineAnswer:
        """Run one request to its end. Cancelling closes the connection, which aborts it. Raises EngineError."""
        request = request_for(job, await self._first_model_for(job))
        try:
            return await self._exchange(request, on_delta)
        except EngineUnclear as error:
            if await self._has_died(error):
                self._models = None
                raise EngineGone(f"{error}; the engine has died", in_flight=True) from error
            raise
        except EngineGone:
            # What comes back at this URL may serve another model.
            self._models = None
            raise

    async def close(self) -> None:
        """Close the connections to the engine."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _exchange(self, request: Request, on_delta: OnDelta | None) -> EngineAnswer:
        wire = await self._address.open()
        try:
            await wire.send(self._address.post(request.path, self._headers, len(request.body)), request.body)
            return await self._read(request, wire, on_delta)
        finally:
            wire.close()

    async def _read(self, request: Request, wire: Wire, on_delta: OnDelta | None) -> EngineAnswer:
        head, limit = await wire.head(), self._max_answer_bytes
        request_id = head.headers.get("x-request-id", "")
        if not 200 <= head.status < 300:
            refusal = sort_status(head.status, await wire.read(limit), request_id, head.headers.get("retry-after"))
            return raised(refusal)
        if head.content_type == "text/event-stream":
            reader = StreamReader(assembler_for(request.path), limit, request_id, on_delta)
            return await wire.body(reader.feed, reader.close)
        body = await wire.read(limit + 1)
        if len(body) > limit:
            raise too_large(limit)
        answer = whole_answer(head.status, body, request_id)
        if request.streams and on_delta is not None:
            for text, chunk in as_chunks(load(answer.body)):
                on_delta(text, chunk)
        return answer

    async def _first_model_for(self, job: Job) -> str | None:
        """Return the model to put into the request; None where its own is kept or none is known."""
        if not wants_default_model(job):
            return None
        if self._models is None:
            try:
                await self.probe()
            except EngineUnavailable as error:
                raise EngineGone(str(error), in_flight=False) from error
        return self._models[0] if self._models else None

    async def _has_died(self, error: EngineUnclear) -> bool:
        """Tell a request that went wrong from an engine that did: a fact is asked for, not guessed from words.

        vLLM reports the death of its engine process to each request in flight as an internal error like any other.
        Taken for one, it would cost innocent requests their attempts, and let a request that kills engines do so again
        and again (G7). Its health says 503 by then, or nobody listens any more.
        """
        if error.status_code is not None and error.status_code >= 400 and speaks_of_death(error.body):
            return True  # with a status of success they are a part of an answer: of what a model says
        try:
            page = await probing.fetch(self._open_session(), f"{self.url}/health", LIFE_SIGN_TIMEOUT)
        except aiohttp.ClientConnectorError:
            return True
        except (aiohttp.ClientError, TimeoutError):
            return False
        return page.status in (502, 503, 504)

    def _open_session(self) -> aiohttp.ClientSession:
        """Return the session for questions about the engine; it is made on first use, inside the running loop."""
        if self._session is None:
            headers = {"Accept-Encoding": "identity"}
            if self._api_key is not None:
                headers["Authorization"] = f"Bearer {self._api_key}"
            self._session = aiohttp.ClientSession(
                # No reuse: an engine that closes an idle connection is not taken for one that is gone.
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=headers,
            )
        return self._session
