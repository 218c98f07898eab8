"""Measures: what a worker counts, its snapshot in a heartbeat, and the fleet's figures made of many."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq.scheduler.histogram import Histogram
from llmq.scheduler.measures import WINDOW_S, Measures, merge


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def histogram(*seconds: float) -> Histogram:
    """Return a histogram of these durations."""
    made = Histogram()
    for value in seconds:
        made.record(value)
    return made


@given(st.lists(st.floats(0.002, 100_000), min_size=1, max_size=200), st.sampled_from([0.5, 0.95, 0.99, 1.0]))
def test_a_quantile_is_within_5_percent(values: list[float], share: float) -> None:
    """Whatever was recorded: the answer is as near as a bucket is wide."""
    exact = sorted(values)[max(1, -(-int(share * 1000) * len(values) // 1000)) - 1]
    assert histogram(*values).quantile(share) == pytest.approx(exact, rel=0.05)


@given(st.lists(st.floats(0, 1e7), max_size=50))
def test_a_histogram_comes_back_from_its_text(values: list[float]) -> None:
    """A heartbeat carries it as text."""
    made = histogram(*values)
    read = Histogram.from_text(made.to_text())
    assert made.count == read.count
    assert [made.quantile(share) for share in (0.5, 0.99)] == [read.quantile(share) for share in (0.5, 0.99)]
    assert read.total_s == pytest.approx(made.total_s, abs=1e-5)


def test_the_whole_of_two_is_as_if_one_had_counted_all() -> None:
    """Percentiles cannot be averaged; counts can be added."""
    values = [random.Random(1).expovariate(1) for _ in range(1000)]
    whole = histogram(*values[:300])
    whole.add(histogram(*values[300:]))
    assert histogram(*values).to_text().split()[1:] == whole.to_text().split()[1:]


def test_nothing_counted_has_no_quantile() -> None:
    """No figure is made up where nothing was measured."""
    assert None is Histogram().quantile(0.5)
    assert None is Histogram().mean
    assert "" == Histogram().to_text()


def test_a_negative_duration_counts_as_none() -> None:
    """Clocks of two hosts differ by some milliseconds."""
    assert 0.0 == histogram(-0.5).quantile(0.5)


@pytest.mark.parametrize("text", ["x", "1.0 a:b", "1.0 3", "1.0 3:x"])
def test_other_text_is_refused(text: str) -> None:
    """Only what `to_text` writes is read."""
    with pytest.raises(ValueError, match=r"."):
        Histogram.from_text(text)


def test_only_the_last_five_minutes_count() -> None:
    """What is older is forgotten, in steps of 10 s."""
    clock = Clock()
    measures = Measures(clock)
    measures.interactive_started(1.0)
    clock.now += WINDOW_S - 1
    measures.interactive_started(2.0)
    assert 2 == measures.figures().wait.count
    clock.now += 1
    assert 1 == measures.figures().wait.count
    clock.now += WINDOW_S
    assert 0 == measures.figures().wait.count


def test_figures_of_a_fleet() -> None:
    """Counts and histograms add up; each worker's throughput is over the window that it has measured."""
    clock = Clock()
    old, young = Measures(clock), Measures(clock)
    clock.now += 100
    for seconds in (0.1, 0.2, 0.3):
        old.interactive_started(seconds)
        old.first_token(seconds + 1)
        old.interactive_ended(seconds + 2)
    for _ in range(50):
        old.batch_ended(ok=True)
    old.batch_ended(ok=False)
    old.batch_started(4.0)
    young.batch_ended(ok=True)
    young.preempted()
    figures = merge([old.snapshot(), young.snapshot(), {}, {"m.window_s": "x"}])
    assert (51, 1, 1) == (figures.batch_done, figures.batch_failed, figures.preempted)
    assert figures.throughput_per_s == pytest.approx(0.51)
    assert figures.batch_wait.mean == pytest.approx(4.0)
    latency = figures.latency()
    assert latency["queue_wait_s"]["p50"] == pytest.approx(0.2, rel=0.05)
    assert latency["ttft_s"]["p99"] == pytest.approx(1.3, rel=0.05)
    assert 3 == latency["total_s"]["count"]


def test_a_fleet_that_measured_nothing_has_nulls() -> None:
    """`status --json` shows null, not 0: nobody waited 0 seconds."""
    figures = merge([])
    assert None is figures.throughput_per_s
    assert {"p50": None, "p95": None, "p99": None, "count": 0} == figures.latency()["queue_wait_s"]


def test_a_snapshot_is_small() -> None:
    """It is written with every heartbeat: a busy worker's is some kilobytes."""
    measures = Measures(Clock())
    rng = random.Random(1)
    for _ in range(10_000):
        measures.interactive_started(rng.lognormvariate(-3, 2))
        measures.first_token(rng.lognormvariate(-1, 2))
    assert 4096 > sum(len(name) + len(value) for name, value in measures.snapshot().items())
