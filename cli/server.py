"""`llmq server`: start, stop and look at the embedded server of this user and host."""

from __future__ import annotations

from dataclasses import asdict

import typer

from llmq.cli.options import Json
from llmq.cli.progress import format_time
from llmq.cli.render import notice, print_facts, print_json, print_line
from llmq.cli.session import load
from llmq.scheduler.embedded import ensure_server, server_status, stop_server
from llmq.scheduler.redis_url import redact
from llmq.scheduler.units import format_size


def start(json: Json = False) -> None:
    """Start the embedded server, unless it runs.

    Commands start it by themselves where LLMQ_REDIS_URL is not set; it keeps its data under LLMQ_HOME.

    \b
    Example:
      llmq server start
    """
    settings = load().settings
    url = redact(ensure_server(settings.home))
    if json:
        print_json({"state": "running", "url": url})
    else:
        print_line(f"running at {url}")
    _note_url(settings.redis_url)


def stop(json: Json = False) -> None:
    """Stop the embedded server; its data stays.

    The next command that needs it starts it again.

    \b
    Example:
      llmq server stop
    """
    stopped = stop_server(load().settings.home)
    if json:
        print_json({"state": "stopped", "was_running": stopped})
    else:
        print_line("stopped" if stopped else "was not running")


def status(json: Json = False) -> None:
    """Show whether the embedded server runs, and where.

    \b
    Example:
      llmq server status --json
    """
    settings = load().settings
    found = server_status(settings.home)
    if json:
        print_json(asdict(found) | {"folder": str(found.folder)})
    else:
        print_facts(
            {
                "state": found.state,
                "url": found.url or "",
                "server": found.version or "",
                "pid": str(found.pid or ""),
                "memory": "" if found.memory_bytes is None else format_size(found.memory_bytes),
                "up for": "" if found.uptime_s is None else format_time(found.uptime_s),
                "folder": str(found.folder),
            }
        )
    _note_url(settings.redis_url)


def _note_url(url: str | None) -> None:
    if url is not None:
        notice(f"note: LLMQ_REDIS_URL is set, so commands use {redact(url)} and not the embedded server")


def register(app: typer.Typer) -> None:
    """Add the verbs to the noun's app."""
    for verb in (start, stop, status):
        app.command()(verb)
