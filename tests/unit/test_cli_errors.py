"""The error boundary: one line on stderr and the right exit code for whatever a command raises."""

from __future__ import annotations

import errno
import io
import sys

import pytest
import typer
from redis.exceptions import ConnectionError

from llmq.cli.errors import Interrupted, guard, report
from llmq.scheduler.errors import (
    EngineUnavailable,
    InputFileError,
    JobExpired,
    LineFault,
    QueueFull,
    RedisUnavailable,
    UsageError,
)


def reported(error: BaseException) -> tuple[int, str]:
    """Return exit code and stderr for an error."""
    stderr = io.StringIO()
    return report(error, stderr), stderr.getvalue()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 2),
        (RedisUnavailable("x"), 4),
        (EngineUnavailable("x"), 4),
        (QueueFull("batch", 10), 5),
        (JobExpired("j", "x"), 1),
        (Interrupted("x"), 130),
        (KeyboardInterrupt(), 130),
        (typer.Abort(), 130),
        (ConnectionError("Error 111 connecting to 127.0.0.1:1"), 4),
        (OSError(errno.ENOSPC, "No space left on device"), 1),
        (ValueError("x"), 1),
        (typer.BadParameter("x"), 2),
    ],
)
def test_each_error_is_one_line_with_its_exit_code(error: BaseException, code: int) -> None:
    """The codes are those of the contract; no error prints a traceback."""
    got, text = reported(error)
    assert code == got
    assert 1 == text.count("\n")
    assert "Traceback" not in text


def test_faults_of_a_file_follow_the_line() -> None:
    """Bad lines are listed beneath the message, each with its number."""
    _, text = reported(InputFileError("f.jsonl: 1 bad line", [LineFault(2, "messages", "is empty")], 1))
    assert "error: f.jsonl: 1 bad line\n  line 2: messages: is empty\n" == text


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("Input should be greater than or equal to 1", "expected 1 or more"),
        ("Input should be a valid integer, unable to parse string as an integer", "expected a whole number"),
        ("Input should be a valid number, unable to parse string as a number", "expected a number"),
    ],
)
def test_what_the_parser_found_is_told_in_our_words(said: str, told: str) -> None:
    """Whoever types a number wrongly need not know what checks it."""
    code, text = reported(typer.BadParameter(said))
    assert 2 == code
    assert text.endswith(f"{told}\n")


def test_an_unexpected_error_names_itself_and_how_to_see_more() -> None:
    """Its message stays on one line, however it was written."""
    code, text = reported(KeyError("a\nb"))
    assert 1 == code
    assert text.startswith("error: unexpected KeyError")
    assert "LLMQ_DEBUG=1" in text


def test_with_debug_the_traceback_is_shown() -> None:
    """Whoever asks for it sees where an error came from, before the line that everybody sees."""
    stderr = io.StringIO()
    try:
        raise UsageError("x")
    except UsageError as error:
        report(error, stderr, debug=True)
    assert "Traceback (most recent call last)" in stderr.getvalue()
    assert stderr.getvalue().endswith("error: x\n")


def test_of_a_group_of_errors_the_one_of_llmq_is_shown() -> None:
    """Tasks that fail together fail for one reason (F-076)."""
    group = BaseExceptionGroup("g", [ValueError("y"), BaseExceptionGroup("h", [RedisUnavailable("Redis is away")])])
    assert (4, "error: Redis is away\n") == reported(group)


def test_a_reader_that_has_gone_ends_a_command_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    """`llmq ... | head` is no error."""
    monkeypatch.setattr(sys, "stdout", io.StringIO())  # the real one would be muted for good
    stderr = io.StringIO()
    assert 0 == report(BrokenPipeError(), stderr)
    assert "" == stderr.getvalue()


def test_a_command_that_ends_well_gives_zero() -> None:
    """An exit that a command asked for keeps its code."""

    def some_failed() -> None:
        raise typer.Exit(3)

    assert 0 == guard(lambda: None)
    assert 3 == guard(some_failed)
