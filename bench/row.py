"""A row of the table: what is measured, with how many jobs, and what it should come to.

A measurement is an asynchronous function of a `Setting` that returns its figures by name; `Goal` says which of them
count, and where each should be. Nothing here measures.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.server import RedisServer

#: The size of a job as it is stored, in all rows.
JOB_BYTES = 1024

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a row runs: a server of its own, an empty folder, and how many jobs (or seconds) it takes.

    `quick` rows do not wait for what takes long by design. `litellm` is the executable of LiteLLM's proxy, if it is to
    be measured beside.
    """

    server: RedisServer
    folder: Path
    count: int
    quick: bool = False
    litellm: Path | None = None


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure and its target: at least `limit`, or at most; none where the figure only explains others."""

    figure: str
    unit: str
    at_least: float | None = None
    at_most: float | None = None

    def met(self, value: float) -> bool | None:
        """Return whether a value meets the target; None where there is no target."""
        if self.at_least is not None:
            return value >= self.at_least
        return None if self.at_most is None else value <= self.at_most

    @property
    def target(self) -> str:
        """The target in words."""
        if self.at_least is not None:
            return f">= {self.at_least:,g}"
        return "" if self.at_most is None else f"<= {self.at_most:,g}"


@dataclass(frozen=True, slots=True)
class Row:
    """One row: `count` jobs, or `quick` of them where only the code is tried out."""

    name: str
    says: str
    count: int
    quick: int
    goals: tuple[Goal, ...]
    measure: Callable[[Setting], Awaitable[Figures]] = field(repr=False)


def by_name(rows: tuple[Row, ...]) -> Mapping[str, Row]:
    """Return the rows by their names."""
    return {row.name: row for row in rows}
