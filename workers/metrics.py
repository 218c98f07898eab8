"""A worker's metrics: what this one counts, told to Prometheus by a small HTTP server of its own.

The server answers in threads: a scrape needs neither the event loop nor Redis, so a worker that hangs can still be
looked at. Everything is read at the scrape.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.metrics_core import Metric

from llmq.scheduler.errors import UsageError
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.metric_families import WORKER, Collected, Families
from llmq.workers.card import Card
from llmq.workers.contact import Contact
from llmq.workers.measuring import Measuring
from llmq.workers.slots import Slots, count_interactive

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class MetricsAddress:
    """Where a worker tells its metrics; port 0 is any that is free."""

    port: int
    host: str = LOOPBACK


@dataclass(frozen=True, slots=True)
class WorkerMetrics:
    """What the metrics of a worker are read from."""

    card: Card
    slots: Slots
    measuring: Measuring
    contact: Contact

    def families(self) -> Iterator[Metric]:
        """Yield the families of this moment; a thread calls this."""
        card, slots = self.card, self.slots
        families = Families(WORKER, card.queue)
        about = {
            "worker": card.worker_id, "gpu": card.gpu, "engine": card.engine.kind, "state": card.state,
            "version": card.version,
        }  # fmt: skip
        yield families.gauge("info", "Which worker this is; always 1.", tuple(about), [(tuple(about.values()), 1.0)])
        yield families.one(
            "redis_up", "Whether Redis was reached within half a lease.", float(self.contact.unbroken() > 0)
        )
        yield families.one("engine_up", "Whether the engine is there.", float(card.state != "engine_down"))
        yield families.one("slots", "Requests that it runs at once at most.", slots.concurrency)
        running = slots.running()
        chat = count_interactive(running)
        busy = (((cls.value,), n) for cls, n in zip(TrafficClass, (chat, len(running) - chat), strict=True))
        yield families.gauge("slots_busy", "Slots that are in use.", ("class",), busy)
        yield families.one("batch_cap", "Batch requests that it runs at once at most, now.", slots.batch_limit)
        yield families.one(
            "last_claim_timestamp_seconds",
            "When it last claimed with success, by its own clock; empty: not yet.",
            slots.desk.claimed_at or None,
        )
        yield from families.figures(self.measuring.figures())
        yield from families.totals(self.measuring.totals())


@contextlib.contextmanager
def metrics_served(metrics: WorkerMetrics, address: MetricsAddress, announce: Callable[[str], None]) -> Iterator[None]:
    """Tell the metrics within the block, and say where. Raises UsageError where the address cannot be had."""
    registry = CollectorRegistry()
    registry.register(Collected(metrics.families))
    ProcessCollector(registry=registry)
    try:
        server, thread = start_http_server(address.port, address.host, registry)
    except OSError as error:
        taken = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be had ({error.strerror or error})"
        raise UsageError(
            f"--metrics-port: {address.host}:{address.port} {taken}; choose another, or 0 for any that is free"
        ) from None
    try:
        announce(f"metrics http://{address.host}:{server.server_port}/metrics")
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)
