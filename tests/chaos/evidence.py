"""The evidence: all that is known of a run when it is over, as the audit wants to look at it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tests.chaos.journal import Event, of_kind
from tests.chaos.ledger import Entry, Ledger
from tests.chaos.weather import Weather


@dataclass(frozen=True, slots=True)
class Violation:
    """A law that was broken: by what (a job's or batch's name, a worker), when, and how."""

    law: str
    subject: str
    at: float
    text: str

    def __str__(self) -> str:
        return f"{self.law} {self.subject}: {self.text}"


#: One attempt: process, lane, entry, delivery.
Fence = tuple[int, str, str, int]


@dataclass(frozen=True)
class Evidence:
    """What everybody saw, what the server did, and what is left in it.

    `lease_s` and `contact_s` are those of the run, in seconds; `left` are the keys without a TTL that remained.
    """

    events: Sequence[Event]
    ledger: Ledger
    left: Sequence[str] = ()
    lease_s: float = 1.5
    contact_s: float = 1.0

    @cached_property
    def weather(self) -> Weather:
        """When what was disturbed."""
        return Weather(self.events)

    @cached_property
    def job_of(self) -> dict[str, str]:
        """The id of each chat that was acknowledged, by its name."""
        return {event["name"]: event["job"] for event in of_kind(self.events, "acked")}

    @cached_property
    def entries(self) -> dict[str, list[Entry]]:
        """Entries by name: that of a line, or that of a chat where its client knows its id."""
        names = {job: name for name, job in self.job_of.items()}
        found: dict[str, list[Entry]] = defaultdict(list)
        for entry in self.ledger.entries:
            found[names.get(entry.name, entry.name)].append(entry)
        return found

    @cached_property
    def began(self) -> dict[Fence, Event]:
        """When a slot began with each attempt."""
        return {fence_of(event): event for event in of_kind(self.events, "began")}

    @cached_property
    def run_by(self) -> dict[str, Fence]:
        """The attempt that each run of an engine answered."""
        return {event["run"]: fence_of(event) for event in of_kind(self.events, "outcome") if event.get("run")}

    def flushed_between(self, begins: float, ends: float) -> bool:
        """Whether all was lost at some time between two others."""
        return any(begins - 1 <= at <= ends for at in self.ledger.flushes)


def fence_of(event: Event) -> Fence:
    """Return which attempt an event of a worker is about."""
    return event["pid"], event["lane"], event["entry"], event["delivery"]


def pid_of(consumer: str) -> int:
    """Return the process that a consumer's name names."""
    return int(consumer.split("-")[-2])
