"""`llmq status` and `llmq workers`: what a queue and its workers are doing now."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from llmq.cli.options import Json, Queue, RedisUrl
from llmq.cli.progress import format_rate, format_time
from llmq.cli.render import count_of, notice, print_facts, print_json, print_line, print_table
from llmq.cli.running import run_async
from llmq.cli.session import load, open_session, worker_command
from llmq.scheduler.fleet import WorkerStatus, read_workers
from llmq.scheduler.inspect import ClassStatus, QueueStatus, read_status
from llmq.scheduler.measures import Figures
from llmq.scheduler.settings import Loaded, Settings
from llmq.scheduler.totals import DEAD, ENGINE_FAULTS, LEASES_LOST, RECLAIMED, RETRIES, STALE, sums
from llmq.scheduler.units import format_count, format_size

#: Totals that are faults, each with what it is called: a noun that is counted, or a word that follows the number.
_FAULTS = (
    (RETRIES, "", "retried"),
    (RECLAIMED, "", "reclaimed"),
    (LEASES_LOST, "lost lease", ""),
    (STALE, "stale outcome", ""),
    (ENGINE_FAULTS, "engine error", ""),
    (DEAD, "dead letter", ""),
)

#: Names of models of a worker that a table has room for.
_MODELS_SHOWN = 2


def status(queue: Queue = None, redis: RedisUrl = None, json: Json = False) -> None:
    """Show what waits and runs in a queue, and how fast.

    \b
    Examples:
      llmq status
      llmq top --queue llama-70b
      llmq status --json | jq .latency
    """
    loaded = load(queue=queue, redis_url=redis)
    found = run_async(lambda: _read_status(loaded.settings))
    if json:
        print_json(found.to_json())
        return
    print_line(f"queue {found.queue}")
    print_line()
    print_figures(found)
    print_line()
    _print_workers(found.workers, loaded)


def workers(queue: Queue = None, redis: RedisUrl = None, json: Json = False) -> None:
    """List the workers of a queue.

    \b
    Example:
      llmq workers --json
    """
    loaded = load(queue=queue, redis_url=redis)
    found = run_async(lambda: _read_workers(loaded.settings))
    if json:
        print_json({"queue": loaded.settings.queue, "workers": [worker.to_json() for worker in found]})
    else:
        _print_workers(found, loaded)


def print_figures(found: QueueStatus) -> None:
    """Print what waits and runs, and how fast: all of a status but its workers."""
    classes = {"interactive": found.interactive, "batch": found.batch}
    print_table(
        ["class", "waiting>", "running>", "delayed>", "dead>", "oldest waits>"],
        [_class_row(name, figures) for name, figures in classes.items()],
    )
    print_line()
    print_facts(_facts(found))


def print_workers(found: Sequence[WorkerStatus]) -> None:
    """Print a line for each worker, and what sets the cap of those that go by an objective."""
    columns = ["worker", "gpu", "state", "busy>", "slots>", "cap>", "governor", "engine", "models", "seen>"]
    print_table(columns, [_worker_row(worker) for worker in found])
    if governed := [worker for worker in found if worker.governor not in ("", "fixed")]:
        print_line()
        print_facts({worker.id: worker.governor_why for worker in governed})


async def _read_status(settings: Settings) -> QueueStatus:
    async with open_session(settings) as session:
        return await read_status(session.queue)


async def _read_workers(settings: Settings) -> list[WorkerStatus]:
    async with open_session(settings) as session:
        return await read_workers(session.queue)


def _class_row(name: str, figures: ClassStatus) -> list[str]:
    dead = "?" if figures.dead is None else format_count(figures.dead)
    oldest = "-" if figures.oldest_wait_s is None else format_time(figures.oldest_wait_s)
    counts = (figures.waiting, figures.running, figures.delayed)
    return [name, *map(format_count, counts), dead, oldest]


def _facts(found: QueueStatus) -> dict[str, str]:
    figures = found.figures
    throughput = figures.throughput_per_s
    batch = "" if throughput is None else f"{format_rate(throughput)}/s, {figures.batch_failed:,} failed"
    latency = figures.latency()
    return {
        "rate": _rate(found),
        "paused": ", ".join(cls.value for cls in found.paused),
        "batch": batch + (_preempted(figures) if batch else ""),
        "chat waits": _quantiles(latency["queue_wait_s"]),
        "first token": _quantiles(latency["ttft_s"]),
        "chat takes": _quantiles(latency["total_s"]),
        "batch waits": _mean(figures.batch_wait.mean),
        "faults": _faults(found.totals),
        "objective": _objective(found),
        "results": f"{format_size(found.results_bytes)} held" if found.results_bytes else "",
    }


def _preempted(figures: Figures) -> str:
    if not figures.preempted:
        return ""
    fates = ((figures.kept_tokens, "kept"), (figures.wasted_tokens, "wasted"))
    tokens = ", ".join(f"{count_of(count, 'token')} {fate}" for count, fate in fates if count)
    return f", {figures.preempted:,} preempted" + (f" ({tokens})" if tokens else "")


def _objective(found: QueueStatus) -> str:
    asked = found.objective
    goals = [
        f"{what} p95 under {_milliseconds(limit)}"
        for what, limit in (("first token", asked.ttft_p95_s), ("between tokens", asked.itl_p95_s))
        if limit is not None
    ]
    yields = "; far over it in the whole fleet: batch yields" if asked.yields else ""
    return ", ".join(goals) + yields if goals else ""


def _rate(found: QueueStatus) -> str:
    bucket = found.bucket
    if not bucket.open:
        return "closed by windows: no batch starts now"
    if bucket.limit is None:
        return "off (no limit)"
    held = "" if bucket.tokens is None else f"; {bucket.tokens:,.1f} saved up now"
    waited = f"; found empty {count_of(bucket.exhausted, 'time')}" if bucket.exhausted else ""
    if bucket.wait_s is not None:
        waited += f", {_milliseconds(bucket.wait_s)} of waiting each"
    return f"{bucket.limit}{held}{waited}"


def _mean(seconds: float | None) -> str:
    return "" if seconds is None else f"{_milliseconds(seconds)} in the queue, on average"


def _faults(totals: Mapping[str, int]) -> str:
    """Name what went wrong since the queue began; what never did is left out."""
    counted = sums(totals)
    return ", ".join(
        count_of(counted[counter.name], noun) if noun else f"{counted[counter.name]:,} {word}"
        for counter, noun, word in _FAULTS
        if counted[counter.name]
    )


def _quantiles(found: dict[str, float | int | None]) -> str:
    if found["p50"] is None:
        return ""
    shares = ", ".join(f"{name} {_milliseconds(found[name])}" for name in ("p50", "p95", "p99"))
    return f"{shares} (of {found['count']:,})"


def _milliseconds(seconds: float | int | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds * 1000:.0f} ms" if seconds < 10 else format_time(seconds)


def _print_workers(found: Sequence[WorkerStatus], loaded: Loaded) -> None:
    if not found:
        queue = loaded.settings.queue
        notice(no_workers(loaded, queue))
    else:
        print_workers(found)


def no_workers(loaded: Loaded, queue: str) -> str:
    """Return what to say of a queue that nobody serves."""
    return f"queue {queue} has no workers; start one for each GPU: {worker_command(loaded, queue)}"


def _worker_row(worker: WorkerStatus) -> list[str]:
    models = ", ".join(worker.models[:_MODELS_SHOWN])
    return [
        worker.id,
        worker.gpu,
        worker.state,
        f"{worker.busy:,}",
        f"{worker.slots:,}",
        f"{worker.batch_cap:,}",
        worker.governor or "-",
        f"{worker.engine} (simulated)" if worker.simulated and worker.engine != "sim" else worker.engine,
        models + (", ..." if len(worker.models) > _MODELS_SHOWN else ""),
        format_time(worker.last_seen_s),
    ]
