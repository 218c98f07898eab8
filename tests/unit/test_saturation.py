"""Saturation: how many batch requests fill an engine, by what batch makes with each number of them."""

from __future__ import annotations

from collections.abc import Callable

from llmq.workers.saturation import FORGET_S, LEAST_S, Saturation


class Engine:
    """Batch on an engine that makes `rate(count)` tokens a second with so many requests; a worker looks ten times."""

    def __init__(self, rate: Callable[[int], float]) -> None:
        self.rate = rate
        self.now = 100.0
        self.made = 0.0
        self.saturation = Saturation()

    def run(self, count: int, seconds: float, looks: tuple[int, ...] = (1,)) -> int | None:
        """Run so many requests for so long; of each look, `looks` says in turn whether they are there."""
        for number in range(round(seconds * 10)):
            self.now += 0.1
            self.made += self.rate(count) / 10
            self.saturation.note(self.now, count * looks[number % len(looks)], round(self.made))
        return self.saturation.enough


def full_with(count: int) -> Callable[[int], float]:
    """Return what an engine makes that so many requests fill: 100 tokens a second each, and hardly any more."""
    return lambda running: 100 * min(running, count) + 5 * max(0, running - count)


def test_an_engine_that_one_request_fills() -> None:
    """llama.cpp on one core: a second one costs chat and gives nothing."""
    engine = Engine(full_with(1))
    assert engine.run(1, 30) is None  # nobody has tried two
    assert engine.run(2, 30) == 1


def test_an_engine_that_several_fill() -> None:
    """The least number of which more make hardly more."""
    engine = Engine(full_with(4))
    found = [engine.run(count, 30) for count in (1, 2, 4, 6, 9)]
    assert found == [None, None, None, 4, 4]


def test_where_more_requests_make_more_all_may_run() -> None:
    """A GPU: each is slower for the others, and together they make more."""
    engine = Engine(lambda running: 3000 * running / (running + 40))
    assert {engine.run(count, 30) for count in (1, 2, 3, 5, 8, 12, 18, 27, 40)} == {None}


def test_what_many_more_make_counts_for_all_on_the_way() -> None:
    """Half as many again gives a twentieth, and once more: all of that is more than batch should do without."""
    engine = Engine({2: 100.0, 3: 105.0, 5: 115.0}.__getitem__)
    engine.run(2, 30)
    assert engine.run(3, 30) == 2
    assert engine.run(5, 30) == 3


def test_one_more_of_many_is_not_compared() -> None:
    """What the twentieth gives is less than the noise."""
    engine = Engine(lambda running: 2000 - 10 * (running - 20))
    engine.run(20, 30)
    assert engine.run(21, 30) is None
    assert engine.run(29, 30) is None
    assert engine.run(30, 30) == 20


def test_a_few_seconds_say_nothing() -> None:
    """New requests read their prompts first."""
    engine = Engine(full_with(1))
    engine.run(1, 30)
    assert engine.run(2, LEAST_S - 1) is None
    assert engine.run(2, 3) == 1


def test_what_was_measured_long_ago_is_tried_again() -> None:
    """The engine may have got faster, or the lines longer."""
    engine = Engine(full_with(1))
    engine.run(1, 30)
    assert engine.run(2, 30) == 1
    assert engine.run(1, FORGET_S - 2) == 1
    assert engine.run(1, 4) is None
    engine.rate = full_with(8)
    assert engine.run(2, 30) is None


def test_the_moments_between_short_requests_do_not_make_them_fewer() -> None:
    """One at a time, seen in nine of ten looks, is one; and where none runs nothing is measured."""
    engine = Engine(full_with(1))
    engine.run(1, 30, looks=(1, 1, 1, 1, 0, 1, 1, 1, 1, 1))
    engine.run(0, 30)
    assert engine.run(2, 30) == 1


def test_what_batch_makes_without_chat_is_not_compared() -> None:
    """Alone on the engine one request makes as many tokens as three do beside chat."""
    engine = Engine(lambda running: 900)
    for _ in range(100):
        engine.now += 0.5
        engine.made += 450
        engine.saturation.pause()
    engine.rate = full_with(8)
    assert engine.run(1, 30) is None
    assert engine.run(3, 30) is None


def test_time_in_which_nobody_looked_is_not_counted() -> None:
    """A process that stood still for an hour saw one request at the end of it, and hardly any tokens: no engine's."""
    engine = Engine(full_with(1))
    engine.run(1, 30)
    engine.now += 3600 - FORGET_S
    engine.run(1, 30)
    assert engine.run(2, 30) == 1
