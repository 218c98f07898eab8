"""`llmq doctor`: what breaks queues in the field, looked at one by one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import typer

from llmq.cli.engine import find
from llmq.cli.errors import UNEXPECTED
from llmq.cli.options import EngineName, Json, Queue, RedisUrl
from llmq.cli.render import print_json, print_line
from llmq.cli.running import run_async
from llmq.cli.session import find_redis, load
from llmq.scheduler.connection import connect
from llmq.scheduler.doctor import examine
from llmq.scheduler.errors import LLMQError
from llmq.scheduler.findings import Finding
from llmq.scheduler.queue import Queue as JobQueue
from llmq.scheduler.settings import Settings


def doctor(engine: EngineName = None, queue: Queue = None, redis: RedisUrl = None, json: Json = False) -> None:
    """Look for what breaks queues, and say what to do about it.

    The server, what may lose jobs, memory, latency, clocks, scripts, a claim and a write, workers, and the engine
    where one is named. Changes nothing. Exit 1 when something is wrong.

    \b
    Examples:
      llmq doctor
      llmq doctor --engine http://127.0.0.1:8000
    """
    settings = load(engine=engine, queue=queue, redis_url=redis).settings
    found = run_async(lambda: _examine(settings, say=not json))
    fine = all(finding.fine for finding in found)
    if json:
        print_json({"fine": fine, "findings": [finding.to_json() for finding in found]})
    if not fine:
        raise typer.Exit(UNEXPECTED)


async def _examine(settings: Settings, *, say: bool) -> list[Finding]:
    """Return all findings; `say` prints each as it comes, because some take seconds."""
    found = []
    for findings in (_redis(settings), _engine(settings)):
        async for finding in findings:
            found.append(finding)
            if say:
                _print(finding)
    return found


async def _redis(settings: Settings) -> AsyncGenerator[Finding, None]:
    try:
        url = await asyncio.to_thread(find_redis, settings)
    except LLMQError as error:
        yield Finding("server", False, str(error))
        return
    client = connect(url, client_name="llmq-doctor")
    try:
        async for finding in examine(JobQueue(client, settings.queue), url):
            yield finding
    finally:
        await client.aclose()


async def _engine(settings: Settings) -> AsyncGenerator[Finding, None]:
    """Probe the engine, where one is named: a host without one is no fault, and a local model has no server yet."""
    if settings.engine is None or settings.engine.startswith("local:"):
        return
    try:
        found = await find(settings)
    except LLMQError as error:
        yield Finding("engine", False, str(error), "start it, or name the right one: --engine URL")
        return
    await found.engine.close()
    models = ", ".join(found.info.models) or "no model listed"
    yield Finding("engine", True, f"{found.info.kind} at {found.info.url}: {models}")


def _print(finding: Finding) -> None:
    print_line(f"{'fine ' if finding.fine else 'WRONG'}  {finding.check:9}{finding.text}")
    if finding.step:
        print_line(f"{'':16}-> {finding.step}")
