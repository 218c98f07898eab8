"""Totals: what is counted, how durations fall into buckets, and what a worker's outcomes add to them."""

from __future__ import annotations

import pytest

from llmq.scheduler import totals as table
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.lease import (
    Abandoned,
    Answered,
    Ended,
    ErrorCode,
    Fence,
    HandedBack,
    Lease,
    Outcome,
    Reason,
    Retry,
    Usage,
    Why,
)
from llmq.scheduler.totals import CHAT_WAIT, COUNTERS, HISTOGRAMS, RETRIES, Totals, read_totals, sums
from llmq.workers.measuring import Measuring


def lease(cls: TrafficClass = TrafficClass.BATCH) -> Lease:
    """Return a lease of a class."""
    return Lease(Fence("batch:b", "1-0", 1), cls, Why.BUCKET, "t", "k", b"", 1)


def test_a_total_only_grows() -> None:
    """Nothing counts backwards, whatever it is told."""
    totals = Totals()
    totals.count(RETRIES, "batch")
    totals.count(RETRIES, "batch", by=-5)
    totals.count(RETRIES, "batch", by=2)
    assert {"retries|batch": 3} == totals.read()


def test_a_duration_is_in_the_first_bucket_that_holds_it() -> None:
    """Bounds belong to their bucket, as Prometheus has it; what is longer than all is in +Inf; the sum is exact."""
    totals = Totals()
    for seconds in (0.005, 0.0051, 299.0, 301.0, -3.0):
        totals.observe(CHAT_WAIT, seconds)
    pairs, total_s = CHAT_WAIT.read(totals.read())
    within = dict(pairs)
    assert (2, 3, 3, 4, 5) == tuple(within[bound] for bound in ("0.005", "0.01", "60.0", "300.0", "+Inf"))
    assert 600.0101 == pytest.approx(total_s)


def test_names_are_read_back_from_redis() -> None:
    """As bytes, and what is no number counts as nothing."""
    stored = {b"retries|batch": b"3", b"retries|interactive": b"2", b"leases_lost": b"x", b"of_another_version": b"7"}
    totals = read_totals(stored)
    assert {"retries": 5} == {name: count for name, count in sums(totals).items() if count}


def test_every_field_is_named_once() -> None:
    """Neither two counters nor a bucket and a counter share a field of the hash."""
    fields = [field for counter in COUNTERS for _, field in counter.series()]
    fields += [buckets.bucket(bound) for buckets in HISTOGRAMS for bound in (*buckets.bounds, 1e9)]
    fields += [buckets.sum_field for buckets in HISTOGRAMS]
    assert len(fields) == len(set(fields))


@pytest.mark.parametrize(
    ("outcome", "counted"),
    [
        (
            Answered(200, b"", "", Usage(3, 4)),
            {"jobs_ended|batch|completed": 1, "tokens|batch|prompt": 3, "tokens|batch|completion": 4},
        ),
        (Answered(404, b"", ""), {"jobs_ended|batch|failed": 1, "engine_errors|refused": 1}),
        (
            Answered(500, b"", "", dead=True),
            {"jobs_ended|batch|failed": 1, "engine_errors|unclear": 1, "dead|batch": 1},
        ),
        (Ended(ErrorCode.TIMEOUT, ""), {"jobs_ended|batch|expired": 1}),
        (Ended(ErrorCode.EXPIRED, ""), {"jobs_ended|batch|expired": 1}),
        (Ended(ErrorCode.CANCELLED, ""), {"jobs_ended|batch|cancelled": 1}),
        (Ended(ErrorCode.INTERRUPTED, ""), {"jobs_ended|batch|interrupted": 1}),
        (
            Ended(ErrorCode.WORKER_LOST, "", dead=True),
            {"jobs_ended|batch|failed": 1, "engine_errors|gone": 1, "dead|batch": 1},
        ),
        (Ended(ErrorCode.RESULT_TOO_LARGE, ""), {"jobs_ended|batch|failed": 1, "engine_errors|too_large": 1}),
        (Retry(1.0, ""), {"retries|batch": 1, "engine_errors|unclear": 1}),
        (Retry(0.0, "", crashed=True), {"retries|batch": 1, "engine_errors|gone": 1}),
        (HandedBack(Reason.PREEMPTED), {"handed_back|batch|preempted": 1}),
        (HandedBack(Reason.OVERLOAD), {"handed_back|batch|overload": 1, "engine_errors|overloaded": 1}),
        (HandedBack(Reason.SHUTDOWN), {"handed_back|batch|shutdown": 1}),
        (Abandoned(), {"leases_lost": 1}),
    ],
)
def test_an_outcome_counts_as_what_it_is(outcome: Outcome, counted: dict[str, int]) -> None:
    """Each outcome, of an attempt that ran, and the engine's part in it; all of it is in the table."""
    measuring = Measuring()
    measuring.ended(lease(), outcome)
    measuring.settled(lease(), outcome)
    assert counted == measuring.totals()
    assert counted.keys() <= {field for counter in table.COUNTERS for _, field in counter.series()}


def test_a_job_that_was_claimed_to_be_ended_is_no_fault_of_the_engine() -> None:
    """No attempt was made: its worker had died before."""
    measuring = Measuring()
    measuring.settled(lease(), Ended(ErrorCode.WORKER_LOST, "", dead=True))
    assert {"jobs_ended|batch|failed": 1, "dead|batch": 1} == measuring.totals()
