"""The journal: what every party saw and did, with times, in one file that all processes append to.

One line an event, written with a single `write` on a descriptor in append mode, so that lines of many processes do not
mix and a killed process loses nothing that it had said. Times are this host's wall clock, which is also what Redis
calls TIME here; a worker whose own clock is made to jump keeps the true one for its journal.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

#: The clock of the journal, taken before anything in this process can change it.
_now = time.time


@dataclass(frozen=True, slots=True)
class Event:
    """What `who` saw at `at` (seconds since the epoch): the kind of event, and its details."""

    at: float
    who: str
    kind: str
    fields: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def get(self, name: str, default: Any = None) -> Any:
        """Return a detail that not every event of the kind has."""
        return self.fields.get(name, default)

    def __str__(self) -> str:
        told = " ".join(f"{name}={value}" for name, value in self.fields.items() if value not in (None, ""))
        return f"{self.who}: {self.kind} {told}"


class Journal:
    """One party's way into the journal."""

    def __init__(self, path: Path, who: str) -> None:
        self.path = path
        self.who = who
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def say(self, kind: str, **fields: Any) -> None:
        """Write down an event that happens now."""
        os.write(self._file, orjson.dumps([_now(), self.who, kind, fields]) + b"\n")

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def read(path: Path) -> list[Event]:
    """Return all events in the order of their times."""
    return sorted(_parsed(path.read_bytes().splitlines()), key=lambda event: event.at)


def of_kind(events: Iterable[Event], *kinds: str) -> Iterator[Event]:
    """Iterate over the events of some kinds."""
    return (event for event in events if event.kind in kinds)


def _parsed(lines: Iterable[bytes]) -> Iterator[Event]:
    for line in lines:
        at, who, kind, fields = orjson.loads(line)
        yield Event(at, who, kind, fields)
