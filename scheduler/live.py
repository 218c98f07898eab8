"""The live settings: what `llmq set` knows. They live in the queue's config hash and act on every worker at once.

One table says everything about each of them: what it does, its default, how people write it and how it is stored (times
as milliseconds, for the scripts). `Queue.set` writes through it, `llmq set` lists it, and a worker reads the whole hash
as one `LiveSettings` with every heartbeat. The rate and the pauses are verbs of their own (`llmq rate`, `pause`).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from llmq.scheduler.errors import SettingsError, UsageError
from llmq.scheduler.settings import check_tenant
from llmq.scheduler.units import format_duration, format_size, parse_duration, parse_size
from llmq.scheduler.windows import parse_windows

#: A tenant's share has a setting of its own: `weight.TENANT`.
WEIGHT = "weight."

#: What `llmq set KEY default` says: the setting is taken out of the hash.
DEFAULT = "default"

_LONGEST_MS = 365 * 24 * 3600 * 1000
_MOST_JOBS = 10**9


@dataclass(frozen=True, slots=True)
class LiveSetting:
    """One live setting: its default as people write it, what it does, and both ways between text and stored form.

    `store` raises UsageError for what cannot be used; `show` raises ValueError for what no llmq has stored.
    """

    name: str
    default: str
    meaning: str
    store: Callable[[str], str]
    show: Callable[[str], str]


@dataclass(frozen=True, slots=True)
class LiveValue:
    """A live setting as it is now: its value as people write it, whether it was "set" or is the "default"."""

    name: str
    value: str
    source: str
    meaning: str


def _duration(least_s: float, longest_ms: int = _LONGEST_MS, *, off: bool = False) -> Callable[[str], str]:
    def store(text: str) -> str:
        if off and text.strip().lower() == "off":
            return "0"
        milliseconds = round(parse_duration(text) * 1000)
        if not least_s * 1000 <= milliseconds <= longest_ms:
            span = f"from {format_duration(least_s)} to {format_duration(longest_ms / 1000)}"
            raise UsageError(f"expected a duration {span}{', or off' if off else ''}, got {text!r}")
        return str(milliseconds)

    return store


def _show_duration(stored: str) -> str:
    return format_duration(int(stored) / 1000) if int(stored) else "off"


def _count(least: int, most: int) -> Callable[[str], str]:
    def store(text: str) -> str:
        digits = text.strip().replace("_", "").replace(",", "")
        if not (digits.isascii() and digits.isdigit() and len(digits) < 20 and least <= int(digits) <= most):
            raise UsageError(f"expected a whole number from {least:,} to {most:,}, got {text!r}")
        return str(int(digits))

    return store


def _show_count(stored: str) -> str:
    return str(int(stored))


def _size(text: str) -> str:
    size = parse_size(text)
    if size < 2**20:
        raise UsageError(f"expected a size of at least 1MiB, got {text!r}")
    return str(size)


def _show_size(stored: str) -> str:
    rounded = format_size(int(stored))
    # What is listed may be set again: it must be the same value.
    return rounded if parse_size(rounded) == int(stored) else str(int(stored))


def _reserve(text: str) -> str:
    word = text.strip().lower()
    if word == "auto":
        return word
    try:
        return _count(0, 100_000)(word)
    except UsageError:
        raise UsageError(f"expected a number of slots or auto, got {text!r}") from None


def _resume(text: str) -> str:
    word = text.strip().lower()
    if word not in ("continue", "restart"):
        raise UsageError(f"expected continue or restart, got {text!r}")
    return word


def _switch(text: str) -> str:
    word = text.strip().lower()
    if word not in ("on", "off"):
        raise UsageError(f"expected on or off, got {text!r}")
    return word


def _weight(text: str) -> str:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0.001 <= weight <= 1000:
        raise UsageError(f"expected a weight from 0.001 to 1000, got {text!r}")
    return f"{weight:.6g}"


def _windows(text: str) -> str:
    parse_windows(text)
    return " ".join(text.split())


def _as_stored(stored: str) -> str:
    return stored


LIVE_SETTINGS: tuple[LiveSetting, ...] = (
    LiveSetting(
        "deadline",
        "30s",
        "the longest time batch goes without a start anywhere in the fleet, whatever chat does",
        _duration(1),
        _show_duration,
    ),
    LiveSetting(
        "reserve",
        "auto",
        "slots of each worker kept free for chat; auto: none of 1, else 10 % and at least 1",
        _reserve,
        _as_stored,
    ),
    LiveSetting(
        "lease",
        "10s",
        "how long a worker may be silent before its jobs are given to others",
        _duration(1, 3600_000),
        _show_duration,
    ),
    LiveSetting(
        "ttft_p95",
        "off",
        "what 95 % of chat's times to first token shall stay under; batch takes what that leaves",
        _duration(0.001, 3600_000, off=True),
        _show_duration,
    ),
    LiveSetting(
        "itl_p95",
        "off",
        "what 95 % of the times between chat's tokens shall stay under; batch takes what that leaves",
        _duration(0.001, 3600_000, off=True),
        _show_duration,
    ),
    LiveSetting("preempt", "on", "whether chat that finds no free slot aborts a batch request", _switch, _as_stored),
    LiveSetting(
        "resume",
        "continue",
        "what a batch line does whose answer was cut off: continue it where the engine can, or restart it",
        _resume,
        _as_stored,
    ),
    LiveSetting(
        "attempts_interactive", "2", "attempts of an interactive job that goes wrong", _count(1, 100), _show_count
    ),
    LiveSetting("attempts_batch", "5", "attempts of a batch job that goes wrong", _count(1, 100), _show_count),
    LiveSetting(
        "queue_ttl",
        "1m",
        "the longest time an interactive job waits for its start; off: for ever",
        _duration(0.1, off=True),
        _show_duration,
    ),
    LiveSetting(
        "cap_interactive",
        "10000",
        "interactive jobs, waiting and running; more are refused",
        _count(1, _MOST_JOBS),
        _show_count,
    ),
    LiveSetting(
        "cap_batch", "1000000", "batch jobs, waiting and running; more are refused", _count(1, _MOST_JOBS), _show_count
    ),
    LiveSetting("keep_interactive", "10m", "how long the result of a single job is kept", _duration(1), _show_duration),
    LiveSetting(
        "keep_batch", "7d", "how long a batch and its results are kept after its end", _duration(1), _show_duration
    ),
    LiveSetting(
        "results_max_bytes",
        "1GiB",
        "results of batches held at a time; above it, a batch waits until its results are collected. "
        "Where the server has a maxmemory, the default is a quarter of that",
        _size,
        _show_size,
    ),
    LiveSetting(
        "windows",
        "",
        "when batch may start, and how fast: mon-fri 08:00-20:00 5/s; sat,sun closed; tz=Europe/Berlin",
        _windows,
        _as_stored,
    ),
)

_WEIGHT_SETTING = LiveSetting(
    f"{WEIGHT}TENANT", "1", "the tenant's share of batch, against others' 1", _weight, _as_stored
)

#: A default that follows from the server: the field of the config hash in which the sweeper keeps it (lead.lua).
_MEASURED: Mapping[str, bytes] = {"results_max_bytes": b"results_quarter"}

_BY_NAME: Mapping[str, LiveSetting] = {setting.name: setting for setting in LIVE_SETTINGS}

#: What people look for under `set`, and where it is.
_ELSEWHERE = {
    "rate": "llmq rate 5/s",
    "burst": "llmq rate 5/s --burst 10",
    "paused": "llmq pause batch",
    "pause": "llmq pause batch",
    "plan": "llmq set windows TEXT",
}


def live_setting(name: str) -> LiveSetting:
    """Return the live setting of this name, or `weight.` and a tenant. Raises SettingsError with the nearest name."""
    if name.startswith(WEIGHT):
        try:
            check_tenant(name.removeprefix(WEIGHT))
        except UsageError as error:
            raise SettingsError(f"{name}: {error}") from None
        return LiveSetting(name, *_fields(_WEIGHT_SETTING))
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name in _ELSEWHERE:
        raise SettingsError(f"{name} is not changed by set: {_ELSEWHERE[name]}")
    known = [*_BY_NAME, _WEIGHT_SETTING.name]
    near = difflib.get_close_matches(name.replace("-", "_").lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
    raise SettingsError(f"there is no live setting {name[:60]!r}; {hint}")


def stored_value(name: str, text: str) -> str:
    """Return the stored form of a value, "" for the default. Raises SettingsError."""
    setting = live_setting(name)
    if text.strip().lower() in ("", DEFAULT):
        return ""
    try:
        return setting.store(text)
    except UsageError as error:
        raise SettingsError(f"{name}: {error}") from None


def live_values(config: Mapping[bytes, bytes]) -> list[LiveValue]:
    """Return all live settings as they are in a config hash, weights of tenants behind the others."""
    weights = sorted(key.decode(errors="replace") for key in config if key.startswith(WEIGHT.encode()))
    settings = [*LIVE_SETTINGS, *(LiveSetting(name, *_fields(_WEIGHT_SETTING)) for name in weights)]
    return [_value(setting, config) for setting in settings]


def _fields(setting: LiveSetting) -> tuple[str, str, Callable[[str], str], Callable[[str], str]]:
    return setting.default, setting.meaning, setting.store, setting.show


def _value(setting: LiveSetting, config: Mapping[bytes, bytes]) -> LiveValue:
    given = config.get(setting.name.encode())
    stored = given or config.get(_MEASURED.get(setting.name, b""))
    if not stored:
        return LiveValue(setting.name, setting.default, "default", setting.meaning)
    try:
        shown = setting.show(stored.decode())
    except (ValueError, OverflowError, UsageError):  # somebody wrote to the hash by hand: say what is there
        shown = repr(stored[:60])
    return LiveValue(setting.name, shown, "set" if given else "default", setting.meaning)


@dataclass(frozen=True, slots=True)
class LiveSettings:
    """All live settings, as a worker goes by them; durations in seconds. `reserve` of None is the worker's default."""

    deadline_s: float
    reserve: int | None
    lease_s: float
    ttft_p95_s: float | None
    itl_p95_s: float | None
    preempt: bool
    resume: bool
    attempts_interactive: int
    attempts_batch: int
    queue_ttl_s: float | None
    cap_interactive: int
    cap_batch: int
    keep_interactive_s: float
    keep_batch_s: float
    results_max_bytes: int
    windows: str

    @classmethod
    def from_hash(cls, config: Mapping[bytes, bytes]) -> LiveSettings:
        """Read a config hash. What is missing, or is nothing that llmq has stored, is the default."""

        def stored(name: str) -> str:
            setting = _BY_NAME[name]
            found = config.get(name.encode()) or config.get(_MEASURED.get(name, b""))
            if found:
                try:
                    # A worker must not die of what somebody wrote by hand: only what reads and stores the same counts.
                    return setting.store(setting.show(found.decode()))
                except (UsageError, ValueError, OverflowError):
                    pass
            return setting.store(setting.default) if setting.default else ""

        def seconds(name: str) -> float:
            return int(stored(name)) / 1000

        reserve = stored("reserve")
        return cls(
            deadline_s=seconds("deadline"),
            reserve=None if reserve == "auto" else int(reserve),
            lease_s=seconds("lease"),
            ttft_p95_s=seconds("ttft_p95") or None,
            itl_p95_s=seconds("itl_p95") or None,
            preempt=stored("preempt") == "on",
            resume=stored("resume") == "continue",
            attempts_interactive=int(stored("attempts_interactive")),
            attempts_batch=int(stored("attempts_batch")),
            queue_ttl_s=seconds("queue_ttl") or None,
            cap_interactive=int(stored("cap_interactive")),
            cap_batch=int(stored("cap_batch")),
            keep_interactive_s=seconds("keep_interactive"),
            keep_batch_s=seconds("keep_batch"),
            results_max_bytes=int(stored("results_max_bytes")),
            windows=stored("windows"),
        )
