"""What a command works with: its settings, a checked connection, the queue. Opened once a command, closed with it.

Within a session every error that means "Redis cannot be used" is one line with the next step (`redis_errors`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from redis.asyncio import Redis

from llmq.cli.render import command, warn
from llmq.scheduler.batches import Batches
from llmq.scheduler.connection import check_server, connect, redact, redis_errors
from llmq.scheduler.embedded import ensure_server
from llmq.scheduler.errors import LLMQError, RedisUnavailable
from llmq.scheduler.outage import REDIS_ERRORS
from llmq.scheduler.queue import Queue
from llmq.scheduler.server_check import ServerFacts
from llmq.scheduler.settings import Loaded, Settings, load_settings

T = TypeVar("T")

#: The queue of whoever names none.
DEFAULT_QUEUE = str(Settings.model_fields["queue"].default)

#: How often a command on the embedded server looks whether it lives.
SERVER_CHECK_S = 2.0


@dataclass(frozen=True, slots=True)
class Session:
    """An open session; `url` may hold a password (show it with `redact`)."""

    settings: Settings
    url: str
    redis: Redis
    queue: Queue


def load(**arguments: object) -> Loaded:
    """Return the settings of this command; an argument that is None was not given."""
    return load_settings(arguments)


def where_options(loaded: Loaded) -> tuple[str, ...]:
    """Return the options that led a command to its queue, for a command line that is to be typed next."""
    queue = ("--queue", loaded.settings.queue) if loaded.source("queue") == "argument" else ()
    return *queue, *redis_option(loaded)


def redis_option(loaded: Loaded) -> tuple[str, ...]:
    """Return the option that led a command to its Redis; () where the environment, llmq.toml or the default did."""
    url = loaded.settings.redis_url
    return ("--redis", redact(url)) if url and loaded.source("redis_url") == "argument" else ()


def worker_command(loaded: Loaded, queue: str) -> str:
    """Return the command that serves a queue; its queue is named, because a worker is often started elsewhere."""
    name = () if queue == DEFAULT_QUEUE else ("--queue", queue)
    return command("llmq", "worker", "--gpu", "0", *name, *redis_option(loaded))


def find_redis(settings: Settings) -> str:
    """Return the URL of Redis: the one that was set, else the embedded server's, started now if need be. Blocks."""
    return settings.redis_url or ensure_server(settings.home)


@asynccontextmanager
async def open_session(
    settings: Settings, *, queue: str | None = None, warnings: bool = False
) -> AsyncIterator[Session]:
    """Connect, check the server, and open the queue (None: the one of the settings).

    `warnings` is for commands that put work in or run it: says on stderr which settings of the server may lose jobs,
    and refuses a server that is sure to.
    """
    keyring = settings.keyring()
    url = await asyncio.to_thread(find_redis, settings)
    client = connect(url)
    keeping = None if settings.redis_url else asyncio.create_task(_keep_server(client, settings))
    try:
        with redis_errors(url):
            facts = await _check(client, url, for_work=warnings)
            if warnings:
                for warning in facts.warnings:
                    warn(f"Redis at {redact(url)}: {warning}")
            opened = Queue(client, queue or settings.queue, keyring=keyring)
            await opened.ensure_format()
            yield Session(settings, url, client, opened)
    finally:
        if keeping is not None:
            keeping.cancel()
            await asyncio.wait([keeping])
        await client.aclose()


async def _keep_server(client: Redis, settings: Settings) -> None:
    """Start the embedded server again where it has died under a command that goes on: nobody else would."""
    while True:
        await asyncio.sleep(SERVER_CHECK_S)
        try:
            await client.ping()
        except REDIS_ERRORS:
            try:
                await asyncio.to_thread(ensure_server, settings.home)
            except LLMQError:
                continue  # the command's own calls say what is wrong


async def with_batches(settings: Settings, work: Callable[[Batches], Awaitable[T]]) -> T:
    """Do one thing with the batches of the queue."""
    async with open_session(settings) as session:
        return await work(Batches(session.queue))


async def _check(client: Redis, url: str, *, for_work: bool) -> ServerFacts:
    try:
        facts = await check_server(client)
        if for_work:
            facts.refuse_loss()
        return facts
    except RedisUnavailable as error:
        # It speaks of "this" server; whoever typed the command may not know which one that is.
        raise RedisUnavailable(f"Redis at {redact(url)}: {error}") from None
