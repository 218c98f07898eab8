"""What operators and balancers ask: whether the gateway lives (`/healthz`), and whether it can serve (`/readyz`).

Living means to answer, whatever Redis does: who is started again for Redis' sake is no better off. Ready means that a
job could be submitted and claimed now, and that a worker is there whose models `/v1/models` lists.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llmq.gateway.errors import ApiError
from llmq.gateway.fleet import NOBODY_RETRY_S, Fleet
from llmq.gateway.translation import queue_away
from llmq.scheduler.connection import redis_errors
from llmq.scheduler.health import Health, check_health
from llmq.scheduler.queue import Queue
from llmq.scheduler.tasks import within

#: A probe asks again; it must not be kept waiting.
PROBE_S = 2.0


def ops_routes(queue: Queue, fleet: Fleet, url: str) -> list[Route]:
    """Return the routes for probes; `url` is Redis', for messages."""

    async def live(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        health = await _check(queue, url)
        models = sorted((await fleet.view()).models)
        if not models:
            message = "no worker that lives lists a model; start one: llmq worker --gpu 0"
            raise ApiError(503, message, code="no_worker", retry_after=NOBODY_RETRY_S)
        times = {"claim_ms": round(health.claim_s * 1000, 3), "write_ms": round(health.write_s * 1000, 3)}
        return JSONResponse({"status": "ready", "models": models, **times})

    return [Route("/healthz", live, methods=["GET"]), Route("/readyz", ready, methods=["GET"])]


async def _check(queue: Queue, url: str) -> Health:
    try:
        with redis_errors(url):
            return await within(PROBE_S, check_health(queue))
    except TimeoutError:
        raise queue_away() from None
