"""The options that many commands share, so that each reads the same everywhere.

An option that is not given is None and leaves its setting to the environment, llmq.toml or the default. `--json` is
declared at every level (`llmq --json batch ls`, `llmq batch --json ls`, `llmq batch ls --json`) and handed down
through the context's `obj`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def _hand_down(context: typer.Context, given: bool) -> bool:
    context.obj = given or bool(context.obj)
    return bool(context.obj)


Json = Annotated[bool, typer.Option("--json", callback=_hand_down, help="Print one JSON object on stdout.")]

Queue = Annotated[
    str | None, typer.Option("--queue", "-q", metavar="NAME", help="The queue (LLMQ_QUEUE; default: default).")
]

RedisUrl = Annotated[
    str | None,
    typer.Option("--redis", "--redis-url", metavar="URL", help="Where Redis is (LLMQ_REDIS_URL; default: embedded)."),
]

Tenant = Annotated[
    str | None, typer.Option("--tenant", metavar="NAME", help="Whose jobs they are (LLMQ_TENANT; default: default).")
]

EngineName = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="URL|local:FILE|sim",
        help="The inference engine, with or without /v1 (LLMQ_ENGINE; default: look on the usual local ports).",
    ),
]

Gpu = Annotated[
    str,
    typer.Option("--gpu", metavar="N", help="The GPU: 0, or 0,1 for two. A label, but for what is started here."),
]

Serve = Annotated[
    str | None,
    typer.Option("--serve", metavar="CMD", help="Start this engine on the GPU, keep it running, stop it at the end."),
]

ServeLog = Annotated[
    str | None,
    typer.Option("--serve-log", metavar="FILE|-", help="Where what it prints goes; - is stderr (default: LLMQ_HOME)."),
]

Concurrency = Annotated[
    int | None,
    typer.Option("--concurrency", "-c", metavar="N", help="Requests in flight (default: the engine's slots, or 8)."),
]

Grace = Annotated[
    str | None,
    typer.Option(
        "--grace", metavar="TIME", help="How long running requests may go on after SIGTERM or Ctrl-C (default: 30s)."
    ),
]

LogLevel = Annotated[
    str | None,
    typer.Option("--log-level", metavar="LEVEL", help="Show events: debug, info, warning or error (default: warning)."),
]

Model = Annotated[str | None, typer.Option("--model", "-m", metavar="M", help="Put this model in place of the lines'.")]

Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="OUT",
        help="Write the results to this file (.gz, .zst: packed; {part}: in parts); continued if it was cut off.",
    ),
]

PartSize = Annotated[
    str | None,
    typer.Option("--part-size", metavar="SIZE|Nlines", help="What fills a part of 'out-{part}.jsonl' (256MiB)."),
]

Sample = Annotated[
    int | None,
    typer.Option("--sample", metavar="N", help="Answer N lines only, and estimate LLM tokens and time of all."),
]

Ordered = Annotated[bool, typer.Option("--ordered", help="Put the results in the order of the input at the end.")]

SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Turn bad lines into error lines; do not refuse the file.")]

MaxLineBytes = Annotated[
    str | None, typer.Option("--max-line-bytes", metavar="N", help="The longest line that is taken (default: 1MiB).")
]

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

BatchId = Annotated[str, typer.Argument(metavar="ID", help="The batch's id.")]
