"""The metrics of a whole queue, of what `read_status` has read at the scrape; every gateway of it tells the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from llmq.scheduler.fleet import WorkerStatus
from llmq.scheduler.inspect import QueueStatus
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.metric_families import QUEUE, Families

#: States of a worker, so that each is there as 0 (see WorkerStatus).
_STATES = ("starting", "ready", "draining", "engine_down", "silent")


def queue_families(queue: str, status: QueueStatus | None) -> Iterator[Metric]:
    """Yield the families of a queue; where it could not be read, only that."""
    families = Families(QUEUE, queue)
    yield families.one("up", "Whether the queue could be read: Redis answered in time.", 0.0 if status is None else 1.0)
    if status is None:
        return
    yield from families.figures(status.figures)
    yield from _bucket(families, status)
    yield from _jobs(families, status)
    yield from families.totals(status.totals)
    yield from _workers(families, status.workers, status.at)


def _bucket(families: Families, status: QueueStatus) -> Iterator[Metric]:
    bucket = status.bucket
    limit = bucket.limit
    yield families.counter(
        "bucket_exhausted", "Times that batch found the bucket empty and had to wait.", (), [((), bucket.exhausted)]
    )
    yield families.counter(
        "bucket_wait_seconds", "Time that batch has waited for a token, all of it.", (), [((), bucket.waited_s)]
    )
    yield families.one("bucket_wait_mean_seconds", "Mean wait of batch for a token.", bucket.wait_s)
    yield families.one("bucket_tokens", "What the bucket holds; empty where there is no limit.", bucket.tokens)
    yield families.one("bucket_burst", "What it holds at most.", limit.burst if limit else None)
    rate = [((limit.rate.unit,), limit.rate.per_second)] if limit else []
    yield families.gauge("bucket_rate_per_second", "What it gains: jobs, or LLM tokens (tok).", ("unit",), rate)
    asked = {"ttft_p95": status.objective.ttft_p95_s, "itl_p95": status.objective.itl_p95_s}
    objectives = [((name,), seconds) for name, seconds in asked.items() if seconds is not None]
    yield families.gauge("chat_objective_seconds", "What chat shall see, where it is set.", ("objective",), objectives)
    yield families.one(
        "batch_yields", "Whether no batch starts because chat misses it.", float(status.objective.yields)
    )
    yield families.one("batch_open", "Whether windows let batch start now.", float(bucket.open))


def _jobs(families: Families, status: QueueStatus) -> Iterator[Metric]:
    classes = {TrafficClass.INTERACTIVE: status.interactive, TrafficClass.BATCH: status.batch}
    counts = (
        ((cls.value, state), number)
        for cls, found in classes.items()
        for state, number in (("waiting", found.waiting), ("running", found.running), ("delayed", found.delayed))
    )
    yield families.gauge("jobs", "Jobs in the queue.", ("class", "state"), counts)
    oldest = (((cls.value,), found.oldest_wait_s or 0.0) for cls, found in classes.items())
    yield families.gauge("oldest_wait_seconds", "Age of the job that waits longest; 0: none waits.", ("class",), oldest)
    paused = (((cls.value,), float(cls in status.paused)) for cls in TrafficClass)
    yield families.gauge("paused", "Whether jobs of the class may not start.", ("class",), paused)
    yield families.one("dead_letters", "Dead letters that are kept.", status.dead)
    yield families.one("lanes", "Batches, and tenants' single jobs, that are not done.", status.lanes)
    yield families.one("results_bytes", "Bytes of batch results that Redis holds.", status.results_bytes)


def _workers(families: Families, workers: tuple[WorkerStatus, ...], now: float) -> Iterator[Metric]:
    found = Counter(worker.state for worker in workers)
    states = (((state,), found.get(state, 0)) for state in _STATES)
    yield families.gauge("workers", "Workers by state.", ("state",), states)
    slots = (((worker.id,), worker.slots) for worker in workers)
    yield families.gauge("slots", "Slots of a worker.", ("worker",), slots)
    busy = (
        ((worker.id, cls.value), number)
        for worker in workers
        for cls, number in zip(TrafficClass, (worker.busy_interactive, worker.busy_batch), strict=True)
    )
    yield families.gauge("slots_busy", "Slots of a worker that are in use.", ("worker", "class"), busy)
    claims = (((worker.id,), now - worker.claimed_s) for worker in workers)
    yield families.gauge(
        "last_claim_timestamp_seconds",
        "When a worker last claimed with success (or started, if it has not yet), by Redis' clock.",
        ("worker",),
        claims,
    )
