"""The table: what was measured, beside what it should come to, and the machine it was measured on."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import redis

from bench.row import Figures, Row
from bench.server import version

HEAD = ("row", "what", "figure", "median", "lowest", "highest", "target", "")


@dataclass(frozen=True, slots=True)
class Measured:
    """A row, with the figures of each of its repeats; `load` is that of the machine before each."""

    row: Row
    count: int
    repeats: Sequence[Figures]
    load: Sequence[float]


def machine(*, appendonly: bool) -> dict[str, str]:
    """Return what the figures depend on."""
    return {
        "cores": str(os.cpu_count()),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "redis": f"{version()}, append-only {'everysec' if appendonly else 'off'}",
        "redis-py": ".".join(map(str, redis.VERSION)),
        "at": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def as_json(measured: Sequence[Measured], about: Mapping[str, str]) -> dict[str, Any]:
    """Return everything that was measured."""
    rows = {
        item.row.name: {"count": item.count, "load": list(item.load), "repeats": list(item.repeats)}
        for item in measured
    }
    return {"machine": dict(about), "rows": rows}


def as_table(measured: Sequence[Measured], *, judged: bool = True) -> str:
    """Return a table in Markdown, which is readable as it is; `judged` says which targets were met."""
    rows = [HEAD, *(line for item in measured for line in _lines(item, judged))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    rows.insert(1, tuple("-" * width for width in widths))
    return "\n".join(
        f"| {' | '.join(text.ljust(width) for text, width in zip(row, widths, strict=True))} |" for row in rows
    )


def _lines(item: Measured, judged: bool) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    goals = [goal for goal in item.row.goals if goal.figure in item.repeats[0]]
    for number, goal in enumerate(goals):
        values = [repeat[goal.figure] for repeat in item.repeats]
        median = statistics.median(values)
        met = goal.met(median) if judged else None
        head = (item.row.name, f"{item.count:,}: {item.row.says}") if number == 0 else ("", "")
        verdict = "" if met is None else "met" if met else "MISSED"
        shown = (_shown(median), _shown(min(values)), _shown(max(values)))
        lines.append((*head, f"{goal.figure}, {goal.unit}".rstrip(", "), *shown, goal.target, verdict))
    return lines


def _shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def _processor() -> str:
    about = Path("/proc/cpuinfo")
    if about.exists():
        for line in about.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
