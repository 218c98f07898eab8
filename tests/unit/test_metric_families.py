"""The metrics of a queue: types, names and values, in both formats; nothing is made up where nothing was measured."""

from __future__ import annotations

import pytest

from llmq.scheduler.bucket import Bucket
from llmq.scheduler.fleet import worker_of
from llmq.scheduler.inspect import ChatObjective, ClassStatus, QueueStatus
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.limit import Limit
from llmq.scheduler.measures import Figures
from llmq.scheduler.metric_families import Collected, exposition
from llmq.scheduler.queue_metrics import queue_families
from llmq.scheduler.totals import CHAT_FIRST, JOBS_ENDED, LEASES_LOST, Totals
from llmq.scheduler.units import Rate
from tests.metric_text import Scrape

NOW = 1_000_000.0


def busy() -> QueueStatus:
    """Return a queue with something of everything."""
    figures = Figures(window_s=300.0, batch_done=30, throughput_per_s=0.1)
    for seconds in (0.01, 0.01, 0.01, 2.0):
        figures.wait.record(seconds)
        figures.first.record(seconds + 0.1)
        figures.total.record(seconds + 1)
    figures.batch_wait.record(40.0)
    counted = Totals()
    counted.observe(CHAT_FIRST, 0.2)
    counted.count(JOBS_ENDED, "batch", "completed", by=30)
    counted.count(LEASES_LOST, by=2)
    heartbeat = {"id": "w1", "state": "ready", "slots": "8", "busy_i": "1", "busy_b": "5", "seen_at": "9000",
                 "claimed_at": "4000"}  # fmt: skip
    return QueueStatus(
        queue="q",
        at=NOW,
        interactive=ClassStatus(3, 1, 0, 0, 0.5),
        batch=ClassStatus(100, 5, 2, None, 900.0),
        dead=4,
        bucket=Bucket(Limit.of(Rate(2.0), 4.0), 1.5, 7, 0.5, None, 3.5),
        paused=(TrafficClass.BATCH,),
        figures=figures,
        workers=(worker_of(heartbeat, NOW * 1000 - 1000, round(NOW * 1000), 10.0),),
        lanes=2,
        lanes_cut=False,
        results_bytes=1234,
        totals=counted.read(),
        objective=ChatObjective(ttft_p95_s=2.0, yields=True),
    )


def scrape(status: QueueStatus | None, accept: str = "") -> Scrape:
    """Return what a monitoring system would read."""
    text, _ = exposition([Collected(lambda: queue_families("q", status))], accept)
    return Scrape(text.decode())


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_both_formats_keep_the_rules(accept: str) -> None:
    """Each family has a type and a meaning, base units, `_total` on counters alone, and no sample comes twice."""
    found = scrape(busy(), accept)
    assert [] == found.faults()
    assert "counter" == found.kinds["llmq_jobs_ended"]
    assert "histogram" == found.kinds["llmq_interactive_queue_wait_seconds"]
    assert "gauge" == found.kinds["llmq_jobs"]


def test_the_three_that_matter_most_come_first() -> None:
    """Percentiles of chat, what batch does, and the bucket, right after whether the queue could be read."""
    names = list(scrape(busy()).kinds)
    assert [
        "llmq_up",
        "llmq_interactive_queue_wait_quantile_seconds",
        "llmq_interactive_first_token_quantile_seconds",
        "llmq_interactive_total_quantile_seconds",
        "llmq_batch_throughput_per_second",
        "llmq_batch_queue_wait_mean_seconds",
        "llmq_bucket_exhausted",
        "llmq_bucket_wait_seconds",
        "llmq_bucket_wait_mean_seconds",
    ] == names[:9]


