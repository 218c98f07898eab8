"""The log: one line an event, for whoever operates services; quiet by default.

    note(Event.ENGINE_DOWN, url=engine.url)

Events go through the standard `logging` (logger `llmq`), so that a program that uses llmq as a library handles them as
its own. The commands that serve show them on stderr (`show_log`), as `key=value` or as JSON. A line holds names, ids,
counts and times; never a prompt, an answer, or a text of an engine, which may quote one; URLs without their secrets.
"""

from __future__ import annotations

import logging
import sys
import time
from enum import StrEnum
from typing import TextIO

import orjson

from llmq.scheduler.redis_url import redact

LOGGER = logging.getLogger("llmq")
# Who does not care hears nothing, instead of bare words on stderr.
LOGGER.addHandler(logging.NullHandler())

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")

#: Longer values say no more to a reader of logs.
_LONGEST = 500

#: What logging keeps the fields of a record under.
_FIELDS = "llmq_fields"


class Event(StrEnum):
    """What is logged. `docs/logs.md` says of each when it comes and what it holds."""

    NOTICE = "notice"
    ENGINE_DOWN = "engine_down"
    ENGINE_BACK = "engine_back"
    OVERLOADED = "overloaded"
    PREEMPTED = "preempted"
    LEASE_LOST = "lease_lost"
    LEASE_OVERDUE = "lease_overdue"
    RECLAIMED = "reclaimed"
    DEAD_LETTER = "dead_letter"
    REDIS_LOST = "redis_lost"
    REDIS_BACK = "redis_back"
    SETTINGS_CHANGED = "settings_changed"
    KEY_MISSING = "key_missing"
    KEY_BACK = "key_back"
    SWEEPER_LED = "sweeper_led"
    DRAINING = "draining"
    DRAINED = "drained"


#: What a person should see without asking for it is a warning, and so is its end; the rest is for those who look.
LEVEL_OF = {
    Event.NOTICE: logging.INFO,
    Event.ENGINE_DOWN: logging.WARNING,
    Event.ENGINE_BACK: logging.WARNING,
    Event.OVERLOADED: logging.INFO,
    Event.PREEMPTED: logging.INFO,
    Event.LEASE_LOST: logging.WARNING,
    Event.LEASE_OVERDUE: logging.WARNING,
    Event.RECLAIMED: logging.WARNING,
    Event.DEAD_LETTER: logging.WARNING,
    Event.REDIS_LOST: logging.WARNING,
    Event.REDIS_BACK: logging.WARNING,
    Event.SETTINGS_CHANGED: logging.INFO,
    Event.KEY_MISSING: logging.WARNING,
    Event.KEY_BACK: logging.WARNING,
    Event.SWEEPER_LED: logging.DEBUG,
    Event.DRAINING: logging.INFO,
    Event.DRAINED: logging.INFO,
}

Value = str | int | float | bool | None


def note(event: Event, **fields: Value) -> None:
    """Log an event; fields of None are left out. Any thread may call this."""
    LOGGER.log(LEVEL_OF[event], event.value, extra={_FIELDS: fields})


def record_of(event: Event, **fields: Value) -> logging.LogRecord:
    """Return an event as a record, for a handler that shows it whatever its level."""
    extra = {_FIELDS: fields}
    return LOGGER.makeRecord(LOGGER.name, LEVEL_OF[event], "", 0, event.value, (), None, extra=extra)


class LineFormat(logging.Formatter):
    """Writes a record as one line: `time LEVEL event key=value ...`, or a JSON object."""

    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        given = getattr(record, _FIELDS, {})
        fields = {name: _shown(value) for name, value in given.items() if value is not None}
        if self._as_json:
            head = {"time": at, "level": record.levelname.lower(), "event": record.getMessage()}
            return orjson.dumps(head | fields).decode()
        words = [
            at,
            record.levelname,
            record.getMessage(),
            *(f"{name}={_word(value)}" for name, value in fields.items()),
        ]
        return " ".join(words)


def show_log(level: str, form: str, stream: TextIO | None = None) -> logging.Handler:
    """Show events from this level on, on stderr; what went before is replaced. Return the handler."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormat(as_json=form == "json"))
    for shown in [one for one in LOGGER.handlers if isinstance(one, logging.StreamHandler)]:
        LOGGER.removeHandler(shown)
    LOGGER.addHandler(handler)
    LOGGER.setLevel(level.upper())
    LOGGER.propagate = False
    return handler


def _shown(value: Value) -> Value:
    if not isinstance(value, str):
        return round(value, 3) if isinstance(value, float) else value
    return (redact(value) if "://" in value else value)[:_LONGEST]


def _word(value: Value) -> str:
    """Return a value as one word: in quotes where it is none by itself."""
    if isinstance(value, str):
        return value if value.isprintable() and value and not set(value) & set(' "=') else orjson.dumps(value).decode()
    return orjson.dumps(value).decode()
