"""Progress: the text that it shows, and how often it shows it where there is no terminal."""

from __future__ import annotations

import io

import pytest

from llmq.cli.progress import Counter, PlainMeter, format_bytes, format_rate, format_time, meter


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_text_names_count_share_rate_and_time_left(clock: Clock) -> None:
    """Half of the lines after ten seconds: as long again is left."""
    counter = Counter("running", "lines", 2000, clock=clock)
    clock.now += 10
    counter.set(1000, None, "3 failed")
    assert "1,000 of 2,000 lines (50 %), 100/s, 10s left; 3 failed" == counter.describe()


def test_what_was_done_before_does_not_count_as_speed(clock: Clock) -> None:
    """A batch that is continued shows the rate of this run."""
    counter = Counter("running", "lines", 2000, begin=1000, clock=clock)
    clock.now += 10
    counter.set(1010, None, "")
    assert "1,010 of 2,000 lines (50 %), 1/s, 16m 30s left" == counter.describe()


def test_there_is_no_rate_before_it_means_something(clock: Clock) -> None:
    """In the first half second a rate would be noise."""
    counter = Counter("checking", "bytes", 2_000_000, clock=clock)
    clock.now += 0.1
    counter.set(1_500_000, None, "")
    assert "1.5 MB of 2.0 MB (75 %)" == counter.describe()


def test_an_unknown_total_is_left_out(clock: Clock) -> None:
    """Without a total there is neither a share nor a time left."""
    counter = Counter("reading", "lines", None, clock=clock)
    clock.now += 2
    counter.set(10, None, "")
    assert "10 lines, 5/s" == counter.describe()


def test_without_a_terminal_a_line_comes_at_most_every_five_seconds(clock: Clock) -> None:
    """A thousand updates in ten seconds are two lines, and the last state is a third."""
    stream = io.StringIO()
    shown = PlainMeter(Counter("running", "lines", 1000, clock=clock), stream)
    for done in range(1, 1001):
        clock.now += 0.01
        shown.update(done)
    clock.now += 1
    shown.update(1000, note="1 failed")
    shown.close()
    lines = stream.getvalue().splitlines()
    assert 3 == len(lines)
    assert lines[0].startswith("running: 500 of 1,000 lines (50 %), 100/s")
    assert lines[-1].endswith("; 1 failed")


def test_nothing_counted_prints_nothing() -> None:
    """A step that ended before it began leaves no line."""
    stream = io.StringIO()
    with meter("checking", total=10, stream=stream):
        pass
    assert "" == stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (59.4, "59s"), (203, "3m 23s"), (7500, "2h 05m"), (90_000 * 3, "3d 03h"), (-5, "0s")],
)
def test_times_read_with_two_units(seconds: float, text: str) -> None:
    """Times that pass are written for people."""
    assert text == format_time(seconds)


def test_rates_and_sizes_have_few_digits() -> None:
    """A number that changes five times a second has three digits."""
    assert ["0.123", "12.3", "123", "12,346"] == [format_rate(rate) for rate in (0.1234, 12.34, 123.4, 12_345.6)]
    assert ["999 B", "1.5 MB", "2.0 TB"] == [format_bytes(size) for size in (999, 1_500_000, 2 * 10**12)]
