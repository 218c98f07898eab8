"""The log: one line an event, words and JSON, nothing secret."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from llmq.scheduler.errors import SettingsError
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.lease import Answered, Ended, ErrorCode, Fence, HandedBack, Lease, Outcome, Reason, Usage, Why
from llmq.scheduler.logs import FORMATS, LEVEL_OF, LEVELS, LOGGER, Event, note, show_log
from llmq.scheduler.settings import load_settings
from llmq.workers.contact import Contact
from llmq.workers.journal import note_changes, note_outcome


@pytest.fixture(autouse=True)
def _quiet_again() -> Iterator[None]:
    """Leave the logger as it was."""
    handlers, level, propagate = list(LOGGER.handlers), LOGGER.level, LOGGER.propagate
    yield
    LOGGER.handlers[:], LOGGER.propagate = handlers, propagate
    LOGGER.setLevel(level)


def shown(level: str = "debug", form: str = "text") -> io.StringIO:
    """Show the log in a text that the test reads."""
    stream = io.StringIO()
    show_log(level, form, stream)
    return stream


def lines(stream: io.StringIO) -> list[str]:
    """Return the lines without their times."""
    return [line.partition(" ")[2] for line in stream.getvalue().splitlines()]


def test_an_event_is_one_line_of_words() -> None:
    """Time in UTC, level, event, and each field as one word; what is no word is quoted, None is left out."""
    stream = shown()
    note(Event.DRAINED, ended=3, tenant="a b", path="x=y\n", nothing=None, rate=0.12345, empty="", yes=True)
    assert re.fullmatch(
        r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO drained ended=3 tenant="a b" path="x=y\\n" '
        r'rate=0.123 empty="" yes=true\n',
        stream.getvalue(),
    )


def test_an_event_is_one_object_of_json() -> None:
    """With time, level and event beside the fields."""
    stream = shown(form="json")
    note(Event.ENGINE_DOWN, url="http://h:1", running=2)
    said = json.loads(stream.getvalue())
    assert {"level": "warning", "event": "engine_down", "url": "http://h:1", "running": 2} == {
        name: value for name, value in said.items() if name != "time"
    }
    assert 1 == stream.getvalue().count("\n")


def test_secrets_of_urls_are_not_shown_and_long_values_are_cut() -> None:
    """A log is copied to places that nobody knows."""
    stream = shown()
    note(Event.ENGINE_DOWN, url="http://me:hunter2@h:1/?token=hunter2", text="x" * 10_000)
    assert "hunter2" not in stream.getvalue()
    assert len(stream.getvalue()) < 1000


@pytest.mark.parametrize("level", LEVELS)
def test_events_below_the_level_are_not_shown(level: str) -> None:
    """Quiet by default: warnings only."""
    stream = shown(level)
    for event in Event:
        note(event)
    expected = [event for event in Event if LEVEL_OF[event] >= logging.getLevelNamesMapping()[level.upper()]]
    assert [str(event) for event in expected] == [line.split()[1] for line in lines(stream)]
    assert "warning" == load_settings({}, {}).settings.log_level


def test_a_program_that_uses_llmq_hears_nothing_unless_it_asks(capfd: pytest.CaptureFixture[str]) -> None:
    """And with its own handlers it hears all, fields and level included."""
    note(Event.ENGINE_DOWN, url="http://h:1")
    assert ("", "") == capfd.readouterr()


@pytest.mark.parametrize(("name", "choices"), [("LLMQ_LOG_LEVEL", LEVELS), ("LLMQ_LOG_FORMAT", FORMATS)])
def test_a_wrong_level_is_refused_with_the_choices(name: str, choices: tuple[str, ...]) -> None:
    """As any setting."""
    with pytest.raises(SettingsError, match=rf"{name}: expected .*{choices[0]}.*{choices[-1]}"):
        load_settings({}, {name: "loud"})
    for choice in choices:
        load_settings({}, {name: choice})


LEASE = Lease(Fence("batch:b", "7-0", 1), TrafficClass.BATCH, Why.BUCKET, "anna", "c7", b"data", 10, attempts=4)


@pytest.mark.parametrize(
    ("outcome", "line"),
    [
        (
            Ended(ErrorCode.WORKER_LOST, "a prompt", dead=True),
            "WARNING dead_letter lane=batch:b entry=7-0 tenant=anna code=worker_lost attempts=4 crashes=0",
        ),
        (
            Answered(500, b"a prompt", "r", Usage(), dead=True),
            "WARNING dead_letter lane=batch:b entry=7-0 tenant=anna status=500 attempts=4 crashes=0",
        ),
        (HandedBack(Reason.PREEMPTED), "INFO preempted lane=batch:b entry=7-0 tenant=anna preemptions=1"),
        (
            HandedBack(Reason.KEY_MISSING, 15.0),
            "WARNING key_missing lane=batch:b entry=7-0 tenant=anna delay_s=15.0",
        ),
        (Answered(200, b"a prompt", "r", Usage()), ""),
        (Answered(400, b"a prompt", "r", Usage()), ""),
        (Ended(ErrorCode.CANCELLED, "a prompt"), ""),
        (HandedBack(Reason.SHUTDOWN), ""),
    ],
)
def test_of_outcomes_an_operator_hears_what_may_need_a_person(outcome: Outcome, line: str) -> None:
    """Without what the engine said: it may quote the prompt (F-051)."""
    stream = shown()
    note_outcome(LEASE, outcome)
    assert ([line] if line else []) == lines(stream)


def test_changed_settings_are_told_by_name_and_value() -> None:
    """What the sweeper derives from others is not somebody's change."""
    stream = shown()
    note_changes({b"deadline": b"30000", b"plan": b"1"}, {b"paused_b": b"1", b"plan": b"2"})
    note_changes({b"a": b"1"}, {b"a": b"1"})
    assert ['INFO settings_changed deadline="" paused_b=1'] == lines(stream)


def test_an_outage_of_redis_is_told_once_and_so_is_its_end() -> None:
    """However many calls fail meanwhile."""
    stream, now = shown(), [0.0]
    contact = Contact(10.0, clock=lambda: now[0])
    contact.seen(now[0])
    for _ in range(5):
        contact.lost()
    now[0] = 7.5
    contact.seen(now[0])
    contact.seen(now[0])
    assert ["WARNING redis_lost", "WARNING redis_back away_s=7.5"] == lines(stream)
