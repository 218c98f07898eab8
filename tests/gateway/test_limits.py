"""When there is no room, no time, or no Redis: what clients are told, and when to come again."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from redis.asyncio import Redis

from llmq.gateway.direct import Direct
from llmq.gateway.fleet import FleetView, retry_after
from llmq.gateway.vigil import Patience
from llmq.scheduler.errors import SettingsError
from llmq.scheduler.fleet import WorkerStatus, worker_of
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.measures import Measures
from tests.conftest import OwnServer
from tests.engine.fake import FakeEngine, page, stream
from tests.engine.scripted import ScriptedEngine
from tests.gateway.serving import Gateway, error_of, gateway, whole
from tests.redis.serving import KEYS, configure, plain, until


async def test_a_full_queue_is_told_with_the_time_to_come_again(redis_url: str, redis: Redis) -> None:
    """The official clients wait for Retry-After and try again (G15)."""
    await configure(redis, cap_interactive="1")
    async with gateway(redis_url) as front:
        first = asyncio.create_task(_status(front))
        await until(lambda: redis.hlen(KEYS.lanes))
        async with front.chat() as response:
            assert 429 == response.status
            error = await error_of(response)
            assert ("rate_limit_error", "queue_full") == (error["type"], error["code"])
            assert 1 <= int(response.headers["retry-after"]) <= 60
        first.cancel()


@pytest.mark.parametrize("streams", [False, True])
async def test_a_call_that_waited_too_long_is_told_so(redis_url: str, redis: Redis, streams: bool) -> None:
    """503, so that official clients try again."""
    await configure(redis, queue_ttl="200")
    async with gateway(redis_url) as front, front.chat(stream=streams) as response:
        assert 503 == response.status
        assert "queue_timeout" == (await error_of(response))["code"]
        assert 1 <= int(response.headers["retry-after"]) <= 60


class TestRetryAfter:
    """The time to come again, from what the workers measured."""

    def test_it_is_what_the_queue_holds_by_how_fast_it_drains(self) -> None:
        """50 jobs at 5 a second are ten seconds."""
        view = FleetView((_worker(ended=100, seconds=20),), {TrafficClass.INTERACTIVE: 50})
        assert 10 == pytest.approx(retry_after(view, TrafficClass.INTERACTIVE), rel=0.01)

    def test_it_is_bounded(self) -> None:
        """From a second to a minute."""
        few, many = ({TrafficClass.INTERACTIVE: count} for count in (1, 100_000))
        workers = (_worker(ended=100, seconds=20),)
        assert 1 == retry_after(FleetView(workers, few), TrafficClass.INTERACTIVE)
        assert 60 == retry_after(FleetView(workers, many), TrafficClass.INTERACTIVE)

    def test_without_workers_it_is_half_a_minute(self) -> None:
        """Somebody has to start one first."""
        assert 30 == retry_after(FleetView((), {}), TrafficClass.INTERACTIVE)


class TestClasses:
    """What makes a single call batch class."""

    @pytest.mark.parametrize(
        ("fields", "headers", "lane"),
        [
            ({}, {}, "i:default"),
            ({"service_tier": "flex"}, {}, "b:default"),
            ({"service_tier": "auto"}, {}, "i:default"),
            ({}, {"X-LLMQ-Class": "batch"}, "b:default"),
            ({"service_tier": "flex"}, {"X-LLMQ-Class": "interactive"}, "i:default"),
        ],
    )
    async def test_tier_and_header_say_the_class(
        self, redis_url: str, redis: Redis, fields: dict[str, str], headers: dict[str, str], lane: str
    ) -> None:
        """The header wins; the tier is sent on to the engine like any field."""
        async with gateway(redis_url) as front:
            asked = asyncio.create_task(_status(front, headers, **fields))
            await until(lambda: redis.hlen(KEYS.lanes))
            assert {lane} == set(plain(await redis.hgetall(KEYS.lanes)))
            asked.cancel()

    async def test_another_class_is_refused(self, front: Gateway) -> None:
        """With the two that there are."""
        async with front.chat(headers={"X-LLMQ-Class": "urgent"}) as response:
            assert 400 == response.status
            assert "interactive or batch" in (await error_of(response))["message"]

    async def test_a_batch_call_has_a_time_of_its_own(self, redis_url: str) -> None:
        """Nobody took it within the flex timeout."""
        async with gateway(redis_url, flex_timeout=0.2) as front:
            assert 503 == await _status(front, service_tier="flex")


class TestRedisFull:
    """Redis is there, and takes no more."""

    async def test_a_call_is_told_that_the_storage_is_full(self, own_server: OwnServer) -> None:
        """Later than for a restart, and not by the direct engine: the queue works."""
        server = own_server()
        async with gateway(server.url, direct="http://127.0.0.1:9") as front:
            with server.client() as client:
                client.config_set("maxmemory", 1)
                async with front.chat() as response:
                    assert 503 == response.status
                    assert "queue_storage_full" == (await error_of(response))["code"]
                    assert "30" == response.headers["retry-after"]
                client.config_set("maxmemory", 0)


async def _refused(front: Gateway, path: str) -> float:
    """Call while Redis is away; return the seconds until the refusal was read."""
    began = time.monotonic()
    async with front.chat() if "chat" in path else front.get(path) as response:
        assert 503 == response.status
        assert "queue_unavailable" == (await error_of(response))["code"]
        assert 1 <= int(response.headers["retry-after"]) <= 5
    return time.monotonic() - began


class TestRedisAway:
    """Redis is away: new calls are told within a second."""

    @pytest.mark.parametrize("how", ["kill", "freeze"])
    async def test_a_new_call_is_told_within_a_second(self, own_server: OwnServer, how: str) -> None:
        """With a time to come again; and when Redis is back, calls are taken without a restart."""
        server = own_server()
        async with gateway(server.url) as front:
            getattr(server, how)()
            for path, limit_s in (("/v1/chat/completions", 1.2), ("/v1/models", 1.2), ("/readyz", 2.5)):
                took = [await _refused(front, path)]
                while took[-1] >= limit_s and len(took) < 3:  # a machine that stood still does not do so three times
                    took.append(await _refused(front, path))
                assert took[-1] < limit_s, took
            async with front.get("/healthz") as response:
                assert 200 == response.status
            server.thaw() if how == "freeze" else server.start()
            asked = asyncio.create_task(_status(front))
            with server.client() as client:
                await until(lambda: client.hlen(KEYS.lanes))
            asked.cancel()

    async def test_a_call_that_may_have_been_queued_does_not_run(self, own_server: OwnServer) -> None:
        """Its client was told to come again: the job that arrives late is taken back."""
        server = own_server()
        async with gateway(server.url, patience=Patience(0.1)) as front:
            async with front.chat(stream=True):
                pass  # a connection and the scripts are there: the next job is on its way at once
            with server.client() as client:
                await until(lambda: client.keys("llmq:*job:*") and not client.hlen(KEYS.lanes))
            server.freeze()
            assert 503 == await _status(front)
            server.thaw()
            with server.client() as client:
                await until(lambda: len(client.keys("llmq:*job:*")) == 2)
                await until(lambda: not client.hlen(KEYS.lanes))

    async def test_chat_goes_to_the_direct_engine(self, own_server: OwnServer) -> None:
        """Only then, and every answer says so; batch class calls are told to come again."""
        server, engine = own_server(), FakeEngine()
        said = stream({"choices": [{"index": 0, "delta": {"content": "x"}}]})
        engine.replies["/v1/chat/completions"] = said
        async with engine.serving(), gateway(server.url, direct=f"{engine.url}/v1") as front:
            server.kill()
            async with front.chat(stream=True) as response:
                assert (200, "1") == (response.status, response.headers["x-llmq-direct"])
                assert said.endswith(await response.read())
            engine.replies["/v1/chat/completions"] = page(400, {"error": {"message": "no"}})
            assert 400 == await _status(front)
            assert 503 == await _status(front, service_tier="flex")

    async def test_the_direct_engine_is_spared(self, own_server: OwnServer) -> None:
        """It takes a few calls at a time; those beyond are told to come again."""
        server, engine = own_server(), FakeEngine()
        entered = asyncio.Semaphore(0)

        async def hang(writer: asyncio.StreamWriter) -> None:
            entered.release()
            await engine.hung_up.wait()

        engine.replies["/v1/chat/completions"] = hang
        async with engine.serving(), gateway(server.url, direct=engine.url) as front:
            server.kill()
            held = [asyncio.create_task(_status(front)) for _ in range(8)]
            for _ in held:
                await entered.acquire()
            assert 503 == await _status(front)
            for task in held:
                task.cancel()
            async with asyncio.timeout(1):
                await engine.hung_up.wait()


@pytest.mark.parametrize(
    "url", ["http://[::1", "http://h:99999", "ftp://h", "http://u:p@h", "http://:p@h", "http://h?a=1"]
)
def test_a_direct_engine_that_can_be_none_is_refused(url: str) -> None:
    """At the start, with an example of one that can, and without its password."""
    with pytest.raises(SettingsError, match="as in http://HOST") as refused:
        Direct(url)
    assert ":p@" not in str(refused.value)


async def test_a_direct_engine_is_not_asked_while_redis_is_there(
    redis_url: str, engine: ScriptedEngine, front: Gateway
) -> None:
    """It is a fallback, and no way around the queue."""
    engine.on_request = lambda request: request.answer(body=whole("x"))
    async with gateway(redis_url, direct="http://127.0.0.1:9") as other, other.chat() as response:
        assert 200 == response.status
        assert "x-llmq-direct" not in response.headers


async def _status(front: Gateway, headers: dict[str, str] | None = None, **fields: Any) -> int:
    async with front.chat(headers=headers, **fields) as response:
        await response.read()
        return int(response.status)


def _worker(*, ended: int, seconds: float) -> WorkerStatus:
    now = [0.0]
    measures = Measures(lambda: now[0])
    now[0] = seconds
    for _ in range(ended):
        measures.interactive_ended(1.0)
    return worker_of({"id": "w", "state": "ready", **measures.snapshot()}, 0, 0, 10)
