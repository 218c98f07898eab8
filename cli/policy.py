"""`llmq rate`, `pause`, `resume` and `set`: the live settings of a queue, which the very next claim goes by."""

from __future__ import annotations

from typing import Annotated

import typer

from llmq.cli.options import Json, Queue, RedisUrl
from llmq.cli.render import notice, print_json, print_line, print_table
from llmq.cli.running import run_async
from llmq.cli.session import load, open_session
from llmq.scheduler.errors import UsageError
from llmq.scheduler.inspect import read_status
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.live import LiveValue, live_setting
from llmq.scheduler.queue import Queue as JobQueue
from llmq.scheduler.units import format_rate, parse_rate

ClassName = Annotated[TrafficClass, typer.Argument(metavar="CLASS", help="Which jobs: batch or interactive.")]


def rate(
    rate: Annotated[
        str | None, typer.Argument(metavar="RATE", help="The new rate: N/s, N/m, N/h, Ntok/s or off.")
    ] = None,
    burst: Annotated[
        float | None, typer.Option("--burst", metavar="B", help="Starts at once after a pause (default: 1 s worth).")
    ] = None,
    queue: Queue = None,
    redis: RedisUrl = None,
    json: Json = False,
) -> None:
    """Show or change how fast batch may start.

    In jobs or LLM tokens, for the whole fleet. Chat is never limited, and the deadline of batch comes on top.

    \b
    Examples:
      llmq rate                      show it
      llmq rate 5/s --burst 10       five jobs a second
      llmq rate 100000tok/s          LLM tokens, as estimated
      llmq rate off                  no limit
    """
    if rate is None and burst is not None:
        raise UsageError("a burst goes with a rate: llmq rate 5/s --burst 10")
    wanted = parse_rate(rate) if rate is not None else None
    settings = load(queue=queue, redis_url=redis).settings

    async def work() -> None:
        async with open_session(settings) as session:
            if rate is not None:
                await session.queue.set_rate(wanted, burst)
            await _show_rate(session.queue, json)

    run_async(work)


async def _show_rate(queue: JobQueue, json: bool) -> None:
    limit = await queue.rate()
    bucket = (await read_status(queue)).bucket
    if json:
        print_json({"queue": queue.name, "set": format_rate(limit.rate if limit else None), **bucket.to_json()})
        return
    print_line(str(limit) if limit else "off")
    if bucket.limit != limit or not bucket.open:
        now = "no batch starts" if not bucket.open else f"the rate is {bucket.limit or 'off'}"
        notice(f"note: by the windows (llmq set windows) {now} at the moment")


def pause(cls: ClassName, queue: Queue = None, redis: RedisUrl = None, json: Json = False) -> None:
    """Let no job of a class start.

    What runs goes on, and new jobs are still taken.

    \b
    Example:
      llmq pause batch
    """
    _set_paused(cls, True, queue, redis, json)


def resume(cls: ClassName, queue: Queue = None, redis: RedisUrl = None, json: Json = False) -> None:
    """Let the jobs of a class start again.

    \b
    Example:
      llmq resume batch
    """
    _set_paused(cls, False, queue, redis, json)


def _set_paused(cls: TrafficClass, paused: bool, queue: str | None, redis: str | None, json: bool) -> None:
    settings = load(queue=queue, redis_url=redis).settings

    async def work() -> None:
        async with open_session(settings) as session:
            await (session.queue.pause(cls) if paused else session.queue.resume(cls))

    run_async(work)
    if json:
        print_json({"queue": settings.queue, "class": cls.value, "paused": paused})
    else:
        print_line(f"{cls.value} of queue {settings.queue} is {'paused' if paused else 'not paused'}")


def set_value(
    key: Annotated[str | None, typer.Argument(metavar="KEY", help="The setting; without it all are listed.")] = None,
    value: Annotated[str | None, typer.Argument(metavar="VALUE", help="Its value, or default.")] = None,
    queue: Queue = None,
    redis: RedisUrl = None,
    json: Json = False,
) -> None:
    """Show or change the live settings of a queue.

    A change acts on the very next claim of every worker.

    \b
    Examples:
      llmq set                         all settings, with source
      llmq set deadline 15s
      llmq set weight.evals 3          three times the share of other tenants
      llmq set deadline default
    """
    settings = load(queue=queue, redis_url=redis).settings

    async def work() -> list[LiveValue]:
        async with open_session(settings) as session:
            if key is not None and value is not None:
                await session.queue.set(key, value)
            return await session.queue.settings()

    if key is not None:
        live_setting(key)  # a name that does not exist is said with the nearest one, and before Redis is asked
    shown = [found for found in run_async(work) if key is None or found.name == key]
    if json:
        print_json({found.name: {"value": found.value, "source": found.source} for found in shown})
    elif key is not None:
        print_line(f"{key} = {shown[0].value} ({shown[0].source})" if shown else f"{key} is not set")
    else:
        rows = [[found.name, found.value or "-", found.source, found.meaning] for found in shown]
        print_table(["setting", "value", "source", "what it does"], rows)
