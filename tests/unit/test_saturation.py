"""Saturation: how many batch requests fill an engine, by what batch makes with each number of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llmq.workers.saturation import FORGET_S, LEAST_S, RECENT_S, STALL_S, Saturation

LOOK_S = 0.1


class Engine:
    """Batch on an engine that makes `rate(count)` tokens a second with so many requests; a worker looks ten times."""

    def __init__(self, rate: Callable[[int], float]) -> None:
        self.rate = rate
        self.now = 1000.0
        self.made = 0.0
        self.saturation = Saturation()

    def run(self, count: int, seconds: float, chat: int = 0) -> int | None:
        """Run so many requests for so long, whatever the cap is, beside so much chat; return what is enough."""
        self.saturation.note(self.now, count, chat, round(self.made))
        for _ in range(round(seconds / LOOK_S)):
            self.now += LOOK_S
            self.made += self.rate(count) * LOOK_S
            self.saturation.note(self.now, count, chat, round(self.made))
            self.saturation.look(self.now)
        return self.saturation.enough


def full_with(count: int) -> Callable[[int], float]:
    """Return what an engine makes that so many requests fill: 100 tokens a second each, and hardly any more."""
    return lambda running: 100 * min(running, count) + 5 * max(0, running - count)


def a_gpu(running: int) -> float:
    """Return what a GPU makes: each request is slower for the others, and together they make more."""
    return 3000 * running / (running + 40)


def test_an_engine_that_one_request_fills() -> None:
    """llama.cpp on one core: a second one costs chat and gives nothing."""
    engine = Engine(full_with(1))
    assert engine.run(1, 30) is None  # nobody has tried two
    assert 1 == engine.run(2, 30)


def test_an_engine_that_several_fill() -> None:
    """The least number of which more make hardly more."""
    engine = Engine(full_with(4))
    assert [None, None, None, 4, 4] == [engine.run(count, 10) for count in (1, 2, 4, 6, 9)]


def test_where_more_requests_make_more_all_may_run() -> None:
    """Ten times as many, one after the other: none of them is enough."""
    engine = Engine(a_gpu)
    assert {None} == {engine.run(count, 10) for count in (1, 2, 3, 5, 8, 12, 18, 27, 40)}


def test_what_many_more_make_counts_for_all_on_the_way() -> None:
    """Half as many again gives a twentieth, and once more: all of that is more than batch should do without."""
    engine = Engine({2: 100.0, 3: 105.0, 5: 115.0}.__getitem__)
    engine.run(2, 10)
    engine.run(5, 10)
    assert 3 == engine.run(3, 10)


def test_one_more_of_many_is_not_compared() -> None:
    """What the twentieth gives is less than the noise."""
    engine = Engine(lambda running: 2000 - 10 * (running - 20))
    assert [None, None, None, 20] == [engine.run(count, 10) for count in (20, 21, 27, 40)]


def test_a_few_seconds_say_nothing() -> None:
    """New requests read their prompts first."""
    engine = Engine(full_with(1))
    engine.run(1, 30)
    assert engine.run(2, LEAST_S - 1) is None
    assert 1 == engine.run(2, 2)


def test_beside_chat_nothing_is_measured() -> None:
    """There one request makes less than between chat requests, and has more chat beside it than two have."""
    engine = Engine(lambda running: 900)
    engine.run(1, 30, chat=1)
    assert engine.run(2, 30) is None
    engine.run(1, 30)
    assert 1 == engine.run(2, 30)


def test_only_what_was_measured_within_a_minute_is_compared() -> None:
    """The machine got slower meanwhile: two make less now than one did then, and twice what one would make."""
    engine = Engine(full_with(8))
    engine.run(1, 30)
    engine.now += RECENT_S + 1
    engine.rate = lambda running: full_with(8)(running) / 3
    assert engine.run(2, 30) is None


def test_what_was_found_long_ago_is_measured_again() -> None:
    """The engine may have got faster, or the lines longer."""
    engine = Engine(full_with(1))
    engine.run(1, 10)
    assert 1 == engine.run(2, 10)
    assert 1 == engine.run(1, FORGET_S - 10)
    assert engine.run(1, 20) is None
    engine.rate = full_with(8)
    assert engine.run(2, 30) is None


@pytest.mark.parametrize("stall_s", [STALL_S, 3600.0])
def test_time_in_which_nobody_looked_is_not_counted(stall_s: float) -> None:
    """A process that stood still saw one request at the end of it, and hardly any tokens: no engine's."""
    engine = Engine(full_with(8))
    for _ in range(20):
        engine.run(2, 1)
        engine.now += stall_s
        engine.made += 1
    engine.run(1, 10)
    assert engine.saturation.enough is None


def test_requests_without_tokens_are_never_found_to_be_enough() -> None:
    """Embeddings make none, with one request or with ten."""
    engine = Engine(lambda running: 0.0)
    assert {None} == {engine.run(count, 10) for count in (1, 2, 5, 10)}
