"""`llmq worker`: serve one engine until somebody asks it to stop."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer

from llmq.cli.engine import EngineStart, StoppedEarly, open_engine
from llmq.cli.open_files import allow_open_files
from llmq.cli.options import Concurrency, EngineName, Gpu, Grace, Json, LogLevel, Queue, RedisUrl, Serve, ServeLog
from llmq.cli.render import count_of, notice, print_json
from llmq.cli.running import run_async, settle_memory
from llmq.cli.session import load, open_session
from llmq.scheduler.errors import UsageError
from llmq.scheduler.logs import Event, record_of, show_log
from llmq.scheduler.settings import Settings
from llmq.workers.metrics import LOOPBACK, MetricsAddress
from llmq.workers.shutdown import Shutdown
from llmq.workers.slots import WorkerReport
from llmq.workers.worker import WorkerOptions
from llmq.workers.worker import serve as serve_queue

_LABEL = re.compile(r"[!-~]{1,64}")


def worker(
    gpu: Gpu = "0",
    engine: EngineName = None,
    serve: Serve = None,
    serve_log: ServeLog = None,
    queue: Queue = None,
    concurrency: Concurrency = None,
    reserve: Annotated[
        int | None, typer.Option("--reserve", min=0, metavar="N", help="Slots kept free for chat (default: llmq set).")
    ] = None,
    batch_cap: Annotated[
        int | None,
        typer.Option("--batch-cap", min=0, metavar="N", help="Batch requests at once at most (default: no cap)."),
    ] = None,
    grace: Grace = None,
    log_level: LogLevel = None,
    until_empty: Annotated[bool, typer.Option("--until-empty", help="End when the queue is empty.")] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            "--metrics-port", min=0, max=65_535, metavar="P", help="Tell Prometheus metrics here; 0: any port."
        ),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option("--metrics-host", metavar="H", help="The address for that (default: this host only).")
    ] = LOOPBACK,
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
      llmq worker --gpu 0 --serve 'vllm serve Qwen/Qwen3-8B --port 8000'
      llmq worker --engine 'local:model.gguf?slots=8'   llama.cpp, started here
      llmq worker --engine sim --until-empty            a simulated GPU
      llmq worker --gpu 0 --metrics-port 9400           Prometheus scrapes it
    """
    loaded = load(
        engine=engine, queue=queue, concurrency=concurrency, grace=grace, log_level=log_level, redis_url=redis
    )
    _check_label(gpu)
    if metrics_port is None and metrics_host != LOOPBACK:
        raise UsageError("--metrics-host goes with a port: --metrics-port 9090")
    slots = loaded.settings.concurrency
    if reserve is not None and slots is not None and reserve > slots:
        raise UsageError(f"--reserve: expected at most the concurrency, {slots:,}, got {reserve:,}")
    options = WorkerOptions(
        queue=loaded.settings.queue,
        gpu=gpu,
        concurrency=loaded.settings.concurrency,
        reserve=reserve,
        batch_cap=batch_cap,
        grace=loaded.settings.grace,
        until_empty=until_empty,
        keyring=loaded.settings.keyring(),
        announce=_announcer(loaded.settings),
        metrics=None if metrics_port is None else MetricsAddress(metrics_port, metrics_host),
    )
    shutdown = Shutdown()
    start = EngineStart(gpu, serve, serve_log)
    allow_open_files()
    report = run_async(lambda: _serve(loaded.settings, options, start, shutdown), shutdown)
    if json:
        print_json(asdict(report or WorkerReport("")))
    elif report is not None:
        done = f"{count_of(report.ended, 'job')} answered, {report.failed:,} failed, {report.handed_back:,} handed back"
        notice(f"ended {report.worker_id} {done}")


def _announcer(settings: Settings) -> Callable[[str], None]:
    """Show the log, and return how the worker says that it is ready: in a log of JSON as one of its lines."""
    handler = show_log(settings.log_level, settings.log_format)

    def announce(line: str) -> None:
        settle_memory()
        if settings.log_format == "text":
            notice(line)
        else:
            # Whatever the level: who asked for a worker wants to know that it is one.
            handler.handle(record_of(Event.NOTICE, text=line))

    return announce


def _check_label(gpu: str) -> None:
    """Refuse a label that would not stay one word of the line `ready`. Raises UsageError."""
    if not _LABEL.fullmatch(gpu):
        raise UsageError(f"--gpu: expected a label of 1 to 64 characters without spaces, like 0 or 0,1; got {gpu!r}")


async def _serve(
    settings: Settings, options: WorkerOptions, start: EngineStart, shutdown: Shutdown
) -> WorkerReport | None:
    """Serve; return None where it was stopped before its engine was ready."""
    try:
        async with (
            # The worker makes connections of its own; the session stays to keep an embedded server alive.
            open_session(settings, warnings=True) as session,
            open_engine(settings, start, shutdown) as found,
        ):
            return await serve_queue(session.url, found.engine, options, shutdown)
    except StoppedEarly as stopped:
        notice(str(stopped))
        return None
