"""What breaks while answers are under way: workers, Redis, and the gateway's own end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from pathlib import Path

import pytest
from redis.asyncio import Redis

from llmq.gateway.vigil import Patience
from tests.conftest import OwnServer
from tests.engine.fake import FakeEngine, opened
from tests.engine.scripted import ScriptedEngine
from tests.gateway.serving import Gateway, chunk, error_of, events, gateway, say_all, whole
from tests.redis.serving import KEYS, configure, serving, until
from tests.system.cli_process import llmq, started
from tests.system.worker_process import worker_process


async def told(front: Gateway, text: str = "hi") -> tuple[int, list[str]]:
    """Ask for a stream; return its status and all events but signs of life."""
    async with front.chat(text, stream=True) as response:
        return response.status, [event async for event in events(response) if not event.startswith(":")]


class TestWorkers:
    """A worker dies with an answer under way."""

    async def test_a_killed_worker_is_said_in_the_stream(self, redis_url: str, redis: Redis, tmp_path: Path) -> None:
        """The stream ends with the error `interrupted` and without [DONE]; it is not begun again (G18)."""
        await configure(redis, lease="1000")
        logs = [tmp_path / name for name in ("1", "2")]
        with contextlib.ExitStack() as stack:
            slow = "sim://?decode_tps=20&answer=100000"
            workers = [stack.enter_context(worker_process(redis_url, log, slow)) for log in logs]
            async with gateway(redis_url, patience=Patience(0.5)) as front:
                asked = asyncio.create_task(told(front))
                await until(lambda: redis.hlen(KEYS.tries))
                (taken_by,) = [worker for worker, log in zip(workers, logs, strict=True) if log.exists()]
                taken_by.kill()
                async with asyncio.timeout(60):
                    status, came = await asked
        assert 200 == status
        assert "interrupted" == json.loads(came[-1].removeprefix("data: "))["error"]["code"]
        assert "data: [DONE]" not in came
        assert 1 == sum(log.exists() for log in logs)

    @pytest.mark.leaves("llmq:*")  # the next worker's sweep will end the job
    async def test_the_last_workers_death_is_said_too(
        self, redis_url: str, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nobody else is there who would end its job: the gateway does (G13)."""
        monkeypatch.setattr("llmq.gateway.vigil.STEADY_S", 0.5)
        await configure(redis, lease="1000")
        async with gateway(redis_url, patience=Patience(0.5)) as front:
            with worker_process(redis_url, tmp_path / "1", "sim://?decode_tps=20&answer=100000") as worker:
                asked = asyncio.create_task(told(front))
                await until(lambda: redis.hlen(KEYS.tries))
                worker.kill()
                async with asyncio.timeout(20):
                    _, came = await asked
        assert "interrupted" == json.loads(came[-1].removeprefix("data: "))["error"]["code"]


class TestRedis:
    """Redis goes away with answers under way."""

    async def test_an_open_stream_goes_on_when_redis_is_back(
        self, own_server: OwnServer, engine: ScriptedEngine
    ) -> None:
        """What the engine said meanwhile comes first, then what it says from then on."""
        server = own_server()
        engine.on_request = lambda request: request.say("one ", chunk("one "))
        async with (
            serving(server.url, engine, concurrency=1, reserve=0),
            gateway(server.url) as front,
            front.chat(stream=True) as response,
            asyncio.timeout(30),
        ):
            said, request = events(response), engine.running[0]
            assert f"data: {chunk('one ').decode()}" == await anext(said)
            server.kill()
            request.say("two ", chunk("two "))
            server.start()
            assert f"data: {chunk('two ').decode()}" == await anext(said)
            request.say("three", chunk("three"))
            assert f"data: {chunk('three').decode()}" == await anext(said)
            request.say("", chunk())
            request.answer(body=whole("one two three"))
            assert f"data: {chunk().decode()}" == await anext(said)
            assert ["data: [DONE]"] == [event async for event in said]

    async def test_a_redis_that_stays_away_ends_the_stream(self, own_server: OwnServer, engine: ScriptedEngine) -> None:
        """With `interrupted`, and not with silence."""
        server = own_server()
        patience = Patience(0.1, outage=0.5)
        async with (
            gateway(server.url, patience=patience) as front,
            serving(server.url, engine, concurrency=1, reserve=0),
        ):
            asked = asyncio.create_task(told(front))
            request = await engine.next()
            request.say("one", chunk("one"))
            with server.client() as client:
                await until(lambda: client.hlen(KEYS.tries))
            server.kill()
            async with asyncio.timeout(10):
                _, came = await asked
            server.start()
            request.answer()
        assert "interrupted" == json.loads(came[-1].removeprefix("data: "))["error"]["code"]

    async def test_a_redis_that_forgot_the_job_is_said(self, own_server: OwnServer, engine: ScriptedEngine) -> None:
        """Its data is gone: 503, so that the client asks again (G13)."""
        server = own_server("--appendonly", "no")
        async with gateway(server.url) as front:
            asked = asyncio.create_task(_status(front))
            with server.client() as client:
                await until(lambda: client.hlen(KEYS.lanes))
                client.flushall()
            async with asyncio.timeout(10):
                assert (503, "request_lost") == await asked


