"""`llmq config`: the settings of a process, each with its source."""

from __future__ import annotations

from pydantic import SecretStr

from llmq.cli.options import Json, Queue, RedisUrl
from llmq.cli.render import print_json, print_table
from llmq.cli.session import load
from llmq.scheduler.redis_url import redact
from llmq.scheduler.settings import Settings


def config(queue: Queue = None, redis: RedisUrl = None, json: Json = False) -> None:
    """Show the settings of this process with their source.

    A value comes from the first of: a flag, the environment (LLMQ_QUEUE), llmq.toml, the default. What acts on every
    worker at once (rate, deadline, ...) is shown by `llmq set`.

    \b
    Examples:
      llmq config
      LLMQ_QUEUE=evals llmq config --json
    """
    loaded = load(queue=queue, redis_url=redis)
    values = {name: _shown(loaded.settings, name) for name in Settings.model_fields}
    if json:
        print_json({name: {"value": value, "source": loaded.source(name)} for name, value in values.items()})
    else:
        rows = [[name, "-" if value is None else str(value), loaded.source(name)] for name, value in values.items()]
        print_table(["setting", "value", "source"], rows)


def _shown(settings: Settings, name: str) -> object:
    """Return a setting's value without its secrets; durations in seconds, sizes in bytes."""
    value = getattr(settings, name)
    match value:
        case SecretStr():
            return "***"
        case tuple():
            return " ".join(value) or None
        case str() if name in ("redis_url", "engine", "direct"):
            return redact(value)
        case str() | int() | float() | None:
            return value
        case _:
            return str(value)
