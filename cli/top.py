"""`llmq top`: what `llmq status` shows, again and again on one screen.

While Redis is away the last picture stays, and the first line says since when; it is asked again until it is back.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from llmq.cli.errors import Interrupted
from llmq.cli.options import Json, Queue, RedisUrl
from llmq.cli.progress import format_time
from llmq.cli.render import print_json, text_of
from llmq.cli.running import run_async
from llmq.cli.session import load, open_session
from llmq.cli.status import no_workers, print_figures, print_workers
from llmq.scheduler.connection import redis_errors
from llmq.scheduler.errors import RedisUnavailable, UsageError
from llmq.scheduler.inspect import QueueStatus, read_status
from llmq.scheduler.settings import Loaded
from llmq.scheduler.units import parse_duration

#: A look costs Redis about a millisecond with a hundred workers; more often than this nobody can read.
SHORTEST_S, LONGEST_S = 0.2, 3600.0

Every = Annotated[str, typer.Option("--every", "-n", metavar="TIME", help="How often to look (at least 0.2s).")]


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen last, and why it is not what holds now ("" where it is); `away_s` is how long that has been so."""

    found: QueueStatus
    fault: str = ""
    away_s: float = 0.0


def top(queue: Queue = None, redis: RedisUrl = None, every: Every = "2s", json: Json = False) -> None:
    """Watch a queue and its workers until Ctrl-C.

    \b
    Examples:
      llmq top
      llmq top --queue llama-70b --every 500ms
    """
    loaded, interval = load(queue=queue, redis_url=redis), _interval(every)
    if json:
        print_json(run_async(lambda: _once(loaded)).to_json())
        return
    if not sys.stdout.isatty():
        raise UsageError("expected a terminal on stdout; for a program: llmq status --json")
    try:
        run_async(lambda: _watch(loaded, interval))
    except Interrupted:
        pass  # that is how it ends


def picture(look: Look, loaded: Loaded, every_s: float, now: str) -> str:
    """Return the screen: a line of what, when and how well, the figures, the workers; the most loaded first."""
    queue = loaded.settings.queue
    head = f"queue {queue}   {now}   every {every_s:g} s   Ctrl-C ends"
    fault = f"not read for {format_time(look.away_s)}: {look.fault}"
    found = look.found
    workers = sorted(found.workers, key=lambda worker: (-worker.busy, worker.id))
    text = text_of(lambda: print_workers(workers)) if workers else f"{no_workers(loaded, queue)}\n"
    lines = [head, *([fault] if look.fault else []), "", text_of(lambda: print_figures(found)), text]
    return "\n".join(lines)


async def _watch(loaded: Loaded, every_s: float) -> None:
    with Live(console=Console(file=sys.stdout), screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        async for look in _looks(loaded, every_s):
            shown = picture(look, loaded, every_s, time.strftime("%H:%M:%S"))
            live.update(Group(*(Text(line, no_wrap=True, overflow="ellipsis") for line in shown.splitlines())))
            live.refresh()


async def _looks(loaded: Loaded, every_s: float, clock: Callable[[], float] = time.monotonic) -> AsyncIterator[Look]:
    """Yield looks, until cancelled. Raises what the first one raises: a wrong URL is no outage."""
    async with open_session(loaded.settings) as session:
        seen, at = await read_status(session.queue), clock()
        look = Look(seen)
        while True:
            yield look
            await asyncio.sleep(every_s)
            try:
                with redis_errors(session.url):
                    seen, at = await read_status(session.queue), clock()
                look = Look(seen)
            except RedisUnavailable as error:
                look = Look(seen, str(error), clock() - at)


async def _once(loaded: Loaded) -> QueueStatus:
    async with open_session(loaded.settings) as session:
        return await read_status(session.queue)


def _interval(text: str) -> float:
    seconds = parse_duration(text)
    if not SHORTEST_S <= seconds <= LONGEST_S:
        raise UsageError(f"--every: expected {SHORTEST_S:g}s to {LONGEST_S / 3600:g}h, got {text!r}")
    return seconds
