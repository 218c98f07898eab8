"""What commands print: tables and facts for people, one JSON object for programs.

On a terminal tables are drawn by rich, the last column folded; piped they are plain columns, never cut. Notices go to
stderr, so that stdout is the answer and nothing else.
"""

from __future__ import annotations

import contextlib
import io
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import orjson
from rich.console import Console
from rich.table import Table
from rich.text import Text

from llmq.cli.progress import format_time

#: A last column is folded into this width or more; where there is less, the terminal breaks the whole line.
_FOLDED_FROM = 20


def print_json(value: object) -> None:
    """Print one JSON object."""
    sys.stdout.write(orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode() + "\n")


def print_line(text: str = "") -> None:
    """Print one line of the answer."""
    sys.stdout.write(f"{text}\n")


def notice(text: str) -> None:
    """Say something beside the answer."""
    print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    """Say what may go wrong."""
    notice(f"warning: {text}")


def command(*words: object) -> str:
    """Return a command line to type, quoted for the shell."""
    return shlex.join(str(word) for word in words)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under headings. A heading that ends in `>` is of a column of numbers, set to the right."""
    if sys.stdout.isatty() and _last_column_fits(columns, rows, Console(file=sys.stdout).width):
        _print_drawn(columns, rows)
    else:
        _print_plain(columns, rows)


def print_facts(facts: Mapping[str, str]) -> None:
    """Print names and values, one pair a line, the values beneath each other; pairs without a value are left out."""
    shown = {name: value for name, value in facts.items() if value}
    width = max((len(name) for name in shown), default=0) + 2
    for name, value in shown.items():
        print_line(f"{name:{width}}{value}")


def text_of(show: Callable[[], None]) -> str:
    """Return what `show` prints, its tables as plain columns."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        show()
    return printed.getvalue()


def age(at: float | None, now: float | None = None) -> str:
    """Return how long ago a time (Unix seconds) was; "-" for none."""
    return "-" if not at else format_time((time.time() if now is None else now) - at)


def count_of(number: int, noun: str) -> str:
    """Return "1 line", "2,000 lines"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {plural(noun)}"


def plural(noun: str) -> str:
    """Return the plural of one of our nouns."""
    return f"{noun}es" if noun.endswith("ch") else f"{noun}s"


def _last_column_fits(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> bool:
    """Whether the last column has room beside the others, which are never broken; a text may be folded."""
    *others, last = (max(map(len, cells)) for cells in zip(columns, *rows, strict=True))
    room = width - sum(other + len("  ") for other in others)
    return room >= (last if columns[-1].endswith(">") else min(last, _FOLDED_FROM))


def _print_drawn(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, column in enumerate(columns, start=1):
        right, last = column.endswith(">"), place == len(columns)
        # Ids are copied into the next command: only what stands last, a text, is broken.
        table.add_column(
            column.rstrip(">"), justify="right" if right else "left", no_wrap=right or not last, overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(file=sys.stdout, highlight=False).print(table)


def _print_plain(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    heads = [column.rstrip(">") for column in columns]
    widths = [max(map(len, cells)) for cells in zip(heads, *rows, strict=True)]
    for row in (heads, *rows):
        cells = [
            f"{cell:>{width}}" if column.endswith(">") else f"{cell:<{width}}"
            for cell, width, column in zip(row, widths, columns, strict=True)
        ]
        print_line("  ".join(cells).rstrip())
