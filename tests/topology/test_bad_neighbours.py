"""Servers that are hard to get along with: full, evicting, slow, standing still, out of connections."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from redis import Redis, exceptions

from llmq import AsyncClient
from llmq.scheduler.connection import connect, redis_errors
from llmq.scheduler.errors import RedisFull, RedisUnavailable
from llmq.workers.engines.sim import SimEngine
from tests.conftest import OwnServer
from tests.redis.serving import (
    KEYS,
    batch_ended,
    configure,
    each_line_ended_once,
    job_ended,
    serving,
    submit_batch,
    submit_chat,
    until,
)
from tests.servers import Server, client_of
from tests.system.cli_process import QUICK, llmq, started, write_prompts
from tests.system.tcp_proxy import tcp_proxy
from tests.system.worker_process import runs, worker_process

BODY = {"messages": [{"role": "user", "content": "hello"}]}
SIM = "sim://?instant=1"
SLOW = "sim://?decode_tps=20&answer=64"


def _set(server: Server, **settings: object) -> None:
    with server.client() as client:
        for name, value in settings.items():
            client.config_set(name.replace("_", "-"), str(value))


def _keys(server: Server) -> set[bytes]:
    with server.client() as client:
        return set(client.scan_iter(count=1000))


class TestFull:
    """F-095, F-096: `maxmemory` is reached."""

    async def test_submits_are_refused_before_any_write_and_the_queue_drains(self, own_server: OwnServer) -> None:
        """What is queued is claimed, renewed, streamed and finished all the same (G1, G15)."""
        server = own_server("--appendonly", "no")
        redis = connect(server.url)
        await submit_batch(redis, 30)
        for number in range(3):
            await submit_chat(redis, f"job-{number}")
        async with AsyncClient(server.url) as client, serving(server.url, SimEngine.from_url(SLOW), concurrency=4):
            await until(lambda: redis.exists(KEYS.starts))
            _set(server, maxmemory=1)
            before = {key for key in _keys(server) if b"job:" in key or b"b:" in key}
            with pytest.raises(RedisFull, match="CONFIG SET maxmemory"):
                await client.submit(BODY)
            with pytest.raises(RedisFull):
                await client.submit_batch([{"prompt": "a"}], wait=False)
            assert before == {key for key in _keys(server) if b"job:" in key or b"b:" in key}
            for number in range(3):
                await job_ended(redis, f"job-{number}", within=60)
        async with serving(server.url, SimEngine.from_url(SIM), concurrency=8):
            await batch_ended(redis, within=60)
        await each_line_ended_once(redis, 30)
        await redis.aclose()


class TestEviction:
    """F-026, F-094: a policy under which a full server deletes what waits."""

    @pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-lfu", "allkeys-random"])
    async def test_a_server_that_would_delete_jobs_is_refused_at_the_start(
        self, own_server: OwnServer, tmp_path: Path, policy: str
    ) -> None:
        """By whoever puts work in or runs it; the line names the setting. Looking is still possible."""
        server = own_server("--appendonly", "no")
        _set(server, maxmemory="100mb", maxmemory_policy=policy)
        async with AsyncClient(server.url) as client:
            with pytest.raises(RedisUnavailable, match="CONFIG SET maxmemory-policy noeviction"):
                await client.submit(BODY)
        assert set() == _keys(server)

    def test_the_command_line_says_it_in_one_line(self, own_server: OwnServer, tmp_path: Path) -> None:
        """`submit-batch`, `run` and `worker` end with 4 and have written nothing; `status` shows what there is."""
        server = own_server("--appendonly", "no")
        _set(server, maxmemory="100mb", maxmemory_policy="allkeys-lru")
        prompts = write_prompts(tmp_path / "p.jsonl", 2)
        for verb in (
            ("submit-batch", prompts),
            ("run", prompts, "-o", tmp_path / "o", "--engine", QUICK),
            ("worker", "--engine", QUICK),
            ("ask", "hello"),
        ):
            done = llmq(*verb, url=server.url)
            assert (4, True) == (done.code, "CONFIG SET maxmemory-policy noeviction" in done.error)
        assert set() == _keys(server)
        assert 0 == llmq("status", url=server.url).code

    def test_a_policy_that_takes_results_alone_is_a_warning(self, own_server: OwnServer, tmp_path: Path) -> None:
        """Nothing that waits or runs has a TTL."""
        server = own_server("--appendonly", "no")
        _set(server, maxmemory="100mb", maxmemory_policy="volatile-lru")
        done = llmq("submit-batch", write_prompts(tmp_path / "p.jsonl", 2), url=server.url)
        assert 0 == done.code
        assert "volatile-lru: a full Redis deletes results" in done.err
        with server.client() as client:
            with_ttl = {key for key in client.scan_iter() if client.ttl(key) != -1}
        assert not [key for key in with_ttl if b"lane:" in key or b":b:" in key or b"order" in key or b"ready" in key]


class TestSlow:
    """A server, or a way to it, that takes its time (G4)."""

    async def test_a_server_that_stands_still_for_longer_than_a_lease_costs_nobody_his_job(
        self, own_server: OwnServer, tmp_path: Path
    ) -> None:
        """F-026: `CLIENT PAUSE` for three leases, two workers: nothing runs twice, nothing was reclaimed."""
        server, log = own_server("--appendonly", "no"), tmp_path / "runs"
        redis = connect(server.url, timeout_s=20)
        await configure(redis, lease="1000")
        with (
            worker_process(server.url, log, "sim://?decode_tps=10&answer=64", concurrency=2, least_contact=0),
            worker_process(server.url, log, "sim://?decode_tps=10&answer=64", concurrency=2, least_contact=0),
        ):
            await submit_batch(redis, 4)
            await until(lambda: len(runs(log)) == 4)
            with server.client() as plain:
                plain.client_pause(3000)
            await batch_ended(redis)
        assert 4 == len(runs(log))
        await each_line_ended_once(redis, 4)
        await redis.aclose()

    async def test_a_slow_way_slows_and_breaks_nothing(self, own_server: OwnServer) -> None:
        """150 ms on each way: chat, streams and a batch come through (G13)."""
        server = own_server("--appendonly", "no")
        async with tcp_proxy(server.port) as proxy:
            proxy.delay = 0.15
            async with AsyncClient(proxy.url) as client, serving(proxy.url, SimEngine.from_url(SIM), concurrency=4):
                job = await client.submit(BODY)
                assert "".join([delta.text async for delta in job.stream()]) == (await job.result(30)).text
                batch = await client.submit_batch([{"prompt": f"{number}"} for number in range(10)])
                assert 10 == len([line async for line in batch.results()])


class TestConnections:
    """`maxclients` is reached."""

    async def test_it_is_said_and_passes(self, own_server: OwnServer) -> None:
        """A new process is told; those that serve go on; when connections are free again, all is well."""
        server = own_server("--appendonly", "no", "--maxclients", "20")
        redis = connect(server.url, max_connections=1)
        async with serving(server.url, SimEngine.from_url(SIM), concurrency=2):
            await submit_chat(redis, "warm")
            await job_ended(redis, "warm")
            taken = [client_of(server.url) for _ in range(30)]
            let_in = [_is_let_in(one) for one in taken]
            assert not all(let_in)
            other = connect(server.url)
            with pytest.raises(RedisUnavailable, match=r"CONFIG SET maxclients"), redis_errors(server.url):
                await other.ping()
            await submit_chat(redis, "served")
            await job_ended(redis, "served")
            for one in taken:
                one.close()
            await until(lambda: _answers(other))
            await other.aclose()
        await redis.aclose()


def _is_let_in(client: Redis) -> bool:
    try:
        return bool(client.ping())
    except exceptions.ConnectionError:
        return False


async def _answers(client: object) -> bool:
    try:
        return bool(await client.ping())  # type: ignore[attr-defined]
    except Exception:
        return False


class TestHealth:
    """`llmq health --worker`: a worker that does not claim is unhealthy."""

    def test_a_frozen_worker_is_unhealthy(self, own_server: OwnServer, tmp_path: Path) -> None:
        """SIGSTOP: its process lives, its heart does not beat (F-089)."""
        server = own_server("--appendonly", "no")
        assert 0 == llmq("set", "lease", "1s", url=server.url).code
        with worker_process(server.url, tmp_path / "runs", SIM) as worker:
            assert 0 == llmq("health", "--worker", worker.worker_id, url=server.url).code
            worker.freeze()
            _until_unhealthy(server.url, worker.worker_id, "was last heard")
            worker.thaw()
            while llmq("health", "--worker", worker.worker_id, url=server.url).code:
                pass

    async def test_a_worker_whose_redis_swallows_everything_is_unhealthy(
        self, own_server: OwnServer, tmp_path: Path
    ) -> None:
        """Its way to Redis is a black hole, the probe's is not; healed, it is healthy again."""
        server = own_server("--appendonly", "no")
        with server.client() as plain:
            plain.hset("llmq:{default}:config", "lease", 1000)
        async with tcp_proxy(server.port) as proxy:
            process = await asyncio.to_thread(worker_process(proxy.url, tmp_path / "runs", SIM).__enter__)
            try:
                proxy.swallow()
                await asyncio.to_thread(_until_unhealthy_process, server.url, process.worker_id, "was last heard")
                proxy.heal()
            finally:
                process.kill()


def _until_unhealthy(url: str, worker: str, words: str) -> None:
    done = llmq("health", "--worker", worker, url=url)
    while not done.code:
        done = llmq("health", "--worker", worker, url=url)
    assert (4, True) == (done.code, words in done.error)


def _until_unhealthy_process(url: str, worker: str, words: str) -> None:
    while True:
        with started("health", "--worker", worker, url=url) as probe:
            done = probe.end()
        if done.code:
            assert (4, True) == (done.code, words in done.error)
            return
