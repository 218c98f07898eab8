"""Live settings: what may be set, how it is stored for the scripts, and how a worker reads all of it at once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import llmq.scheduler
from llmq.scheduler.errors import SettingsError
from llmq.scheduler.live import LIVE_SETTINGS, LiveSettings, live_setting, live_values, stored_value

LUA = Path(llmq.scheduler.__path__[0]) / "lua"


@pytest.mark.parametrize(
    ("name", "text", "stored"),
    [
        ("deadline", "15s", "15000"),
        ("deadline", "1m", "60000"),
        ("lease", "2.5s", "2500"),
        ("reserve", "auto", "auto"),
        ("reserve", "0", "0"),
        ("preempt", "OFF", "off"),
        ("attempts_batch", "1", "1"),
        ("queue_ttl", "off", "0"),
        ("cap_batch", "2_000_000", "2000000"),
        ("keep_batch", "30d", "2592000000"),
        ("results_max_bytes", "2GiB", "2147483648"),
        ("weight.evals", "2.5", "2.5"),
        ("windows", " mon-fri  closed ", "mon-fri closed"),
        ("deadline", "default", ""),
        ("weight.evals", "", ""),
    ],
)
def test_a_value_is_stored_as_the_scripts_read_it(name: str, text: str, stored: str) -> None:
    """Times are milliseconds, sizes bytes; the default is no value at all."""
    assert stored == stored_value(name, text)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("deadline", "0.5", "from 1s"),
        ("deadline", "soon", "a duration like"),
        ("lease", "500ms", "from 1s to 1h"),
        ("lease", "2h", "from 1s to 1h"),
        ("reserve", "-1", "a number of slots or auto"),
        ("preempt", "yes", "on or off"),
        ("attempts_interactive", "0", "from 1 to 100"),
        ("attempts_batch", "two", "a whole number"),
        ("cap_interactive", "0", "from 1"),
        ("results_max_bytes", "1k", "at least 1MiB"),
        ("weight.evals", "0", "from 0.001"),
        ("weight.evals", "nan", "from 0.001"),
        ("weight.a|b", "2", "a tenant's name"),
        ("windows", "mon-fry closed", "'fry'"),
    ],
)
def test_a_value_out_of_bounds_is_refused_with_what_was_expected(name: str, text: str, said: str) -> None:
    """The message begins with the setting's name."""
    with pytest.raises(SettingsError, match=re.escape(said)) as refused:
        stored_value(name, text)
    assert str(refused.value).startswith(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("dedline", "did you mean deadline?"),
        ("results-max-bytes", "did you mean results_max_bytes?"),
        ("weight", "did you mean weight.TENANT?"),
        ("rate", "llmq rate 5/s"),
        ("paused", "llmq pause batch"),
        ("zzz", "known: deadline"),
    ],
)
def test_an_unknown_name_gets_the_nearest_one(name: str, said: str) -> None:
    """A misspelt setting that did nothing would be worse than an error."""
    with pytest.raises(SettingsError, match=re.escape(said)):
        live_setting(name)


def test_every_default_is_a_value_that_could_be_set() -> None:
    """What is listed as the default can be typed, and means the same."""
    for setting in LIVE_SETTINGS:
        if setting.default:
            assert setting.default == setting.show(setting.store(setting.default)), setting.name
        assert setting.meaning


def test_the_defaults_of_the_scripts_are_the_same() -> None:
    """A script falls back to the default where nothing was set; both must agree."""
    text = "\n".join(path.read_text() for path in LUA.glob("*.lua"))
    for name, written in {
        "deadline": r"deadline\) or (30000)",
        "cap_interactive": r"chat and (10000) or 1000000",
        "cap_batch": r"'cap_batch', (1000000)\)",
        "queue_ttl": r"queue_ttl\) or (60000)",
        "keep_interactive": r"keep_interactive'?\)?, (600000)\)",
        "results_max_bytes": r"or (2 \^ 30)",
    }.items():
        found = re.search(written, text)
        assert found, name
        number = found[1].replace("2 ^ 30", str(2**30))
        assert number == live_setting(name).store(live_setting(name).default), name


def test_all_are_listed_with_value_and_source() -> None:
    """`llmq set` without arguments: every setting, and each tenant's weight behind them."""
    config = {b"deadline": b"15000", b"weight.evals": b"3", b"format": b"1", b"rate": b"5", b"lease": b"garbage"}
    values = {value.name: (value.value, value.source) for value in live_values(config)}
    assert ("15s", "set") == values["deadline"]
    assert ("auto", "default") == values["reserve"]
    assert ("3", "set") == values["weight.evals"]
    assert ("b'garbage'", "set") == values["lease"]
    assert {setting.name for setting in LIVE_SETTINGS} | {"weight.evals"} == values.keys()


def test_a_listed_size_may_be_set_again() -> None:
    """1,234,567 bytes are not shown as 1.2MiB: that is another number."""
    (value,) = (value for value in live_values({b"results_max_bytes": b"1234567"}) if value.name == "results_max_bytes")
    assert "1234567" == stored_value("results_max_bytes", value.value)


def test_a_worker_reads_defaults_from_an_empty_hash() -> None:
    """The values of the documentation."""
    live = LiveSettings.from_hash({})
    assert (30.0, None, 10.0, True, 2, 5) == (
        live.deadline_s,
        live.reserve,
        live.lease_s,
        live.preempt,
        live.attempts_interactive,
        live.attempts_batch,
    )
    assert (60.0, 600.0, 604_800.0, 2**30) == (
        live.queue_ttl_s,
        live.keep_interactive_s,
        live.keep_batch_s,
        live.results_max_bytes,
    )


def test_a_worker_reads_what_was_set() -> None:
    """Everything that `stored_value` writes comes back as its value."""
    wanted = {
        "deadline": "15s", "reserve": "3", "lease": "2s", "preempt": "off", "attempts_batch": "9", "queue_ttl": "off",
        "results_max_bytes": "1234567",
    }  # fmt: skip
    live = LiveSettings.from_hash({name.encode(): stored_value(name, text).encode() for name, text in wanted.items()})
    assert (15.0, 3, 2.0, False, 9, None, 1_234_567) == (
        live.deadline_s,
        live.reserve,
        live.lease_s,
        live.preempt,
        live.attempts_batch,
        live.queue_ttl_s,
        live.results_max_bytes,
    )


@pytest.mark.parametrize("garbage", [b"x", b"-5", b"-10", b"0", b"\xff", b"1e99", b"99999999999999999999", b"9" * 400])
def test_what_somebody_wrote_by_hand_is_listed(garbage: bytes) -> None:
    """The list of settings is where one looks for it: a size below nothing is no reason to show none of them."""
    config = {setting.name.encode(): garbage for setting in LIVE_SETTINGS}
    assert [setting.name for setting in LIVE_SETTINGS] == [value.name for value in live_values(config)]


@pytest.mark.parametrize("garbage", [b"x", b"-5", b"0", b"\xff", b"1e99", b"99999999999999999999"])
def test_a_worker_survives_what_somebody_wrote_by_hand(garbage: bytes) -> None:
    """What no llmq has stored counts as not set: a worker must not die of it."""
    names = ("deadline", "lease", "attempts_batch", "preempt", "cap_batch", "keep_batch")
    assert LiveSettings.from_hash({}) == LiveSettings.from_hash({name.encode(): garbage for name in names})
