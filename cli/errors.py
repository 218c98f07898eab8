"""The boundary of the command line: whatever a command raises becomes one line on stderr and an exit code.

    0  all well
    1  an error that nobody foresaw; LLMQ_DEBUG=1 shows where
    2  usage or bad input; nothing was changed
    3  finished, but some lines failed
    4  Redis or the engine cannot be reached
    5  the queue is full
    130  interrupted; what is in Redis goes on

Every error of llmq carries its code (`scheduler/errors.py`). This module decides nothing about jobs.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import sys
import traceback
from collections.abc import Callable
from typing import IO, cast

import typer
from redis.exceptions import RedisClusterException, RedisError

from llmq.scheduler.errors import LLMQError
from llmq.scheduler.redis_errors import explain

OK, UNEXPECTED, USAGE, SOME_FAILED, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 4, 130

DEBUG = "LLMQ_DEBUG"

#: The base of the errors of typer's parser; typer has no public name for it, and its module differs by version.
ParserError = cast(type[Exception], typer.BadParameter.__bases__[0])


#: What typer's validators say, in our words; versions of typer differ, so each is a pattern that may find nothing.
_WORDS = (
    (re.compile(r"Value error, "), ""),
    (re.compile(r"Input should be a valid integer(, unable to parse .*)?"), "expected a whole number"),
    (re.compile(r"Input should be a valid number(, unable to parse .*)?"), "expected a number"),
    (re.compile(r"Input should be greater than or equal to (\S+)"), r"expected \1 or more"),
)


class Interrupted(Exception):
    """Ctrl-C or SIGTERM; the message says what goes on and how to resume."""


def guard(command: Callable[[], object], *, debug: bool = False) -> int:
    """Run a command to its end; print what went wrong, if anything did, and return the exit code."""
    try:
        command()
        sys.stdout.flush()
    except BaseException as error:
        return report(error, sys.stderr, debug=debug)
    return OK


def report(error: BaseException, stderr: IO[str], *, debug: bool = False) -> int:
    """Print one error for a person (and for a developer where it came from); return the exit code that it means."""
    error = _cause(error)
    if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
        # `llmq ... | head`: the reader has what it wanted. The parser makes a SystemExit(1) of it on its way here.
        # Nothing may be flushed to that reader when the process ends.
        _mute_stdout()
        return OK
    if isinstance(error, typer.Exit) and error.exit_code != INTERRUPTED:
        return error.exit_code
    text, code = _judge(error)
    if debug and text:
        text = "".join(traceback.format_exception(error)) + text
    try:
        if text:
            stderr.write(f"{text}\n")
            stderr.flush()
    except OSError:
        pass  # nobody reads it; the code still says it
    return code


def _judge(error: BaseException) -> tuple[str, int]:
    """Return the line to print and the exit code."""
    match error:
        case Interrupted():
            return str(error) or "interrupted", INTERRUPTED
        case KeyboardInterrupt() | typer.Abort() | typer.Exit() | asyncio.CancelledError():
            return "interrupted", INTERRUPTED
        case LLMQError():
            return f"error: {error}", error.exit_code
        case RedisError() | RedisClusterException() if (meaning := explain(error)) is not None:
            return f"error: Redis {meaning.what} ({error}); {meaning.step}", UNREACHABLE
        case OSError() if error.errno in (errno.ENOSPC, errno.EDQUOT):
            place = error.filename or "the output"
            return f"error: {place}: cannot be written ({error.strerror}); make room, then try again", UNEXPECTED
        case SystemExit():
            return "", error.code if isinstance(error.code, int) else UNEXPECTED
    if isinstance(error, ParserError):
        return _usage(error), USAGE
    said = " ".join(str(error).split())[:300]
    return f"error: unexpected {type(error).__name__}: {said}; {DEBUG}=1 shows where", UNEXPECTED


def _usage(error: Exception) -> str:
    """Return what the parser found wrong, with the help to read; called without a verb, the help itself."""
    context = getattr(error, "ctx", None)
    message = str(getattr(error, "format_message", lambda: str(error))())
    if message.startswith("Usage:"):
        return message
    for theirs, ours in _WORDS:
        message = theirs.sub(ours, message)
    see = f"; see {context.command_path} --help" if context is not None else ""
    return f"error: {message[:1].lower()}{message[1:].rstrip('.')}{see}"


def _cause(error: BaseException) -> BaseException:
    """Open groups of exceptions: an error of llmq tells most, and of several the first will do."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    causes = [_cause(inner) for inner in error.exceptions]
    return next((cause for cause in causes if isinstance(cause, LLMQError | Interrupted)), causes[0])


def _mute_stdout() -> None:
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        pass  # no real stdout: nothing will be flushed
