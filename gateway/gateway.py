"""The gateway process: everything it is made of, put together here and nowhere else, from its start to its drained end.

    listen -> connect -> ready -> (asked to stop) -> listen no more -> open answers end within the grace
    -> those left are told -> jobs of clients that are gone are cancelled -> connections closed

The gateway keeps nothing that another one would miss: any number of them serve one queue.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import CollectorRegistry
from redis.asyncio import Redis
from starlette.routing import BaseRoute

from llmq.gateway.app import WebLimits, build_app
from llmq.gateway.arrival import arrival
from llmq.gateway.batch.conductor import Limits
from llmq.gateway.batch.description import describe_batches
from llmq.gateway.batch.part import open_batch_part
from llmq.gateway.batch.routes import batch_routes
from llmq.gateway.batch.storage import open_storage
from llmq.gateway.batch.upload import OVERHEAD
from llmq.gateway.body_guard import Pace
from llmq.gateway.canceller import Canceller
from llmq.gateway.connection_guard import HEAD_S, STALL_S
from llmq.gateway.contact import Contact
from llmq.gateway.direct import Direct
from llmq.gateway.errors import ApiError
from llmq.gateway.fleet import Fleet
from llmq.gateway.host_guard import HostGuard
from llmq.gateway.http_metrics import HttpMetrics
from llmq.gateway.http_server import HttpServer
from llmq.gateway.inference import Service
from llmq.gateway.jobs import Jobs
from llmq.gateway.keyed_admission import KeyedAdmission
from llmq.gateway.metrics import metrics_routes
from llmq.gateway.models import model_routes
from llmq.gateway.openapi import openapi_routes
from llmq.gateway.ops import ops_routes
from llmq.gateway.vigil import Patience, Watchtower
from llmq.scheduler.calling import ScriptCalls
from llmq.scheduler.connection import connect, redis_errors
from llmq.scheduler.keyring import NO_KEYS, Keyring
from llmq.scheduler.queue import Queue
from llmq.scheduler.settings import load_settings
from llmq.scheduler.tasks import end_tasks
from llmq.scheduler.waiting import BLOCK_S, Listener

#: Connections for commands; waits need none.
MAX_CONNECTIONS = 64

#: After the grace: for the last words of open streams, and for cancelling the jobs of those that were cut off.
LAST_WORDS_S = 3.0

#: A background part that failed is started again after so long.
RESTART_S = 1.0

_log = logging.getLogger("llmq.gateway")


class StopSignals(Protocol):
    """Whoever may ask the gateway to stop: first to drain, then at once."""

    async def quiet(self) -> None:
        """Wait until somebody asks to drain."""
        ...

    async def at_once(self) -> None:
        """Wait until somebody asks to end at once."""
        ...


class BackgroundPart(Protocol):
    """Something that works as long as the gateway does, until it is cancelled."""

    async def run(self) -> None:
        """Work until cancelled."""
        ...


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """What a gateway goes by; times in seconds. `direct` is the engine to ask while Redis is away.

    `open_without_keys` lets anybody in, as `tenant`, while no API key has been made; `hosts` are the names beside this
    host's own that it is then served as (None: any). `open_unseen` does so also while Redis, which would know, has
    never been seen: then there is only the direct engine.
    `files` is where files and batches are kept: a folder or a URL of fsspec; None: a folder in `home`.
    """

    queue: str = "default"
    tenant: str = "default"
    open_without_keys: bool = True
    open_unseen: bool = False
    grace: float = 30.0
    flex_timeout: float = 600.0
    max_body_bytes: int = 16 * 2**20
    max_connections: int = 10_000
    cors_origins: Sequence[str] = ()
    hosts: Sequence[str] | None = ()
    direct: str | None = None
    files: str | None = None
    home: Path = field(default_factory=lambda: load_settings({}).settings.home)
    input_limits: Limits = field(default_factory=Limits)
    engine_api_key: str | None = None
    keyring: Keyring = NO_KEYS
    head_s: float = HEAD_S
    stall_s: float = STALL_S
    pace: Pace = field(default_factory=Pace)
    patience: Patience = field(default_factory=Patience)


@dataclass(frozen=True, slots=True)
class GatewayReport:
    """What a gateway has done: requests that it answered, and answers that its end cut off."""

    requests: int
    cut_off: int


@dataclass(frozen=True, slots=True)
class Foundation:
    """What all parts of a gateway stand on; `url` is Redis', and may hold a password."""

    url: str
    options: GatewayOptions
    redis: Redis
    queue: Queue
    listener: Listener
    client_id: str
    contact: Contact
    fleet: Fleet
    admission: KeyedAdmission
    registry: CollectorRegistry


