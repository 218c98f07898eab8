"""Questions to the person at the terminal before something is lost, and the refusal where there is none to ask."""

from __future__ import annotations

import sys

import typer

from llmq.scheduler.errors import UsageError


def confirm(consequence: str, command: str, *, yes: bool) -> None:
    """Ask whether to go on; raise UsageError where the answer is no, or nobody is there to give one.

    `consequence` is a sentence with a count ("3 lines that wait will be cancelled"), `command` the line to type that
    does not ask.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"{consequence}; nothing was done. To do it without being asked: {command} --yes")
    if not typer.confirm(f"{consequence}. Go on?", err=True):
        raise UsageError("nothing was done")
