"""The entry point: the tree of commands, and the one place where the command line becomes a process.

A verb's function stands in the module of its noun; here they are only put together. `main` runs what was typed and
ends the process with the exit code that the outcome means (`cli/errors.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version as version_of
from typing import Annotated, Any

import typer

from llmq.cli import config, server
from llmq.cli.errors import USAGE, guard
from llmq.cli.options import Json

#: The terminal that help is set for, at most.
_WIDTH = 80

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": _WIDTH}


def _print_version(given: bool) -> None:
    if given:
        sys.stdout.write(f"llmq {version_of('llmq-streams')}\n")
        raise typer.Exit


def _root(
    context: typer.Context,
    json: Json = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """A job queue on Redis that lets chat and batch LLM work share the same GPUs.

    \b
    One machine, no server needed:
      llmq run prompts.jsonl -o results.jsonl

    \b
    A fleet (LLMQ_REDIS_URL says where Redis is):
      llmq worker --gpu 0                  one per GPU
      llmq submit-batch prompts.jsonl      queue a file of prompts
      llmq ask "Why is the sky blue?"      chat; goes before batch

    \b
    Exit codes: 0 well, 1 unexpected, 2 usage or bad input, 3 some lines failed,
    4 Redis or engine not reachable, 5 queue full, 130 interrupted.
    """
    _needs_verb(context)


def _noun(text: str) -> Callable[..., None]:
    """Return the callback of a noun: it takes `--json` for its verbs and does nothing else."""

    def noun(context: typer.Context, json: Json = False) -> None:
        _needs_verb(context)

    noun.__doc__ = text
    return noun


def _needs_verb(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(USAGE)


def _app(callback: Callable[..., None]) -> typer.Typer:
    return typer.Typer(
        callback=callback,
        invoke_without_command=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=_CONTEXT,
    )


def build() -> typer.Typer:
    """Put the commands together, in the order in which help lists them."""
    root = _app(_root)
    nouns: dict[str, tuple[str, Callable[[typer.Typer], Any]]] = {
        "server": ("The embedded server of this user and host.", server.register),
    }
    for name, (text, register) in nouns.items():
        noun = _app(_noun(text))
        register(noun)
        root.add_typer(noun, name=name)
    root.command()(config.config)
    return root


app = build()


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    return guard(lambda: _end(app(list(arguments), prog_name="llmq", standalone_mode=False)))


def main() -> None:
    """Run what was typed; the entry point of `llmq`."""
    sys.exit(run(sys.argv[1:]))


def _end(code: object) -> None:
    # Without its standalone mode the parser returns the code of an Exit that was raised, and a verb's own value.
    if isinstance(code, int) and code:
        raise typer.Exit(code)
