"""`llmq worker`: serve one engine until somebody asks it to stop."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from llmq.cli.options import Concurrency, EngineName, Grace, Json, Queue, RedisUrl
from llmq.cli.render import count_of, notice, print_json
from llmq.cli.running import run_async
from llmq.cli.session import load, open_session
from llmq.scheduler.errors import UsageError
from llmq.scheduler.settings import Settings
from llmq.workers.shutdown import Shutdown
from llmq.workers.slots import WorkerReport
from llmq.workers.worker import WorkerOptions, serve

if TYPE_CHECKING:
    from llmq.workers.engines.discovery import FoundEngine

_LABEL = re.compile(r"[!-~]{1,64}")


def worker(
    gpu: Annotated[str, typer.Option("--gpu", metavar="N", help="A label for the GPU: 0, or 0,1 for two.")] = "0",
    engine: EngineName = None,
    queue: Queue = None,
    concurrency: Concurrency = None,
    reserve: Annotated[
        int | None, typer.Option("--reserve", min=0, metavar="N", help="Slots kept free for chat (default: llmq set).")
    ] = None,
    grace: Grace = None,
    until_empty: Annotated[bool, typer.Option("--until-empty", help="End when the queue is empty.")] = False,
    redis: RedisUrl = None,
    json: Json = False,
) -> None:
    """Pull jobs from a queue and run them on one engine. Start one for each GPU.

    SIGTERM and Ctrl-C drain: nothing new is started, running requests may finish within the grace, the rest goes back
    to the queue. A second Ctrl-C hands all of it back at once; nothing is lost either way.

    \b
    Examples:
      llmq worker --gpu 0                               the engine on a usual port
      llmq worker --gpu 1 --engine http://gpu7:8000 --concurrency 64
      llmq worker --engine sim --until-empty            a simulated GPU
    """
    loaded = load(engine=engine, queue=queue, concurrency=concurrency, grace=grace, redis_url=redis)
    _check_label(gpu)
    slots = loaded.settings.concurrency
    if reserve is not None and slots is not None and reserve > slots:
        raise UsageError(f"--reserve: expected at most the concurrency, {slots:,}, got {reserve:,}")
    options = WorkerOptions(
        queue=loaded.settings.queue,
        gpu=gpu,
        concurrency=loaded.settings.concurrency,
        reserve=reserve,
        grace=loaded.settings.grace,
        until_empty=until_empty,
    )
    shutdown = Shutdown()
    report = run_async(lambda: _serve(loaded.settings, options, shutdown), shutdown)
    if json:
        print_json(asdict(report))
    else:
        done = f"{count_of(report.ended, 'job')} answered, {report.failed:,} failed, {report.handed_back:,} handed back"
        notice(f"ended {report.worker_id} {done}")


def _check_label(gpu: str) -> None:
    """Refuse a label that would not stay one word of the line `ready`. Raises UsageError."""
    if not _LABEL.fullmatch(gpu):
        raise UsageError(f"--gpu: expected a label of 1 to 64 characters without spaces, like 0 or 0,1; got {gpu!r}")


async def find(settings: Settings) -> FoundEngine:
    """Return the engine of the settings, probed; say which one it is where nobody named it."""
    # Here and not above: the HTTP client takes 0.2 s to load, and most commands need none.
    from llmq.workers.engines.discovery import find_engine

    key = settings.engine_api_key
    found = await find_engine(
        settings.engine,
        api_key=key.get_secret_value() if key else None,
        max_answer_bytes=settings.max_answer_bytes,
    )
    if found.note:
        notice(f"note: {found.note}")
    return found


async def _serve(settings: Settings, options: WorkerOptions, shutdown: Shutdown) -> WorkerReport:
    async with open_session(settings, warnings=True) as session:
        # The worker makes connections of its own; the session stays to keep an embedded server alive.
        found = await find(settings)
        try:
            return await serve(session.url, found.engine, options, shutdown)
        finally:
            await found.engine.close()
