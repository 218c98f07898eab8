"""Progress on stderr: a bar on a terminal, else a plain line now and then.

Counts go in, text comes out; nothing here waits. The rate counts from where this run began, so that a batch that is
continued does not look faster than it is.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

#: Plain lines go to logs and files, where one every 5 s is plenty.
PLAIN_INTERVAL_S = 5.0

#: A rate needs this much time to mean anything.
_RATE_AFTER_S = 0.5

Clock = Callable[[], float]


class Meter(Protocol):
    """Shows how far something is."""

    def update(self, done: int, *, total: int | None = None, note: str = "") -> None:
        """Show that `done` of `total` are done; None leaves the total as it is."""
        ...


@contextmanager
def meter(
    title: str, *, total: int | None, unit: str = "lines", begin: int = 0, stream: IO[str] | None = None
) -> Iterator[Meter]:
    """Show the progress of `title` until the block is left; `begin` of `total` were done before."""
    stream = stream or sys.stderr
    shown: BarMeter | PlainMeter
    if stream.isatty():
        shown = BarMeter(Counter(title, unit, total, begin), stream)
    else:
        shown = PlainMeter(Counter(title, unit, total, begin), stream)
    try:
        yield shown
    finally:
        shown.close()


class Counter:
    """What is known of the progress, and how it reads."""

    def __init__(self, title: str, unit: str, total: int | None, begin: int = 0, clock: Clock = time.monotonic) -> None:
        self.title = title
        self.total = total
        self.done = begin
        self.note = ""
        self._unit = unit
        self._begin = begin
        self._clock = clock
        self._started = clock()

    def set(self, done: int, total: int | None, note: str) -> None:
        self.done = done
        self.note = note
        if total is not None:
            self.total = total

    def now(self) -> float:
        return self._clock()

    def describe(self) -> str:
        """Return "1,200 of 50,000 lines (2 %), 240/s, 3m 23s left; 2 failed"."""
        show = format_bytes if self._unit == "bytes" else _count
        unit = "" if self._unit == "bytes" else f" {self._unit}"
        parts = [f"{show(self.done)}{unit}"]
        if self.total:
            share = min(100, self.done * 100 // self.total)
            parts = [f"{show(self.done)} of {show(self.total)}{unit} ({share} %)"]
        elapsed = self._clock() - self._started
        rate = (self.done - self._begin) / elapsed if elapsed >= _RATE_AFTER_S else 0.0
        if rate > 0:
            parts.append(f"{format_bytes(int(rate)) if self._unit == 'bytes' else format_rate(rate)}/s")
            if self.total and self.done < self.total:
                parts.append(f"{format_time((self.total - self.done) / rate)} left")
        return ", ".join(parts) + (f"; {self.note}" if self.note else "")


class PlainMeter:
    """One line at most every 5 s, and one at the end."""

    def __init__(self, counter: Counter, stream: IO[str]) -> None:
        self._counter = counter
        self._stream = stream
        self._shown_at = counter.now()
        self._shown = ""

    def update(self, done: int, *, total: int | None = None, note: str = "") -> None:
        """Take the counts, and print them when it is time."""
        self._counter.set(done, total, note)
        if self._counter.now() - self._shown_at >= PLAIN_INTERVAL_S:
            self._print()

    def close(self) -> None:
        """Print the last line, unless nothing was counted or it was printed just now."""
        if self._counter.done:
            self._print()

    def _print(self) -> None:
        line = f"{self._counter.title}: {self._counter.describe()}"
        if line != self._shown:
            self._stream.write(f"{line}\n")
            self._stream.flush()
        self._shown, self._shown_at = line, self._counter.now()


class BarMeter:
    """A bar that is drawn in place."""

    def __init__(self, counter: Counter, stream: IO[str]) -> None:
        self._counter = counter
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[text]}", markup=False),
            console=Console(file=stream),
            refresh_per_second=5,
            redirect_stdout=False,  # results go there, and notices on stderr above the bar
        )
        self._task = self._progress.add_task(counter.title, total=counter.total, text="")
        self._progress.start()

    def update(self, done: int, *, total: int | None = None, note: str = "") -> None:
        """Move the bar."""
        self._counter.set(done, total, note)
        self._show()

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._show()
        self._progress.stop()

    def _show(self) -> None:
        counter = self._counter
        self._progress.update(self._task, completed=counter.done, total=counter.total, text=counter.describe())


def format_time(seconds: float) -> str:
    """Write a time that passes for people: "12s", "3m 23s", "2h 05m", "3d 04h"."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    if whole < 86_400:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    return f"{whole // 86_400}d {whole % 86_400 // 3600:02}h"


def format_rate(rate: float) -> str:
    """Write a number of things a second with three digits at most."""
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def format_bytes(size: int) -> str:
    """Write a size for a line that changes: one decimal, decimal units as file managers have them."""
    value = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def _count(number: int) -> str:
    return f"{number:,}"
