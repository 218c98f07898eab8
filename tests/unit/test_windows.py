"""Windows: the text that people write, and the plan that it means on the days when clocks change too."""

from __future__ import annotations

import itertools
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmq.scheduler.errors import UsageError
from llmq.scheduler.limit import Limit
from llmq.scheduler.units import Rate
from llmq.scheduler.windows import AHEAD, expand, parse_windows, plan_state

BERLIN = ZoneInfo("Europe/Berlin")
OFFICE = "mon-fri 08:00-20:00 5/s; 20:00-08:00 off; sat,sun closed; tz=Europe/Berlin"
FIVE = Limit(Rate(5.0), 5.0)
HOUR_MS = 3_600_000


def ms(text: str, zone: ZoneInfo = BERLIN) -> int:
    """Return a wall-clock time as the milliseconds of the plan."""
    return int(datetime.fromisoformat(text).replace(tzinfo=zone).timestamp() * 1000)


def steps(text: str, now_ms: int) -> list[tuple[str, str]]:
    """Return a plan as (wall-clock time in Berlin, what is in force)."""
    found = []
    for step in expand(parse_windows(text), now_ms).split(";"):
        if step:
            moment, action = step.split(maxsplit=1)
            found.append((datetime.fromtimestamp(int(moment) / 1000, BERLIN).isoformat()[:16], action))
    return found


def test_the_plan_of_a_week_is_what_the_rules_say() -> None:
    """The example of the documentation, from a Wednesday noon on, with the change before the one in force."""
    assert [
        ("2024-07-02T20:00", "off - -"),
        ("2024-07-03T08:00", "5 5 job"),
        ("2024-07-03T20:00", "off - -"),
        ("2024-07-04T08:00", "5 5 job"),
        ("2024-07-04T20:00", "off - -"),
        ("2024-07-05T08:00", "5 5 job"),
        ("2024-07-05T20:00", "off - -"),
        ("2024-07-06T00:00", "closed - -"),
        ("2024-07-08T00:00", "off - -"),
        ("2024-07-08T08:00", "5 5 job"),
        ("2024-07-08T20:00", "off - -"),
        ("2024-07-09T08:00", "5 5 job"),
    ] == steps(OFFICE, ms("2024-07-03T12:00"))[:12]


@pytest.mark.parametrize(
    ("moment", "expected"),
    [
        ("2024-07-05T07:59", "off"),
        ("2024-07-05T08:00", FIVE),
        ("2024-07-05T19:59", FIVE),
        ("2024-07-05T20:00", "off"),
        ("2024-07-05T23:59", "off"),
        ("2024-07-06T00:00", "closed"),
        ("2024-07-07T23:59", "closed"),
        ("2024-07-08T00:00", "off"),
    ],
)
def test_the_last_rule_that_covers_a_moment_holds(moment: str, expected: object) -> None:
    """A night that begins on Friday ends at the weekend, because the weekend's rule comes later."""
    plan = expand(parse_windows(OFFICE), ms("2024-07-03T12:00"))
    assert expected == plan_state(plan, ms(moment)).action


def test_eight_in_the_morning_is_eight_on_both_sides_of_a_change_of_clocks() -> None:
    """Clocks go forward on 31 March 2024: the hours before and after differ in UTC, not on the wall."""
    plan = dict(steps("08:00-20:00 5/s; tz=Europe/Berlin", ms("2024-03-29T12:00")))
    assert {"2024-03-30T08:00", "2024-03-31T08:00", "2024-04-01T08:00"} <= plan.keys()
    assert 23 * HOUR_MS == ms("2024-03-31T08:00") - ms("2024-03-30T08:00")


def test_a_time_that_the_clocks_skip_is_the_moment_of_their_change() -> None:
    """02:30 does not exist on 31 March 2024 in Berlin; the window begins when 02:00 becomes 03:00."""
    plan = steps("02:30-06:00 closed; tz=Europe/Berlin", ms("2024-03-30T12:00"))
    assert ("2024-03-31T03:00", "closed - -") in plan
    moments = expand(parse_windows("02:30-06:00 closed; tz=Europe/Berlin"), ms("2024-03-30T12:00"))
    assert f"{int(datetime(2024, 3, 31, 1, tzinfo=UTC).timestamp() * 1000)} closed" in moments


def test_a_window_within_a_skipped_hour_is_not_there_that_day() -> None:
    """02:10 to 02:50 has no moment on the day on which clocks go forward."""
    days = [moment[:10] for moment, action in steps("02:10-02:50 closed; tz=Europe/Berlin", ms("2024-03-29T12:00"))]
    assert "2024-03-30" in days
    assert "2024-03-31" not in days
    assert "2024-04-01" in days


