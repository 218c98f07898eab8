"""The engine that a command works with: found at its URL, simulated, or started here and stopped with the command.

async with open_engine(settings, EngineStart(gpu="0", serve="vllm serve MODEL"), shutdown) as found: ...
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from llmq.cli.errors import Interrupted
from llmq.cli.render import notice
from llmq.scheduler.errors import UsageError
from llmq.scheduler.settings import Settings
from llmq.workers.shutdown import Shutdown

if TYPE_CHECKING:
    from llmq.workers.engines.discovery import FoundEngine
    from llmq.workers.engines.launch import Launch

T = TypeVar("T")

#: `--serve-log -`: the engine speaks on stderr.
ON_STDERR = "-"


@dataclass(frozen=True, slots=True)
class EngineStart:
    """What a command line says of an engine that is started here; `serve` of None: none, unless it is `local:`."""

    gpu: str = "0"
    serve: str | None = None
    log: str | None = None


class StoppedEarly(Interrupted):
    """Somebody asked to stop before the engine was ready; nothing was claimed."""


@asynccontextmanager
async def open_engine(settings: Settings, start: EngineStart, shutdown: Shutdown) -> AsyncIterator[FoundEngine]:
    """Find or start the engine; close it, and stop what was started, at the end of the block.

    Raises UsageError for what cannot be started, EngineUnavailable where none answers, and StoppedEarly.
    """
    if start.serve is None and not _is_local(settings):
        found = await find(settings)
        try:
            yield found
        finally:
            await found.engine.close()
    else:
        async with _started(settings, start, shutdown) as found:
            yield found


async def find(settings: Settings) -> FoundEngine:
    """Return the engine of the settings, probed; say which one it is where nobody named it."""
    # Here and not above: the HTTP client takes 0.2 s to load, and most commands need none.
    from llmq.workers.engines.discovery import find_engine

    found = await find_engine(
        settings.engine,
        api_key=_api_key(settings),
        max_answer_bytes=settings.max_answer_bytes,
        idle_timeout=settings.engine_idle_timeout,
    )
    if found.note:
        notice(f"note: {found.note}")
    return found


@asynccontextmanager
async def _started(settings: Settings, start: EngineStart, shutdown: Shutdown) -> AsyncIterator[FoundEngine]:
    from llmq.workers.engines import gpu_lock
    from llmq.workers.engines.discovery import FoundEngine
    from llmq.workers.engines.http import HttpEngine
    from llmq.workers.engines.launch import gpus
    from llmq.workers.engines.managed import ManagedEngine

    launch = _launch(settings, start)
    held: list[int] = []
    if start.serve is not None:  # a local model may share its GPU, or have none
        held = await _unless_asked(gpu_lock.take(settings.home / "locks", gpus(start.gpu)), shutdown)
    http = HttpEngine(
        launch.url,
        api_key=launch.api_key,
        max_answer_bytes=settings.max_answer_bytes,
        idle_timeout=settings.engine_idle_timeout,
    )
    engine = ManagedEngine(launch, http, notice, log=_log(settings, start), held=held)
    try:
        info = await _unless_asked(engine.start(), shutdown)
        yield FoundEngine(engine, info)
    finally:
        await engine.close()
        gpu_lock.release(held)


def _launch(settings: Settings, start: EngineStart) -> Launch:
    from llmq.workers.engines.launch import launch_of_command
    from llmq.workers.engines.local import launch_of_local

    if start.serve is None:
        return launch_of_local(settings.engine or "", start.gpu)
    return launch_of_command(start.serve, start.gpu, settings.engine, _api_key(settings))


def _is_local(settings: Settings) -> bool:
    return (settings.engine or "").startswith("local:")


def _api_key(settings: Settings) -> str | None:
    return settings.engine_api_key.get_secret_value() if settings.engine_api_key else None


def _log(settings: Settings, start: EngineStart) -> Path | None:
    """Return the file for what the engine prints, in a folder that exists; None is stderr."""
    from llmq.workers.engines.gpu_lock import file_name

    if start.log == ON_STDERR:
        return None
    ending = "local.log" if start.serve is None else "engine.log"
    log = Path(start.log) if start.log else settings.home / "logs" / file_name(start.gpu, ending)
    try:
        log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        log.open("ab").close()
    except OSError as error:
        raise UsageError(
            f"cannot write the engine's log {log} ({error.strerror}): name another, or - for stderr: --serve-log -"
        ) from None
    return log.absolute()


async def _unless_asked(work: Coroutine[Any, Any, T], shutdown: Shutdown) -> T:
    """Return the result of `work`; raises StoppedEarly where somebody asks to stop first."""
    working, asked = asyncio.create_task(work), asyncio.create_task(shutdown.quiet())
    try:
        await asyncio.wait([working, asked], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise StoppedEarly("interrupted before the engine was ready; nothing was claimed")
        return working.result()
    finally:
        for task in (working, asked):
            task.cancel()
        await asyncio.wait([working, asked])
