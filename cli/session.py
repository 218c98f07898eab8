"""What a command works with: its settings, a checked connection, the queue. Opened once a command, closed with it.

Within a session every error that means "Redis cannot be used" is one line with the next step (`redis_errors`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from redis.asyncio import Redis

from llmq.cli.errors import DEBUG
from llmq.cli.render import warn
from llmq.scheduler.connection import check_server, connect, redact, redis_errors
from llmq.scheduler.embedded import ensure_server
from llmq.scheduler.errors import RedisUnavailable
from llmq.scheduler.queue import Queue
from llmq.scheduler.server_check import ServerFacts
from llmq.scheduler.settings import Loaded, Settings, load_settings


@dataclass(frozen=True, slots=True)
class Session:
    """An open session; `url` may hold a password (show it with `redact`)."""

    settings: Settings
    url: str
    redis: Redis
    queue: Queue


def load(**arguments: object) -> Loaded:
    """Return the settings of this command; an argument that is None was not given."""
    # What only the error boundary reads is no setting of a job's way.
    environ = {name: value for name, value in os.environ.items() if name != DEBUG}
    return load_settings(arguments, environ)


def where_options(loaded: Loaded) -> tuple[str, ...]:
    """Return the options that led a command to its queue, for a command line that is to be typed next."""
    settings = loaded.settings
    options: tuple[str, ...] = ()
    if loaded.source("queue") == "argument":
        options += ("--queue", settings.queue)
    if settings.redis_url and loaded.source("redis_url") == "argument":
        options += ("--redis", redact(settings.redis_url))
    return options


def find_redis(settings: Settings) -> str:
    """Return the URL of Redis: the one that was set, else the embedded server's, started now if need be. Blocks."""
    return settings.redis_url or ensure_server(settings.home)


@asynccontextmanager
async def open_session(
    settings: Settings, *, queue: str | None = None, warnings: bool = False
) -> AsyncIterator[Session]:
    """Connect, check the server, and open the queue (None: the one of the settings).

    `warnings` says on stderr which settings of the server may lose jobs: for commands that put work in or run it.
    """
    url = await asyncio.to_thread(find_redis, settings)
    client = connect(url)
    try:
        with redis_errors(url):
            facts = await _check(client, url)
            if warnings:
                for warning in facts.warnings:
                    warn(f"Redis at {redact(url)}: {warning}")
            opened = Queue(client, queue or settings.queue)
            await opened.ensure_format()
            yield Session(settings, url, client, opened)
    finally:
        await client.aclose()


async def _check(client: Redis, url: str) -> ServerFacts:
    try:
        return await check_server(client)
    except RedisUnavailable as error:
        # It speaks of "this" server; whoever typed the command may not know which one that is.
        raise RedisUnavailable(f"Redis at {redact(url)}: {error}") from None
