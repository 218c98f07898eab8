"""Durations, rates, sizes and counts as people write them."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq.scheduler.errors import UsageError
from llmq.scheduler.units import (
    Rate,
    format_count,
    format_duration,
    format_rate,
    format_size,
    parse_duration,
    parse_rate,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("90s", 90.0),
        ("15m", 900.0),
        ("4h", 14_400.0),
        ("7d", 604_800.0),
        ("500ms", 0.5),
        ("2.5s", 2.5),
        ("1.5h", 5400.0),
        ("0", 0.0),
        (" 10 s ", 10.0),
        ("4H", 14_400.0),
    ],
)
def test_a_duration_reads_with_and_without_a_unit(text: str, seconds: float) -> None:
    """Every form that the documentation names gives its seconds."""
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "-5s", "5 minutes", "1e3", "nan", "inf", "5s 3s", "1_000", "٣s", "1,5s"])
def test_a_wrong_duration_names_the_accepted_forms(text: str) -> None:
    """The message shows what was expected and what came."""
    with pytest.raises(UsageError, match=r"expected a duration like 90, 90s, 15m, 4h, 7d or 500ms, got ") as caught:
        parse_duration(text)
    assert repr(text) in str(caught.value)


def test_a_duration_beyond_a_century_is_refused() -> None:
    """A slip of the keyboard does not become a number that Redis cannot hold."""
    with pytest.raises(UsageError, match=r"at most 36500d, got '999999999d'"):
        parse_duration("999999999d")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0s"),
        (0.5, "500ms"),
        (0.0005, "0.5ms"),
        (2.5, "2.5s"),
        (10.0, "10s"),
        (90.0, "90s"),
        (120.0, "2m"),
        (5400.0, "90m"),
        (86_400.0, "1d"),
        (604_800.0, "7d"),
    ],
)
def test_a_duration_is_written_in_its_largest_exact_unit(seconds: float, text: str) -> None:
    """No digits are lost for the sake of a shorter text."""
    assert format_duration(seconds) == text


@given(st.integers(min_value=0, max_value=10**12))
def test_a_written_duration_reads_back(milliseconds: int) -> None:
    """Formatting and parsing are inverse at the resolution of a millisecond."""
    seconds = milliseconds / 1000
    assert math.isclose(parse_duration(format_duration(seconds)), seconds, rel_tol=1e-12)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("5/s", Rate(5.0)),
        ("300/m", Rate(5.0)),
        ("100/h", Rate(100 / 3600)),
        ("2000tok/s", Rate(2000.0, "tok")),
        ("0.5/s", Rate(0.5)),
        (" 60 tok / M ", Rate(1.0, "tok")),
        ("off", None),
        ("OFF", None),
    ],
)
def test_a_rate_counts_jobs_or_llm_tokens(text: str, rate: Rate | None) -> None:
    """Every form that the documentation names gives its rate."""
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "5", "5/d", "-5/s", "fast", "5 /s/s", "tok/s", "nan/s", "5req/s"])
def test_a_wrong_rate_names_the_accepted_forms(text: str) -> None:
    """The message shows what was expected and what came."""
    with pytest.raises(UsageError, match=r"expected a rate like 5/s, 300/m, 100/h, 2000tok/s or off, got "):
        parse_rate(text)


@pytest.mark.parametrize("text", ["0/s", "0.0/h", "0tok/s"])
def test_a_rate_of_zero_is_a_pause(text: str) -> None:
    """Nobody stops batch by accident, or for ever without `status` saying so."""
    with pytest.raises(UsageError, match="use pause: llmq pause batch"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("rate", "text"),
    [
        (None, "off"),
        (Rate(5.0), "5/s"),
        (Rate(0.5), "30/m"),
        (Rate(5 / 60), "5/m"),
        (Rate(100 / 3600), "100/h"),
        (Rate(2000.0, "tok"), "2000tok/s"),
        (Rate(1 / 3), "20/m"),
        (Rate(math.pi), "3.141593/s"),
    ],
)
def test_a_rate_is_written_as_a_whole_number_where_it_can_be(rate: Rate | None, text: str) -> None:
    """What was typed as 5/m is shown as 5/m."""
    assert format_rate(rate) == text


@given(st.integers(min_value=1, max_value=10**9), st.sampled_from(["s", "m", "h"]), st.sampled_from(["", "tok"]))
def test_a_written_rate_reads_back(number: int, period: str, unit: str) -> None:
    """Formatting and parsing are inverse for every rate that is a whole number of something."""
    rate = parse_rate(f"{number}{unit}/{period}")
    assert rate is not None
    back = parse_rate(format_rate(rate))
    assert back is not None
    assert (math.isclose(rate.per_second, back.per_second, rel_tol=1e-9), rate.unit) == (True, back.unit)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", 1_048_576),
        ("64k", 65_536),
        ("64K", 65_536),
        ("1MiB", 1_048_576),
        ("1mib", 1_048_576),
        ("1.5GiB", 1_610_612_736),
        ("200MB", 200_000_000),
        ("10 B", 10),
        ("0", 0),
    ],
)
def test_a_size_reads_in_binary_and_decimal_units(text: str, size: int) -> None:
    """A letter alone is binary; MB is decimal, as in OpenAI's limits."""
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "k", "-1", "1x", "1 MiB!", "1e6", "½k"])
def test_a_wrong_size_names_the_accepted_forms(text: str) -> None:
    """The message shows what was expected and what came."""
    with pytest.raises(UsageError, match=r"expected a size like 1048576, 64k, 1MiB, 1\.5GiB or 200MB, got "):
        parse_size(text)


def test_a_long_wrong_value_is_shortened_in_the_message() -> None:
    """A file pasted into a setting does not fill the screen."""
    with pytest.raises(UsageError) as caught:
        parse_size("x" * 1000)
    assert len(str(caught.value)) < 150


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0B"), (1023, "1023B"), (1024, "1KiB"), (1_048_576, "1MiB"), (1_500_000, "1.4MiB"), (2**40, "1TiB")],
)
def test_a_size_is_written_in_binary_units(size: int, text: str) -> None:
    """Exact where the unit divides it, one decimal where not."""
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (9999, "9,999"),
        (12_345, "12.3k"),
        (999_499, "999k"),
        (999_999, "1M"),
        (1_250_000, "1.25M"),
        (10**9, "1G"),
        (2 * 10**12, "2T"),
    ],
)
def test_a_count_stays_short(count: int, text: str) -> None:
    """A table's column holds any count in six characters."""
    assert format_count(count) == text
