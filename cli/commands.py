"""The tree of commands: a verb's function stands in the module of its noun; here they are only put together.

`main.py` makes a process of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import version as version_of
from typing import Annotated

import typer

from llmq.cli import (
    ask,
    batch,
    bench,
    config,
    dead,
    doctor,
    drain,
    gateway,
    health,
    job,
    keys,
    policy,
    run,
    server,
    status,
    submit,
    top,
    tune,
    why,
    worker,
)
from llmq.cli.errors import USAGE
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
      llmq gateway                         the OpenAI API, for any client of it

    \b
    Exit codes: 0 well, 1 unexpected, 2 usage or bad input, 3 some lines failed,
    4 Redis or engine not reachable, 5 queue full, 130 interrupted.
    """
    _needs_verb(context)


def _noun(text: str, register: Callable[[typer.Typer], None]) -> typer.Typer:
    """Return the app of a noun; the noun itself takes `--json` for its verbs and does nothing else."""

    def noun(context: typer.Context, json: Json = False) -> None:
        _needs_verb(context)

    noun.__doc__ = text
    app = _app(noun)
    register(app)
    return app


def _needs_verb(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(USAGE)


def _app(callback: Callable[..., None], *, completion: bool = False) -> typer.Typer:
    return typer.Typer(
        callback=callback,
        invoke_without_command=True,
        add_completion=completion,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=_CONTEXT,
    )


def build() -> typer.Typer:
    """Put the commands together, in the order in which help lists them."""
    root = _app(_root, completion=True)
    root.command()(run.run)
    root.command("submit-batch")(submit.submit_batch)
    root.command()(ask.ask)
    root.command()(worker.worker)
    root.command()(gateway.gateway)
    root.add_typer(_noun("Look at batches, take their results, and change them.", batch.register), name="batch")
    root.add_typer(_noun("Look at one single job, cancel or delete it.", job.register), name="job")
    root.command()(why.why)
    root.add_typer(_noun("Jobs that were given up: look, run again, delete.", dead.register), name="dead")
    root.add_typer(_noun("The API keys of the gateways: make, list, change, revoke.", keys.register), name="keys")
    root.command()(status.status)
    root.command()(top.top)
    root.command()(status.workers)
    root.command()(drain.drain)
    root.command()(policy.pause)
    root.command()(policy.resume)
    root.command()(policy.rate)
    root.command("set")(policy.set_value)
    root.command()(config.config)
    root.command()(doctor.doctor)
    root.command()(bench.bench)
    root.command()(tune.tune)
    root.command()(health.health)
    root.add_typer(_noun("The embedded server of this user and host.", server.register), name="server")
    return root


app = build()
