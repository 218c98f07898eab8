"""`llmq gateway`: serve the OpenAI API in front of a queue until somebody asks it to stop."""

from __future__ import annotations

import importlib.util
import ipaddress
import socket
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from llmq.cli.open_files import allow_open_files
from llmq.cli.options import Grace, Json, LogLevel, Queue, RedisUrl, Tenant
from llmq.cli.render import count_of, notice, print_json, warn
from llmq.cli.running import run_async, settle_memory
from llmq.cli.session import Session, load, open_session
from llmq.scheduler.api_keys import ApiKeys
from llmq.scheduler.connection import redact
from llmq.scheduler.errors import RedisUnavailable, UsageError
from llmq.scheduler.logs import show_log
from llmq.scheduler.outage import is_only_away
from llmq.scheduler.settings import Settings
from llmq.workers.shutdown import Shutdown

if TYPE_CHECKING:
    from llmq.gateway.gateway import GatewayOptions, GatewayReport

#: What `pip install 'llmq-streams[gateway]'` brings, and the gateway cannot be without.
_NEEDED = ("starlette", "uvicorn", "httptools", "fsspec", "python_multipart")

#: Open files of a gateway beside its clients' connections: to Redis, of the storage, of the program.
_OTHER_FILES = 256


def gateway(
    host: Annotated[
        str | None, typer.Option("--host", metavar="H", help="The address to listen on (default: 127.0.0.1).")
    ] = None,
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65_535, metavar="P", help="The port; 0: any (default: 8800).")
    ] = None,
    anyone: Annotated[
        bool, typer.Option("--anyone", help="Serve other hosts also while no API key has been made.")
    ] = False,
    queue: Queue = None,
    tenant: Tenant = None,
    flex_timeout: Annotated[
        str | None,
        typer.Option("--flex-timeout", metavar="TIME", help="How long single batch calls may wait (default: 10m)."),
    ] = None,
    direct: Annotated[
        str | None, typer.Option("--direct", metavar="URL", help="An engine to ask for chat while Redis is away.")
    ] = None,
    files: Annotated[
        str | None,
        typer.Option("--files", metavar="PLACE", help="Folder or URL (s3://...) for files and batches."),
    ] = None,
    cors: Annotated[
        list[str] | None, typer.Option("--cors-origin", metavar="URL", help="Let web pages of this origin call it.")
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option("--allow-host", metavar="NAME", help="While there are no keys: another name it is served as."),
    ] = None,
    grace: Grace = None,
    log_level: LogLevel = None,
    redis: RedisUrl = None,
    json: Json = False,
) -> None:
    """Serve the OpenAI API: point any OpenAI client at it.

    SIGTERM and Ctrl-C drain: no new connections, open answers may end within the grace, then they are told. A second
    Ctrl-C ends them at once.

    \b
    Examples:
      llmq gateway                            for clients on this machine
      llmq gateway --port 9000 --queue evals
      llmq gateway --host 0.0.0.0             other hosts too, once there are keys
      llmq gateway --direct http://gpu7:8000  asked while Redis is away
    """
    _check_extra()
    loaded = load(
        listen_host=host,
        listen_port=port,
        queue=queue,
        tenant=tenant,
        flex_timeout=flex_timeout,
        direct=direct,
        gateway_files=files,
        cors_origins=cors or None,
        allow_hosts=allow_host or None,
        grace=grace,
        log_level=log_level,
        redis_url=redis,
    )
    show_log(loaded.settings.log_level, loaded.settings.log_format)
    shutdown = Shutdown()
    report = run_async(lambda: _serve(loaded.settings, shutdown, anyone=anyone), shutdown)
    if json:
        print_json(asdict(report))
    else:
        notice(f"ended gateway {count_of(report.requests, 'request')} answered, {report.cut_off:,} cut off")