@dataclass(frozen=True, slots=True)
class Addition:
    """What a part adds to the gateway: routes, what runs beside them, routes with larger bodies than all others, and
    the paths of its OpenAPI description."""

    routes: Sequence[BaseRoute] = ()
    background: Sequence[BackgroundPart] = ()
    larger_bodies: Mapping[str, int] = field(default_factory=dict)
    described: Mapping[str, dict[str, Any]] = field(default_factory=dict)


async def serve(
    url: str,
    options: GatewayOptions,
    sockets: list[socket.socket],
    stop: StopSignals,
    on_ready: Callable[[], object] = lambda: None,
    check: Callable[[], Awaitable[object]] | None = None,
) -> GatewayReport:
    """Serve until asked to stop, and until what is open then has ended. Raises LLMQError where it cannot begin.

    With `check` it begins also while Redis is away, and looks at it by that once it is there; what that raises beside
    RedisUnavailable ends the gateway.
    """
    async with AsyncExitStack() as stack:
        foundation = await _lay_foundation(url, options, stack)
        if check is None:
            with redis_errors(url):
                await foundation.admission.any_keys()  # known from the start on, whatever becomes of Redis then
        canceller = Canceller(foundation.queue)
        tower = Watchtower(foundation.listener, foundation.fleet, options.patience)
        additions = _additions(foundation)
        app = _compose(foundation, canceller, tower, additions, stack)
        parts: list[BackgroundPart] = [canceller, *(part for added in additions for part in added.background)]
        running = [asyncio.create_task(_keep(part)) for part in parts]
        stack.push_async_callback(end_tasks, *running)
        server = HttpServer(
            app,
            max_connections=options.max_connections,
            head_s=options.head_s,
            stall_s=options.stall_s,
            last_s=options.grace + LAST_WORDS_S,
            on_refused=app.refused,
        )
        sound = [asyncio.create_task(tower.listener.broken())]
        sound += [asyncio.create_task(arrival(check))] if check is not None else []
        stack.push_async_callback(end_tasks, *sound)
        cut_off = await _serve_until_stopped(server, sockets, stop, options.grace, tower, sound, on_ready)
        await canceller.flush(LAST_WORDS_S)
    return GatewayReport(server.requests, cut_off)


async def _lay_foundation(url: str, options: GatewayOptions, stack: AsyncExitStack) -> Foundation:
    redis = connect(url, max_connections=MAX_CONNECTIONS, client_name="llmq-gateway")
    stack.push_async_callback(redis.aclose)
    reader = connect(url, blocking_s=BLOCK_S, max_connections=1, client_name="llmq-gateway-inbox")
    stack.push_async_callback(reader.aclose)
    most = options.max_body_bytes + 2**16  # the job is more than its body
    calls = ScriptCalls(redis)
    queue = Queue(redis, options.queue, max_body_bytes=most, calls=calls, keyring=options.keyring)
    client_id = uuid.uuid4().hex
    listener = Listener(queue, reader, client_id)
    stack.push_async_callback(listener.close)
    listener.listen()
    contact = Contact()
    admission = KeyedAdmission(
        queue,
        contact,
        tenant=options.tenant,
        open_without_keys=options.open_without_keys,
        open_unseen=options.open_unseen,
    )
    fleet, registry = Fleet(queue, url, contact), CollectorRegistry(auto_describe=False)
    return Foundation(url, options, redis, queue, listener, client_id, contact, fleet, admission, registry)


