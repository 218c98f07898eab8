"""Queueing a checked file: into its batch with a progress bar, and a word on who is going to serve it."""

from __future__ import annotations

import asyncio

from llmq.cli.errors import Interrupted
from llmq.cli.progress import Meter, meter
from llmq.cli.render import command, notice, warn
from llmq.cli.session import where_options, worker_command
from llmq.scheduler.batch_record import RESULTS_NOT_COLLECTED, BatchRecord
from llmq.scheduler.batches import Batches
from llmq.scheduler.errors import LLMQError
from llmq.scheduler.feeding import FeedProgress, FeedState
from llmq.scheduler.fleet import SILENT, read_workers
from llmq.scheduler.lines import Checked, InputFile, read_lines
from llmq.scheduler.outage import REDIS_ERRORS
from llmq.scheduler.queue import Queue
from llmq.scheduler.settings import Loaded

#: What a body may say instead of a model's name: the first one of the engine is meant.
ANY_MODEL = "default"

#: Between two looks at why a file waits.
_LOOK_S = 5.0

#: Names of models that a warning lists.
_NAMES_SHOWN = 5


async def feed(
    batches: Batches,
    record: BatchRecord,
    file: InputFile,
    checked: Checked,
    *,
    wait: bool,
    again: str,
    loaded: Loaded,
) -> None:
    """Queue what the batch does not have yet, and seal it. Raises Interrupted, with the command that goes on."""
    if record.sealed:
        return
    lines = read_lines(file, checked, after=record.next_line - 1)
    watching = asyncio.create_task(_say_uncollected(batches, record.id, loaded))
    try:
        with meter("queueing", total=checked.lines, begin=record.lines) as shown:
            await batches.feed(record.id, lines, wait=wait, on_progress=lambda now: show(shown, now))
    except asyncio.CancelledError:
        raise Interrupted(f"interrupted; what was queued runs. Queue the rest: {again}") from None
    finally:
        watching.cancel()


async def _say_uncollected(batches: Batches, batch_id: str, loaded: Loaded) -> None:
    """Say once what to do when the file waits for lines that wait themselves, for somebody to take the results."""
    while True:
        await asyncio.sleep(_LOOK_S)
        try:
            reason = (await batches.show(batch_id)).reason
        except (LLMQError, *REDIS_ERRORS):
            continue  # who feeds says what is wrong
        if reason == RESULTS_NOT_COLLECTED:
            collect = command("llmq", "batch", "results", batch_id, *where_options(loaded), "-o", "results.jsonl", "-f")
            notice(f"note: the batch waits, because Redis is to hold no more results; take them away: {collect}")
            return


def show(shown: Meter, progress: FeedProgress) -> None:
    """Move a meter to where a feed is, with what it waits for."""
    waits = progress.state not in (FeedState.QUEUEING, FeedState.SEALED)
    shown.update(progress.lines, note=progress.state.value if waits else "")


async def say_who_serves(queue: Queue, models: frozenset[str], loaded: Loaded) -> None:
    """Warn of models that no worker lists; note when there is no worker, and when one is simulated."""
    alive = [worker for worker in await read_workers(queue) if worker.state != SILENT]
    if not alive:
        serve = worker_command(loaded, queue.name)
        notice(f"note: no worker serves queue {queue.name} now; lines wait until one does: {serve}")
        return
    if any(worker.simulated for worker in alive):
        notice(f"note: queue {queue.name} has a simulated engine: its answers are noise")
    listed = {model for worker in alive for model in worker.models}
    if unknown := sorted(models - listed - {ANY_MODEL}):
        warn(
            f"no worker of queue {queue.name} lists {'the model' if len(unknown) == 1 else 'the models'} "
            f"{_names(unknown)} (listed: {_names(sorted(listed)) or 'none'}); an engine that does not know a model "
            "answers 404, and that is the line's result"
        )


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(repr(name) for name in names[:_NAMES_SHOWN]) + more
