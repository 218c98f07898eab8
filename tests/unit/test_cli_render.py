"""Tables on a terminal of 80 columns, where ids are there to be copied."""

from __future__ import annotations

import contextlib
import io

import pytest

from llmq.cli.render import print_table

COLUMNS = ("id", "status", "done>", "name")
ID = "batch_1k1ej6tccbrmwrtf808wb2rd5q"


class Terminal(io.StringIO):
    """A stdout that is a terminal."""

    def isatty(self) -> bool:
        """Whether somebody looks at it."""
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal of 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    return Terminal()


def test_a_long_text_at_the_end_is_folded_and_no_other_column_is(terminal: Terminal) -> None:
    """What a thing is called, and how it stands, is on one line."""
    with contextlib.redirect_stdout(terminal):
        print_table(COLUMNS, [[ID, "in_progress", "30", "a name of many words " * 4]])
    lines = terminal.getvalue().splitlines()
    assert lines[1].startswith(f"{ID}  in_progress")
    assert len(lines) > 2
    assert all(len(line.rstrip()) <= 80 for line in lines)


def test_a_row_that_leaves_no_room_is_printed_as_it_is(terminal: Terminal) -> None:
    """The terminal breaks it at its end; a column of three characters would be read by nobody."""
    with contextlib.redirect_stdout(terminal):
        print_table(COLUMNS, [[ID, "in_progress" * 3, "30", "a name of many words"]])
    assert 2 == len(terminal.getvalue().splitlines())


def test_a_table_that_is_piped_is_never_broken(capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts get one line a row."""
    print_table(COLUMNS, [[ID, "in_progress", "30", "a name of many words " * 10]])
    assert 2 == len(capsys.readouterr().out.splitlines())
