"""Recorded chat beside an endless batch on one simulated GPU, in virtual time: what the governor makes of it."""

from __future__ import annotations

import itertools

import pytest

from llmq.workers.traffic import Arrival, recorded, scaled
from llmq.workers.trial.figures import rows_of
from llmq.workers.trial.phase import Phase
from tests.governing.scenes import LARGE, ONE_CORE, recorded_slice
from tests.governing.shared_gpu import Outcome, SharedGpu
from tests.governing.virtual_time import run_virtually

SECONDS = 240.0

#: The objective, as a multiple of chat alone's p95.
FACTOR = 1.1


def arrivals() -> list[Arrival]:
    """Return four minutes of a conversation service at 7 requests a second."""
    return scaled(SECONDS, rate=1.4)


def run(cap: int | None = None, ttft_p95_s: float | None = None) -> Outcome:
    """Run them with a fixed cap, or with an objective."""
    return run_virtually(SharedGpu(LARGE, arrivals(), cap=cap, ttft_p95_s=ttft_p95_s).run())


@pytest.fixture(scope="module")
def alone() -> Outcome:
    """Chat without any batch."""
    return run(cap=0)


@pytest.fixture(scope="module")
def governed(alone: Outcome) -> Outcome:
    """Chat and batch under the governor."""
    return run(ttft_p95_s=FACTOR * alone.p95)


def test_the_recording_is_what_was_published() -> None:
    """Fifteen minutes of the conversation trace; scaling keeps its shape."""
    all_of_it = list(recorded())
    assert (4424, Arrival(0.0, 374, 44)) == (len(all_of_it), all_of_it[0])
    assert all(before.at <= after.at for before, after in itertools.pairwise(all_of_it))
    assert Arrival(2.1575, 198, 54) == scaled(10, rate=2.0, tokens=0.5)[1]


def test_chat_keeps_its_speed(alone: Outcome, governed: Outcome) -> None:
    """Chat's p95 beside an endless batch, over the whole run and from nothing known on, meets the objective."""
    assert governed.p95 <= FACTOR * alone.p95


def test_chat_keeps_it_in_bursts_and_from_window_to_window(alone: Outcome, governed: Outcome) -> None:
    """The first seconds of bursts are near what they are alone, and few five-second windows more are slow."""
    runs = {"alone": alone, "governed": governed}
    phases = [Phase(name, SECONDS, 0.0, firsts=list(run.firsts)) for name, run in runs.items()]
    first, second = rows_of(phases)
    assert second.burst_ratio <= 1.15 * first.burst_ratio
    assert second.within >= first.within - 0.08


def test_without_a_governor_it_does_not(alone: Outcome) -> None:
    """The tests above can fail: with all slots batch's but the reserve, chat is much slower."""
    assert run(cap=64).p95 > 1.2 * alone.p95


def test_batch_gets_more_than_the_best_fixed_cap_that_holds(alone: Outcome, governed: Outcome) -> None:
    """The oracle is the highest fixed cap under which chat is as fast. It cannot follow chat; the governor can."""
    best = max((run(cap=cap) for cap in (2, 4, 6, 8, 10, 14)), key=lambda o: o.made if o.p95 <= governed.p95 else 0)
    assert governed.made > 0.85 * best.made


def test_little_is_thrown_away(governed: Outcome) -> None:
    """Under 5 % of all batch tokens."""
    assert governed.wasted_share < 0.05


def test_batch_is_never_shut_out_for_long(governed: Outcome) -> None:
    """At 7 chat requests a second chat alone fills the limit at times: batch waits for its end, not half a minute."""
    out = [len(list(steps)) for shut, steps in itertools.groupby(governed.caps, lambda at: at[1] <= 0) if shut]
    assert max(out) < 300  # steps of a tenth of a second
    assert sum(out) < 0.55 * len(governed.caps)


def test_the_cap_does_not_swing_open(governed: Outcome) -> None:
    """After the first minute it is never open for long while chat is there."""
    caps = [cap for at, cap in governed.caps if at > 60]
    assert sum(cap >= 50 for cap in caps) < 0.05 * len(caps)


def test_the_same_run_gives_the_same_figures(governed: Outcome, alone: Outcome) -> None:
    """Virtual time: nothing depends on the machine."""
    assert governed.firsts == run(ttft_p95_s=FACTOR * alone.p95).firsts


def test_on_an_engine_that_one_request_fills_batch_has_no_more_beside_chat() -> None:
    """Two would make a twelfth more, and chat pays for it: nine of ten moments that batch runs in, it is one."""
    chat = recorded_slice(0, 1.4, 0.08)

    def beside(**how: float | int) -> Outcome:
        return run_virtually(SharedGpu(ONE_CORE, chat, keeps=True, **how).run())  # type: ignore[arg-type]

    alone, one = beside(cap=0), beside(cap=1)
    governed = beside(ttft_p95_s=FACTOR * alone.p95)
    caps = [cap for at, cap in governed.caps if at > 60 and cap > 0]
    assert caps.count(1) > 0.9 * len(caps)
    assert governed.p95 <= FACTOR * alone.p95
    assert governed.made > 0.8 * one.made


def test_a_gpu_is_never_found_to_be_full(governed: Outcome) -> None:
    """There more requests make more, as far as chat bears them."""
    assert max(cap for _, cap in governed.caps) > 16