async def test_a_stream_outlives_the_deploy_of_its_worker(redis_url: str) -> None:
    """The worker that drains finishes what it has begun; new calls go to the one that took its place (G6)."""
    old, new = ScriptedEngine(slots=1), ScriptedEngine(slots=1)
    async with gateway(redis_url) as front, serving(redis_url, old, concurrency=1, reserve=0, grace=20.0) as leaving:
        streaming = asyncio.create_task(told(front, "s"))
        request = await old.next()
        request.say("begun", chunk("begun"))
        leaving.shutdown.request()
        async with serving(redis_url, new, concurrency=1, reserve=0):
            plain = asyncio.create_task(_status(front))
            say_all(await new.next(), "elsewhere")
            assert (200, "") == await plain
            request.say("ended", chunk("ended"))
            request.say("", chunk())
            request.answer(body=whole("begunended"))
            _, came = await streaming
            assert 2 == sum("begun" in event or "ended" in event for event in came)
            assert "data: [DONE]" == came[-1]
            await leaving.stopped()


async def test_what_went_wrong_is_told_without_addresses(redis_url: str, redis: Redis) -> None:
    """A client learns what happened, and not where the engine is."""
    await configure(redis, attempts_interactive="1")
    fake = FakeEngine()
    fake.replies["/v1/chat/completions"] = b"this is no HTTP\r\n\r\n"
    async with (
        fake.serving(),
        opened(fake.url) as engine,
        serving(redis_url, engine, concurrency=1, reserve=0),
        gateway(redis_url) as front,
        front.chat() as response,
    ):
        assert 502 == response.status
        message = (await error_of(response))["message"]
    assert "no HTTP answer" in message
    assert "127.0.0.1" not in message
    assert fake.url.rpartition(":")[2] not in message


class TestDrain:
    """The gateway is asked to stop."""

    async def test_open_answers_end_within_the_grace(self, redis_url: str, engine: ScriptedEngine) -> None:
        """New connections are refused, what is open ends as it should."""
        async with serving(redis_url, engine, concurrency=2, reserve=0), gateway(redis_url) as front:
            streaming, plain = asyncio.create_task(told(front, "s")), asyncio.create_task(_status(front))
            requests = [await engine.next(), await engine.next()]
            front.shutdown.request()
            await until(lambda: _refused(front))
            for request in requests:
                say_all(request, "to the end")
            assert "data: [DONE]" == (await streaming)[1][-1]
            assert (200, "") == await plain
            async with asyncio.timeout(5):
                await asyncio.shield(front.task)

    async def test_after_the_grace_those_left_are_told(self, redis_url: str, engine: ScriptedEngine) -> None:
        """A stream ends with an error event, a plain call with 503; the engine stops working on both."""
        async with serving(redis_url, engine, concurrency=2, reserve=0), gateway(redis_url, grace=0.3) as front:
            streaming, plain = asyncio.create_task(told(front, "s")), asyncio.create_task(_status(front))
            requests = [await engine.next(), await engine.next()]
            for request in requests:
                request.say("begun", chunk("begun"))
            await until(lambda: _begun(redis_url))
            front.shutdown.request()
            _, came = await streaming
            assert "interrupted" == json.loads(came[-1].removeprefix("data: "))["error"]["code"]
            assert (503, "interrupted") == await plain
            async with asyncio.timeout(3):
                await asyncio.gather(*(request.aborted.wait() for request in requests))

    def test_the_command_ends_well(self, redis_url: str) -> None:
        """One line says where it serves; SIGTERM ends it with 0 and nothing is left."""
        with started("gateway", "--port", 0, url=redis_url) as process:
            line = process.until("/v1\n").splitlines()[-1]
            assert re.fullmatch(r"ready gateway .* this host only, no API keys: http://127\.0\.0\.1:\d+/v1", line)
            process.terminate()
            done = process.end()
        assert (0, "") == (done.code, done.out)


class TestCommand:
    """What `llmq gateway` refuses to begin with."""

    def test_other_hosts_are_not_served_without_keys(self, redis_url: str) -> None:
        """Unless told otherwise."""
        done = llmq("gateway", "--host", "0.0.0.0", url=redis_url)
        assert 2 == done.code
        assert "--anyone" in done.error
        with started("gateway", "--host", "0.0.0.0", "--anyone", "--port", 0, url=redis_url) as process:
            assert "any host, no API keys" in process.until("/v1\n")

    def test_without_its_packages_it_says_what_to_type(self, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """The extra has a name."""
        monkeypatch.setattr("llmq.cli.gateway._NEEDED", ("starlette", "no_such_package"))
        done = llmq("gateway", url=redis_url)
        assert 2 == done.code
        assert "pip install 'llmq-streams[gateway]'" in done.error

    def test_a_port_that_is_taken_is_said(self, redis_url: str) -> None:
        """With what to do."""
        with started("gateway", "--port", 0, url=redis_url) as process:
            port = process.until("/v1\n").rpartition(":")[2].split("/")[0]
            done = llmq("gateway", "--port", port, url=redis_url)
        assert 2 == done.code
        assert port in done.error


async def _status(front: Gateway) -> tuple[int, str]:
    async with front.chat() as response:
        if response.status == 200:
            await response.read()
            return 200, ""
        return response.status, (await error_of(response))["code"]


async def _refused(front: Gateway) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", front.port)
    except OSError:
        return True
    writer.close()
    return False


async def _begun(url: str) -> bool:
    client = Redis.from_url(url)
    try:
        return int(await client.hlen(KEYS.tries)) == 2
    finally:
        await client.aclose()
