"""`/metrics` of a gateway: the queue as it is at the scrape, its own HTTP, and an answer whatever Redis does."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector
from redis.asyncio import Redis

from llmq.gateway.http_metrics import MOST_REASONS, HttpMetrics, route_of
from llmq.scheduler.api_keys import ApiKeys
from llmq.scheduler.queue import Queue
from tests.conftest import OwnServer
from tests.engine.scripted import ScriptedEngine
from tests.gateway.serving import Gateway, gateway, say_all
from tests.metric_text import Scrape
from tests.redis.serving import KEYS, batch_ended, submit_batch, until
from tests.redis.serving import serving as worker_serving


async def scrape(front: Gateway, accept: str = "") -> Scrape:
    """Return what Prometheus would read."""
    async with front.http.get(f"{front.base}/metrics", headers={"accept": accept}) as response:
        assert 200 == response.status
        text = await response.text()
        assert response.headers["content-type"].startswith(accept.partition(";")[0] or "text/plain")
    found = Scrape(text)
    assert [] == found.faults()
    return found


async def test_a_chat_is_seen_from_its_wait_to_its_bytes(front: Gateway, engine: ScriptedEngine, redis: Redis) -> None:
    """Waiting and running as gauges while it does, then counted: by the worker in the queue, by the gateway in HTTP."""
    one, two = (asyncio.create_task(_chat(front)) for _ in range(2))
    request = await engine.next()

    async def both_there() -> bool:
        found = await scrape(front)
        jobs = tuple(
            found.value("llmq_jobs", **{"class": "interactive", "state": state}) for state in ("running", "waiting")
        )
        return jobs == (1, 1) and found.value("llmq_gateway_http_in_flight") == 3  # the scrape is one of them

    await until(both_there)
    say_all(request, "hello")
    say_all(await engine.next(), "hello")
    assert {200} == set(await asyncio.gather(one, two))

    async def both_counted() -> bool:
        found = await scrape(front)
        ended = found.value("llmq_jobs_ended_total", **{"class": "interactive", "outcome": "completed"})
        # A worker counts an end, and how long it took just after that: a heartbeat may come between.
        return (ended, found.value("llmq_interactive_total_seconds_count")) == (2, 2)

    await until(both_counted)
    found = await scrape(front, "application/openmetrics-text; version=1.0.0")
    assert 0 < found.value("llmq_interactive_queue_wait_quantile_seconds", quantile="0.95")
    assert 14 == found.value("llmq_tokens_total", **{"class": "interactive", "kind": "prompt"}) + found.value(
        "llmq_tokens_total", **{"class": "interactive", "kind": "completion"}
    )
    assert 2 == found.value("llmq_gateway_http_requests_total", route="/v1/chat/completions", status="2xx")
    assert 0 < found.value("llmq_gateway_http_sent_bytes_total")
    assert 1 == found.value("llmq_workers", state="ready")


async def test_totals_outlive_the_worker(redis_url: str, redis: Redis, engine: ScriptedEngine) -> None:
    """What it counted since its last heartbeat is told with its last one, before it goes."""
    async with gateway(redis_url) as front:
        async with worker_serving(redis_url, engine, concurrency=2):
            await submit_batch(redis, 2)
            for _ in range(2):
                (await engine.next()).answer()
            await batch_ended(redis)
        found = await scrape(front)
        assert 2 == found.value("llmq_jobs_ended_total", **{"class": "batch", "outcome": "completed"})
        assert 2 == found.value("llmq_batch_queue_wait_seconds_count")
        assert 0 == found.value("llmq_workers", state="ready")


async def test_a_scrape_with_redis_away_is_answered_at_once(own_server: OwnServer) -> None:
    """Up is 0, nothing of the queue is made up, and the gateway tells of itself (F-046)."""
    server = own_server()
    async with gateway(server.url) as front:
        assert 1 == (await scrape(front)).value("llmq_up")
        server.kill()
        began = time.monotonic()
        found = await scrape(front)
        assert time.monotonic() - began < 3
        assert 0 == found.value("llmq_up", queue="default")
        assert [] == found.values("llmq_jobs")
        assert 1 == found.value("llmq_gateway_http_requests_total", route="/metrics", status="2xx")


async def test_a_scrape_needs_no_key(redis_url: str, redis: Redis) -> None:
    """It tells no tenant; a key would only have to be put into one more file."""
    await ApiKeys(Queue(redis, KEYS.queue)).create("anna")
    async with gateway(redis_url) as front:
        assert 1 == (await scrape(front)).value("llmq_up")


async def test_what_a_client_sends_is_no_label(front: Gateway) -> None:
    """Unknown addresses and methods are one series, whatever their names."""
    for path in ("/v1/nothing/1", "/v1/nothing/2", "/%22%0a"):
        async with front.get(path) as response:
            assert 404 == response.status
    async with front.http.request("BREW", f"{front.base}/v1/nothing") as response:
        assert response.status in (400, 404, 405)
    found = await scrape(front)
    other = {
        (s.labels["route"], s.labels["method"])
        for s in found.samples
        if s.name == "llmq_gateway_http_requests_total" and s.labels["route"] != "/metrics"
    }
    assert {("other", "other")} == other


@pytest.mark.parametrize(
    ("path", "params", "route"),
    [
        ("/v1/files/file-1/content", {"file_id": "file-1"}, "/v1/files/{file_id}/content"),
        ("/v1/batches/b/cancel", {"batch_id": "b"}, "/v1/batches/{batch_id}/cancel"),
        ("/v1/models", {}, "/v1/models"),
    ],
)
def test_a_route_is_told_without_its_values(path: str, params: dict[str, str], route: str) -> None:
    """An id in a label would be a series for each."""
    assert route == route_of({"path": path, "path_params": params, "endpoint": object()})
    assert "other" == route_of({"path": path})


async def _chat(front: Gateway) -> int:
    async with front.chat() as response:
        await response.read()
        return int(response.status)


async def test_refusals_are_counted_by_status_and_reason(front: Gateway) -> None:
    """Those of the routes, and those that the server makes before any route: by code, never by what a client sent."""
    async with front.post("/v1/chat/completions", b"no json") as response:
        assert 400 == response.status
    async with front.chat(headers={"Host": "evil.example"}) as response:
        assert 403 == response.status
    async with front.get("/of/no/route") as response:
        assert 404 == response.status
    reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
    writer.write(b"this is no HTTP\r\n\r\n")
    await reader.read()
    writer.close()
    found = await scrape(front)
    expected = {("400", "invalid_json"), ("403", "host_not_allowed"), ("404", "not_found"), ("400", "bad_request")}
    for status, reason in expected:
        assert 1 == found.value("llmq_gateway_refusals_total", status=status, reason=reason)


def test_reasons_are_bounded() -> None:
    """Whatever codes there come to be, a scrape stays small."""
    registry = CollectorRegistry()
    metrics = HttpMetrics(cast(Any, None), registry)
    for number in range(1000):
        metrics.refused(502, f"code-{number}")
    (family,) = (family for family in cast(Collector, registry).collect() if family.name == "llmq_gateway_refusals")
    assert len({sample.labels["reason"] for sample in family.samples}) <= MOST_REASONS + 1
