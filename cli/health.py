"""`llmq health`: the probe for containers and balancers."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from llmq.cli.options import Json, Queue, RedisUrl
from llmq.cli.render import print_json, print_line
from llmq.cli.running import run_async
from llmq.cli.session import load
from llmq.scheduler.connection import connect, redis_errors
from llmq.scheduler.embedded import ensure_server, server_status
from llmq.scheduler.errors import RedisUnavailable
from llmq.scheduler.health import Health, check_health
from llmq.scheduler.queue import Queue as JobQueue
from llmq.scheduler.redis_url import redact
from llmq.scheduler.settings import Settings

#: Seconds that the whole check may take: what asks gives up after some more.
_PATIENCE_S = 5.0

#: And for one answer of Redis, so that the error can say which step was too slow.
_ANSWER_S = 4.0


def health(
    worker: Annotated[
        str | None, typer.Option("--worker", metavar="ID|HOST", help="Check that this worker claims, too.")
    ] = None,
    queue: Queue = None,
    redis: RedisUrl = None,
    json: Json = False,
) -> None:
    """Check that jobs can be claimed and submitted now.

    Runs the claim script without room for a job, and a write, within 5 s. Exit 0, or 4 with one line on stderr.

    \b
    Examples:
      llmq health
      llmq health --worker "$(hostname)"
    """
    settings = load(queue=queue, redis_url=redis).settings
    found = run_async(lambda: _check(settings, worker))
    if json:
        print_json(found.to_json())
    else:
        claims = f"; claiming: {', '.join(found.workers)}" if found.workers else ""
        print_line(f"ok: claim {found.claim_s * 1000:.1f} ms, write {found.write_s * 1000:.1f} ms{claims}")


async def _check(settings: Settings, worker: str | None) -> Health:
    url = settings.redis_url or _embedded_url(settings)
    client = connect(url, timeout_s=_ANSWER_S, client_name="llmq-health")
    try:
        async with asyncio.timeout(_PATIENCE_S):
            with redis_errors(url):
                return await check_health(JobQueue(client, settings.queue), worker)
    except TimeoutError:
        raise RedisUnavailable(
            f"Redis at {redact(url)} took more than {_PATIENCE_S:g} s for a claim and a write; see: llmq doctor"
        ) from None
    finally:
        await client.aclose()


def _embedded_url(settings: Settings) -> str:
    """Return where the embedded server is: a probe starts none."""
    if (state := server_status(settings.home).state) != "running":
        raise RedisUnavailable(
            f"the embedded server is {state}; start it (llmq server start), or set LLMQ_REDIS_URL to another"
        )
    return ensure_server(settings.home)
