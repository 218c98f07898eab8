"""The direct way: chat goes to a known engine while the queue is away, if the operator has named one.

It is a bridge for an outage and no more: a few calls at a time, no priorities, no retries, nothing counted. Every
answer says so in a header. The engine's bytes pass as they are, and its URL is the operator's: no request chooses it.
"""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import aiohttp
from starlette.types import Receive

from llmq.gateway.boundary import Exchange
from llmq.gateway.call import Call
from llmq.gateway.errors import ApiError
from llmq.gateway.translation import REDIS_RETRY_S
from llmq.scheduler.errors import SettingsError
from llmq.scheduler.redis_url import redact

HEADER = "x-llmq-direct"

#: Calls at a time: what an engine takes beside its batch without harm.
AT_ONCE = 8

CONNECT_S = 2.0


class Direct:
    """The way to one engine at `url`, given with or without `/v1`; `api_key` is sent as a bearer token."""

    def __init__(self, url: str, api_key: str | None = None, *, at_once: int = AT_ONCE) -> None:
        self.url = _base(url)
        self._headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._at_once = at_once
        self._running = 0
        self._session: aiohttp.ClientSession | None = None

    async def serve(self, call: Call, exchange: Exchange, receive: Receive) -> None:
        """Answer one call by the engine itself; ends with the client's leaving. Raises ApiError (503)."""
        if self._running >= self._at_once:
            message = "the queue is away, and the engines that are asked instead are busy; try again in a moment"
            raise ApiError(503, message, code="queue_unavailable", retry_after=REDIS_RETRY_S)
        self._running += 1
        passing = asyncio.create_task(self._pass(call, exchange))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({passing, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if passing.done():
                passing.result()
        finally:
            self._running -= 1
            passing.cancel()
            leaving.cancel()
            await asyncio.gather(passing, leaving, return_exceptions=True)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _pass(self, call: Call, exchange: Exchange) -> None:
        try:
            async with self._open().post(
                self.url + call.job.url, data=call.job.raw, headers=self._headers, allow_redirects=False
            ) as response:
                try:
                    exchange.headers[HEADER] = "1"
                    await exchange.begin(response.status, {"content-type": response.headers.get("content-type", "")})
                    async for data in response.content.iter_any():
                        await exchange.write(data)
                    await exchange.write(b"", more=False)
                finally:
                    response.close()
        except (aiohttp.ClientError, TimeoutError):
            message = "neither the queue nor the engine that is asked instead can be reached; try again in a moment"
            raise ApiError(503, message, code="queue_unavailable", retry_after=REDIS_RETRY_S) from None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            )
        return self._session


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _base(url: str) -> str:
    try:
        parts = urlsplit(url.strip())
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        usable = usable and not (parts.query or parts.fragment or "@" in parts.netloc)
    except ValueError:  # a port that is none, brackets that hold no address
        usable = False
    if not usable:
        raise SettingsError(
            f"direct: expected the URL of an engine, as in http://HOST:8000 or http://HOST/v1, got {redact(url)!r}"
        )
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"