def test_a_time_that_comes_twice_is_its_first() -> None:
    """02:30 comes twice on 27 October 2024 in Berlin; the window begins at the first, and lasts an hour longer."""
    plan = expand(parse_windows("02:30-06:00 closed; tz=Europe/Berlin"), ms("2024-10-26T12:00"))
    begins = int(datetime(2024, 10, 27, 0, 30, tzinfo=UTC).timestamp() * 1000)
    ends = int(datetime(2024, 10, 27, 5, tzinfo=UTC).timestamp() * 1000)
    assert f"{begins} closed - -; {ends} - - -;" in plan


def test_without_a_time_zone_times_are_utc() -> None:
    """Nobody's local time is assumed: workers stand in many places."""
    plan = expand(parse_windows("08:00-20:00 closed"), ms("2024-07-03T12:00", ZoneInfo("UTC")))
    assert f"{ms('2024-07-03T08:00', ZoneInfo('UTC'))} closed - -;" in plan


def test_closed_by_default_and_open_at_night() -> None:
    """A rule without days and times covers everything; `open` is the plain rate."""
    plan = steps("closed; 22:00-06:00 open; tz=Europe/Berlin", ms("2024-07-03T12:00"))
    assert [("2024-07-03T22:00", "- - -"), ("2024-07-04T06:00", "closed - -")] == plan[2:4]


def test_the_plan_of_a_moment_later_is_the_same() -> None:
    """A sweeper writes a plan anew only when it has moved on, so the same steps come out all day."""
    windows = parse_windows(OFFICE)
    assert expand(windows, ms("2024-07-03T12:00")) == expand(windows, ms("2024-07-03T13:59:59"))
    assert expand(windows, ms("2024-07-03T12:00")) != expand(windows, ms("2024-07-03T20:00"))


def test_days_may_pass_the_end_of_the_week() -> None:
    """fri-mon is four days; lists and ranges mix."""
    assert {4, 5, 6, 0} == parse_windows("fri-mon closed").rules[0].days
    assert {0, 1, 2, 6} == parse_windows("mon-wed,sun closed").rules[0].days


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected rules like"),
        ("; ;", "expected rules like"),
        ("mon-fry 08:00-20:00 closed", "'fry'"),
        ("mon 8-20 closed", "expected [DAYS] [HH:MM-HH:MM]"),
        ("mon 08:00-25:00 closed", "from 00:00 to 24:00"),
        ("mon 08:61-10:00 closed", "from 00:00 to 24:00"),
        ("mon 08:00-08:00 closed", "begins and ends at the same time"),
        ("mon 08:00-20:00", "expected [DAYS]"),
        ("mon 08:00-20:00 shut", "'shut'"),
        ("mon 08:00-20:00 0/s", "use pause"),
        ("closed; tz=Europe/Berln", "time zone"),
        ("closed; tz=../../etc/passwd", "time zone"),
        ("closed; tz=UTC; tz=UTC", "one time zone"),
        (";".join(["closed"] * 21), "at most 20 rules"),
    ],
)
def test_a_fault_is_named(text: str, said: str) -> None:
    """What cannot be read is refused with the rule at fault and what was expected."""
    with pytest.raises(UsageError, match=r".") as refused:
        parse_windows(text)
    assert said in str(refused.value)


zones = st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata"])
times = st.tuples(st.integers(0, 23), st.integers(0, 59)).map(lambda time: f"{time[0]:02}:{time[1]:02}")
spans = st.tuples(times, times).filter(lambda pair: pair[0] != pair[1]).map("-".join)
rules = st.builds(
    lambda days, span, what: f"{days} {span} {what}",
    st.sampled_from(["mon-fri", "sat,sun", "wed", "sun-tue", "mon-sun"]),
    spans,
    st.sampled_from(["closed", "off", "open", "5/s", "300/m", "2000tok/s"]),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(rules, min_size=1, max_size=4), zones, st.datetimes(datetime(2023, 1, 1), datetime(2026, 12, 31)))
def test_a_plan_is_in_order_and_reaches_a_week_ahead(texts: list[str], zone: str, now: datetime) -> None:
    """Whatever the rules, steps are sorted, each changes something, and a later plan agrees with an earlier one."""
    windows = parse_windows("; ".join([*texts, f"tz={zone}"]))
    now_ms = int(now.replace(tzinfo=UTC).timestamp() * 1000)
    plan = expand(windows, now_ms)
    moments = [int(step.split()[0]) for step in plan.split(";") if step]
    actions = [step.split(maxsplit=1)[1] for step in plan.split(";") if step]
    assert sorted(set(moments)) == moments
    assert all(one != two for one, two in itertools.pairwise(actions))
    later_ms = now_ms + AHEAD // timedelta(milliseconds=2)
    later = expand(windows, later_ms)
    for moment in range(later_ms, now_ms + AHEAD // timedelta(milliseconds=1), 7 * HOUR_MS):
        assert plan_state(plan, moment).action == plan_state(later, moment).action
