"""Metric families: how totals, durations and gauges are written for Prometheus.

Three kinds of process tell metrics, and their names say whose: `llmq_` is the whole queue (any gateway tells it),
`llmq_worker_` one worker, `llmq_gateway_` one gateway. So no sum counts anything twice. Families are made when they are
asked for, of values that were read for it: nothing is kept that could go stale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from llmq.scheduler.histogram import Histogram
from llmq.scheduler.measures import QUANTILES, WINDOW_S, Figures
from llmq.scheduler.totals import COUNTERS, HISTOGRAMS

QUEUE, WORKER, GATEWAY = "llmq_", "llmq_worker_", "llmq_gateway_"

#: What one sample is: the values of its labels, and its own.
Samples = Iterable[tuple[Sequence[str], float]]


class Families:
    """Makes families whose names begin with `prefix` and whose first label is the queue."""

    def __init__(self, prefix: str, queue: str) -> None:
        self._prefix = prefix
        self._queue = queue

    def gauge(self, name: str, meaning: str, labels: Sequence[str], samples: Samples) -> Metric:
        """Return a gauge; without samples it is announced and empty: there is no value that nobody has measured."""
        family = GaugeMetricFamily(self._prefix + name, meaning, labels=("queue", *labels))
        for values, number in samples:
            family.add_metric((self._queue, *values), number)
        return family

    def one(self, name: str, meaning: str, number: float | None) -> Metric:
        """Return a gauge of one number; None is not known."""
        return self.gauge(name, meaning, (), [] if number is None else [((), number)])

    def counter(self, name: str, meaning: str, labels: Sequence[str], samples: Samples) -> Metric:
        """Return a counter; `_total` is added to its name."""
        family = CounterMetricFamily(self._prefix + name, meaning, labels=("queue", *labels))
        for values, number in samples:
            family.add_metric((self._queue, *values), number)
        return family

    def totals(self, totals: Mapping[str, int]) -> Iterator[Metric]:
        """Yield all that `totals.py` names; what was not counted yet is there as 0."""
        for counter in COUNTERS:
            samples = ((values, totals.get(field, 0)) for values, field in counter.series())
            yield self.counter(counter.name, counter.meaning, tuple(counter.labels), samples)
        for buckets in HISTOGRAMS:
            family = HistogramMetricFamily(self._prefix + buckets.name, buckets.meaning, labels=("queue",))
            pairs, total_s = buckets.read(totals)
            family.add_metric((self._queue,), pairs, total_s)
            yield family

    def figures(self, figures: Figures) -> Iterator[Metric]:
        """Yield the percentiles of chat, and what batch did, over the last five minutes."""
        minutes = f"over the last {WINDOW_S / 60:.0f} minutes"
        for name, meaning, histogram in (
            ("interactive_queue_wait", "From submit to start of interactive jobs", figures.wait),
            ("interactive_first_token", "From submit to first token of interactive jobs", figures.first),
            ("interactive_total", "From submit to the end of interactive jobs", figures.total),
        ):
            yield self.gauge(f"{name}_quantile_seconds", f"{meaning}, {minutes}.", ("quantile",), _quantiles(histogram))
        yield self.one(
            "batch_throughput_per_second", f"Batch lines that were answered a second, {minutes}.",
            figures.throughput_per_s,
        )  # fmt: skip
        yield self.one(
            "batch_queue_wait_mean_seconds", f"Mean time of batch jobs from queued to start, {minutes}.",
            figures.batch_wait.mean,
        )  # fmt: skip


class Collected(Collector):
    """Families that `make` makes at each scrape."""

    def __init__(self, make: Callable[[], Iterable[Metric]]) -> None:
        self._make = make

    def collect(self) -> Iterable[Metric]:
        """Return the families of this moment."""
        return self._make()


def exposition(collectors: Iterable[Collector], accept: str = "") -> tuple[bytes, str]:
    """Return the text of all families, and its content type: OpenMetrics where `accept` asks for it."""
    encode, content_type = choose_encoder(accept)
    chain = Collected(lambda: [family for collector in collectors for family in collector.collect()])
    return encode(chain), content_type


def _quantiles(histogram: Histogram) -> Iterator[tuple[tuple[str], float]]:
    for share in QUANTILES.values():
        if (value := histogram.quantile(share)) is not None:
            yield (f"{share:g}",), value
