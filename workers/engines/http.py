"""The engine behind an OpenAI-compatible HTTP server: vLLM, SGLang, llama.cpp, transformers serve, and others.

`run` sends one request, streamed wherever the engine can stream (so that closing the connection aborts it), hands the
chunks on as they come, and returns the whole answer put together. What went wrong is sorted as `sorting.py` says; it
never retries, follows no redirect, and keeps no connection between requests: an engine closes idle ones, and a request
that dies on one that was just closed looks like a crash of the engine.
"""

from __future__ import annotations

import contextlib
import io
import socket
from collections.abc import Iterator
from typing import Any

import aiohttp

from llmq.scheduler.errors import EngineUnavailable
from llmq.scheduler.job import Job
from llmq.workers.engines import probing
from llmq.workers.engines.answering import StreamReader, as_chunk, raised, too_large, whole_answer
from llmq.workers.engines.asking import Request, base_url, request_for, wants_default_model
from llmq.workers.engines.assembly import assembler_for
from llmq.workers.engines.base import EngineAnswer, EngineGone, EngineInfo, EngineLoad, EngineUnclear, OnDelta
from llmq.workers.engines.merge import load
from llmq.workers.engines.sorting import sort_status, speaks_of_death

MAX_ANSWER_BYTES = 8 * 2**20

#: An engine is on this host or this network; a connection that takes longer will not come.
CONNECT_TIMEOUT = 5.0

#: After an unclear error: how long the engine may take to show that it lives. Slower is not dead.
LIFE_SIGN_TIMEOUT = 2.0

#: A host that vanished without a word is noticed after 30 s: without this a dead stream is waited on for ever.
KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))


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
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout, sock_read=idle_timeout)
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
        with _foreign_errors(self.url):
            async with self._open_session().post(
                f"{self.url}{request.path}",
                # As a file it is written piece by piece: a large body does not hold up the other streams.
                data=io.BytesIO(request.body),
                headers={"Content-Type": "application/json"},
                timeout=self._timeout,
                allow_redirects=False,
            ) as response:
                try:
                    return await self._read(request, response, on_delta)
                finally:
                    # Not released: what the engine still has to say is of no use, and it must notice at once.
                    response.close()

    async def _read(self, request: Request, response: aiohttp.ClientResponse, on_delta: OnDelta | None) -> EngineAnswer:
        request_id = response.headers.get("x-request-id", "")
        if not 200 <= response.status < 300:
            body = await _read_bounded(response, self._max_answer_bytes)
            return raised(sort_status(response.status, body, request_id, response.headers.get("Retry-After")))
        if response.content_type == "text/event-stream":
            reader = StreamReader(assembler_for(request.path), self._max_answer_bytes, request_id, on_delta)
            return await reader.read(response.content.iter_any())
        body = await _read_bounded(response, self._max_answer_bytes + 1)
        if len(body) > self._max_answer_bytes:
            raise too_large(self._max_answer_bytes)
        answer = whole_answer(response.status, body, request_id)
        if request.streams and on_delta is not None and (chunk := as_chunk(load(answer.body))):
            on_delta(*chunk)
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
        if speaks_of_death(error.body):
            return True
        try:
            page = await probing.fetch(self._open_session(), f"{self.url}/health", LIFE_SIGN_TIMEOUT)
        except aiohttp.ClientConnectorError:
            return True
        except (aiohttp.ClientError, TimeoutError):
            return False
        return page.status in (502, 503, 504)

    def _open_session(self) -> aiohttp.ClientSession:
        """Return the session; it is made on first use, inside the running loop."""
        if self._session is None:
            headers = {"Accept-Encoding": "identity"}
            if self._api_key is not None:
                headers["Authorization"] = f"Bearer {self._api_key}"
            self._session = aiohttp.ClientSession(
                # No limit: the worker's slots are the limit. No reuse: see the head of this module.
                connector=aiohttp.TCPConnector(limit=0, force_close=True, socket_factory=_watched_socket),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=headers,
            )
        return self._session


async def _read_bounded(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """Read at most `limit` bytes of a body."""
    pieces: list[bytes] = []
    left = limit
    while left > 0 and (data := await response.content.read(left)):
        pieces.append(data)
        left -= len(data)
    return b"".join(pieces)


@contextlib.contextmanager
def _foreign_errors(url: str) -> Iterator[None]:
    """Say aiohttp's errors in the words of `base.py`.

    Only a connection that never came about proves that nothing is in flight. One that was lost before an answer may
    have delivered the request: counting it as in flight bounds how often a request that kills engines is sent again.
    What ends a request is told to whoever sent it, and so does not say where the engine is.
    """
    try:
        yield
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise EngineGone(f"no connection to the engine at {url}: {_reason(error)}", in_flight=False) from error
    except aiohttp.SocketTimeoutError as error:
        raise EngineUnclear(f"the engine fell silent in mid-answer: {_reason(error)}") from error
    except (aiohttp.ClientPayloadError, aiohttp.ClientConnectionError) as error:
        raise EngineGone(f"the engine was lost with the request in flight: {_reason(error)}", in_flight=True) from error
    except aiohttp.ClientError as error:
        raise EngineUnclear(f"what the engine sent is no HTTP answer: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    told = error.message if isinstance(error, aiohttp.ClientResponseError) else str(error)
    return told or type(error).__name__


def _watched_socket(address: Any) -> socket.socket:
    """Make a socket on which the kernel checks that the peer is there."""
    family, kind, protocol, *_ = address
    watched = socket.socket(family, kind, protocol)
    watched.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE:
        if hasattr(socket, name):
            watched.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return watched
