"""`/metrics`: the queue, read at the scrape, and this gateway's own HTTP, for Prometheus.

A scrape reads what `llmq status` reads, and costs as little. While Redis is away it is answered all the same, with
`llmq_up` 0. It tells no tenant, no key and no model.
"""

from __future__ import annotations

import logging

from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from llmq.scheduler.inspect import QueueStatus, read_status
from llmq.scheduler.metric_families import Collected, exposition
from llmq.scheduler.outage import REDIS_ERRORS
from llmq.scheduler.queue import Queue
from llmq.scheduler.queue_metrics import queue_families
from llmq.scheduler.tasks import within

#: What Redis may take for an answer: a scrape has a timeout of its own, usually 10 s.
READ_S = 2.0

_log = logging.getLogger("llmq.gateway")


def metrics_routes(queue: Queue, registry: CollectorRegistry) -> list[Route]:
    """Return the route; `registry` holds what this gateway counts itself."""

    async def metrics(request: Request) -> Response:
        status = await _read(queue)
        collectors: list[Collector] = [Collected(lambda: queue_families(queue.name, status)), registry]
        body, content_type = exposition(collectors, request.headers.get("accept", ""))
        return Response(body, media_type=content_type)

    return [Route("/metrics", metrics, methods=["GET"])]


async def _read(queue: Queue) -> QueueStatus | None:
    try:
        return await within(READ_S, read_status(queue))
    except (TimeoutError, *REDIS_ERRORS) as error:
        _log.warning("the queue's metrics could not be read: %s", type(error).__name__)
        return None