def test_the_values_are_the_queue_s() -> None:
    """What `llmq status` shows, sample by sample."""
    found = scrape(busy())
    assert 1 == found.value("llmq_up", queue="q")
    wait = "llmq_interactive_queue_wait_quantile_seconds"
    assert (0.01, 2.0) == pytest.approx(
        (found.value(wait, quantile="0.5"), found.value(wait, quantile="0.99")), rel=0.06
    )
    assert (0.1, 40.0) == (
        found.value("llmq_batch_throughput_per_second"), found.value("llmq_batch_queue_wait_mean_seconds")
    )  # fmt: skip
    assert (7, 3.5, 0.5, 1.5, 4.0) == tuple(
        found.value(f"llmq_bucket_{name}")
        for name in ("exhausted_total", "wait_seconds_total", "wait_mean_seconds", "tokens", "burst")
    )
    assert 2.0 == found.value("llmq_bucket_rate_per_second", unit="job")
    assert 100 == found.value("llmq_jobs", **{"class": "batch", "state": "waiting"})
    assert 900.0 == found.value("llmq_oldest_wait_seconds", **{"class": "batch"})
    assert (0, 1) == tuple(found.value("llmq_paused", **{"class": cls}) for cls in ("interactive", "batch"))
    assert (4, 1234, 2) == tuple(found.value(f"llmq_{name}") for name in ("dead_letters", "results_bytes", "lanes"))
    assert (1, 0) == tuple(found.value("llmq_workers", state=state) for state in ("ready", "silent"))
    assert (8, 1, 5) == (
        found.value("llmq_slots", worker="w1"),
        found.value("llmq_slots_busy", worker="w1", **{"class": "interactive"}),
        found.value("llmq_slots_busy", worker="w1", **{"class": "batch"}),
    )
    assert (2.0, 1) == (
        found.value("llmq_chat_objective_seconds", objective="ttft_p95"),
        found.value("llmq_batch_yields"),
    )
    assert NOW - 6 == found.value("llmq_last_claim_timestamp_seconds", worker="w1")
    assert (30, 2) == (
        found.value("llmq_jobs_ended_total", **{"class": "batch", "outcome": "completed"}),
        found.value("llmq_leases_lost_total"),
    )
    first = "llmq_interactive_first_token_seconds"
    assert (0, 1, 1, 0.2) == (
        found.value(f"{first}_bucket", le="0.1"),
        found.value(f"{first}_bucket", le="0.25"),
        found.value(f"{first}_count"),
        found.value(f"{first}_sum"),
    )


def test_what_was_never_counted_is_there_as_0() -> None:
    """A series that begins with its first event hides that event from `rate`."""
    found = scrape(busy())
    assert 0 == found.value("llmq_stale_outcomes_total")
    assert 10 == len(found.values("llmq_jobs_ended_total"))
    assert 0 == found.value("llmq_batch_queue_wait_seconds_count")


def test_nothing_is_made_up() -> None:
    """No chat, no batch, no limit: their gauges have no sample, and 0 would be a lie."""
    empty = scrape(QueueStatus("q", NOW, ClassStatus(), ClassStatus(), 0, Bucket(None, None, 0, None, None), (),
                               Figures(), (), 0, False, 0, {}, ChatObjective()))  # fmt: skip
    for name in (
        "interactive_queue_wait_quantile_seconds",
        "batch_throughput_per_second",
        "batch_queue_wait_mean_seconds",
        "bucket_wait_mean_seconds",
        "bucket_tokens",
        "bucket_rate_per_second",
    ):
        assert [] == empty.values(f"llmq_{name}"), name
    assert [] == empty.faults()


def test_a_queue_that_cannot_be_read_says_only_that() -> None:
    """No gauge is frozen at its last value (F-046)."""
    found = scrape(None)
    assert (["llmq_up"], 0) == (list(found.kinds), found.value("llmq_up", queue="q"))


def test_no_label_is_anything_that_callers_choose() -> None:
    """Labels are the queue, classes, states and workers: never a tenant, a key or a model."""
    labels = {name for sample in scrape(busy()).samples for name in sample.labels}
    expected = {"queue", "class", "state", "outcome", "reason", "kind", "unit", "quantile", "le", "worker",
            "objective", "fate"}  # fmt: skip
    assert expected == labels