def _additions(foundation: Foundation) -> list[Addition]:
    """Return the parts beside inference. Each is one line here; all of them stand on the foundation alone."""
    fleet, queue, options = foundation.fleet, foundation.queue, foundation.options
    limits = options.input_limits
    batches = open_batch_part(queue, open_storage(options.files, queue.name, options.home), limits, _log.warning)
    uploads = {"/v1/files": limits.file_bytes + OVERHEAD}
    return [
        Addition(routes=model_routes(fleet)),
        Addition(routes=ops_routes(queue, fleet, foundation.url)),
        Addition(routes=metrics_routes(queue, foundation.registry)),
        Addition(background=[foundation.admission]),
        Addition(batch_routes(batches.service, foundation.admission), [batches], uploads, describe_batches()),
    ]


def _compose(
    foundation: Foundation,
    canceller: Canceller,
    tower: Watchtower,
    additions: Sequence[Addition],
    stack: AsyncExitStack,
) -> HttpMetrics:
    options = foundation.options
    direct = Direct(options.direct, options.engine_api_key) if options.direct else None
    if direct is not None:
        stack.push_async_callback(direct.close)
    jobs = Jobs(
        foundation.listener,
        foundation.client_id,
        foundation.url,
        contact=foundation.contact,
        canceller=canceller,
        fleet=foundation.fleet,
        flex_timeout=options.flex_timeout,
    )
    described = {path: item for added in additions for path, item in added.described.items()}
    larger = {begin: size for added in additions for begin, size in added.larger_bodies.items()}
    app = build_app(
        Service(jobs, foundation.admission, tower, direct),
        [*openapi_routes(described), *(route for added in additions for route in added.routes)],
        foundation.admission,
        WebLimits(
            options.max_body_bytes,
            larger,
            options.pace,
            options.cors_origins,
            HostGuard(lambda: foundation.admission.open_to_all, options.hosts, options.cors_origins),
        ),
    )
    return HttpMetrics(app, foundation.registry)


async def _serve_until_stopped(
    server: HttpServer,
    sockets: list[socket.socket],
    stop: StopSignals,
    grace: float,
    tower: Watchtower,
    sound: Sequence[asyncio.Task[None]],
    on_ready: Callable[[], object],
) -> int:
    """Serve; return how many answers were cut off in the end. A task of `sound` that fails ends it, and is raised."""
    serving = asyncio.create_task(server.serve(sockets))
    quiet, at_once = asyncio.create_task(stop.quiet()), asyncio.create_task(stop.at_once())
    failed = asyncio.create_task(_failure_of(sound))
    try:
        await server.started()
        on_ready()
        await asyncio.wait({serving, quiet, failed}, return_when=asyncio.FIRST_COMPLETED)
        server.stop()
        if failed.done():  # say, it hears no answers any more: whoever supervises it starts a new one
            failed.result()
        await asyncio.wait({serving, at_once}, timeout=grace, return_when=asyncio.FIRST_COMPLETED)
        cut_off = tower.end_all(_stopping())
        await serving
        return cut_off
    finally:
        server.stop()
        await end_tasks(quiet, at_once, failed, serving)


async def _failure_of(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Wait until one of the tasks fails, for ever if need be, and raise that."""
    await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        if task.done():
            task.result()


async def _keep(part: BackgroundPart) -> None:
    """Run a background part; one that fails is started again, and said to have failed."""
    while True:
        try:
            await part.run()
            return
        except Exception:
            _log.exception("a part of the gateway failed and is started again: %s", type(part).__name__)
            await asyncio.sleep(RESTART_S)


def _stopping() -> ApiError:
    return ApiError(
        503, "the answer broke off: the gateway is stopping; send the request again", code="interrupted", retry_after=1
    )