async def _serve(settings: Settings, shutdown: Shutdown, *, anyone: bool) -> GatewayReport:
    from llmq.gateway.gateway import serve

    open_without_keys = anyone or _is_loopback(settings.listen_host)
    options = _options(settings, open_without_keys=open_without_keys, open_unseen=anyone)
    async with AsyncExitStack() as stack:
        # The gateway makes connections of its own; the session checks the server, and keeps an embedded one alive.
        session = await _session_if_there(settings, stack, anyone=anyone)
        keyed = await ApiKeys(session.queue).stamp() > 0 if session is not None else None
        if keyed is False and not open_without_keys:
            raise _needs_keys(settings.listen_host)
        sockets = _listen(settings.listen_host, settings.listen_port)
        for listening in sockets:
            stack.callback(listening.close)
        return await serve(
            session.url if session is not None else str(settings.redis_url),
            options,
            sockets,
            shutdown,
            lambda: _say_ready(settings, sockets, keyed=keyed),
            check=None if session is not None else lambda: _greet(settings),
        )


async def _session_if_there(settings: Settings, stack: AsyncExitStack, *, anyone: bool) -> Session | None:
    """Return a session; None, and say so, where the Redis that was named is away."""
    direct = settings.direct is not None and anyone
    meanwhile = f"sends chat to {redact(settings.direct or '')}" if direct else "tells its clients to come again"
    try:
        return await stack.enter_async_context(open_session(settings, warnings=True))
    except RedisUnavailable as error:
        if settings.redis_url is None or not is_only_away(error):
            raise
        warn(f"{error}; the gateway starts all the same, and {meanwhile} until Redis is there")
        return None


async def _greet(settings: Settings) -> None:
    """Look at a Redis that has come back, as at the start. Raises RedisUnavailable, and what makes it unusable."""
    async with open_session(settings, warnings=True):
        notice("Redis is there: the gateway serves its queue")


def _options(settings: Settings, *, open_without_keys: bool, open_unseen: bool) -> GatewayOptions:
    from llmq.gateway.batch.conductor import Limits
    from llmq.gateway.gateway import GatewayOptions

    key = settings.engine_api_key
    return GatewayOptions(
        queue=settings.queue,
        tenant=settings.tenant,
        open_without_keys=open_without_keys,
        open_unseen=open_unseen,
        grace=settings.grace,
        flex_timeout=settings.flex_timeout,
        max_body_bytes=settings.max_body_bytes,
        max_connections=_connections(settings.max_connections),
        cors_origins=settings.cors_origins,
        hosts=_hosts(settings),
        files=settings.gateway_files,
        home=settings.home,
        input_limits=Limits(settings.max_file_bytes, settings.max_line_bytes, settings.max_batch_lines),
        direct=settings.direct,
        engine_api_key=key.get_secret_value() if key is not None else None,
        keyring=settings.keyring(),
    )


def _connections(wanted: int) -> int:
    """Return how many connections may be taken: files that are open for other things come on top."""
    files = allow_open_files(wanted + _OTHER_FILES)
    most = wanted if files is None else max(1, min(wanted, files - _OTHER_FILES))
    if most < wanted:
        warn(
            f"this process may have {files:,} open files, which makes {most:,} connections and not {wanted:,}: raise "
            "its limit (ulimit -n, LimitNOFILE), or set LLMQ_MAX_CONNECTIONS"
        )
    return most


def _hosts(settings: Settings) -> tuple[str, ...] | None:
    """Return the names that it is served as; an address that other hosts reach has names that nobody here knows."""
    if not (_is_loopback(settings.listen_host) or settings.allow_hosts):
        return None
    return settings.listen_host, *settings.allow_hosts


def _listen(host: str, port: int) -> list[socket.socket]:
    from llmq.gateway.http_server import listen

    try:
        return listen(host, port)
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host}:{port} ({error.strerror or error}); choose another: --host H, --port P"
        ) from None


def _say_ready(settings: Settings, sockets: list[socket.socket], *, keyed: bool | None) -> None:
    host, port = settings.listen_host, sockets[0].getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    where = "this host only" if _is_loopback(host) else "any host"
    keys = {None: "Redis away", True: "with API keys", False: "no API keys"}[keyed]
    settle_memory()
    notice(f"ready gateway queue {settings.queue}, {where}, {keys}: http://{shown}:{port}/v1")


def _check_extra() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"the gateway needs packages that are not installed ({', '.join(missing)}); "
            "type: pip install 'llmq-streams[gateway]'"
        )


def _needs_keys(host: str) -> UsageError:
    """Return the refusal of an address that other hosts reach, where nothing says who may call."""
    return UsageError(
        f"--host {host}: no API key has been made, so only this host is served; make one (llmq keys create "
        "--tenant T), leave --host out, or say that anyone who reaches it may use it: --anyone"
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
