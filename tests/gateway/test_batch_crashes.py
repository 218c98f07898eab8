"""Gateways that are killed in the middle of a batch: another one goes on, and each line has one result."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from redis.asyncio import Redis

from llmq.scheduler.keys import QueueKeys
from llmq.workers.engines.sim import SimEngine
from tests.conftest import OwnServer
from tests.gateway.batch_gateway import (
    QUICK,
    STEPS,
    Served,
    created,
    each_line_once,
    ended,
    gateway,
    gateway_process,
    jsonl,
    line,
    questions,
    until_status,
    uploaded,
)
from tests.redis.serving import serving, until

#: Of the lines, every tenth is one that the engine refuses: both files are made.
LINES = 40


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold, look and gather in a tenth of the time."""
    for module, name, value in QUICK:
        monkeypatch.setattr(module, name, value)


def mixed() -> bytes:
    """Return an input with good lines and such that the engine refuses."""
    refused: dict[str, Any] = {"max_tokens": 10_000_000, "ignore_eos": True}
    return jsonl([line(n, **(refused if n % 10 == 0 else {})) for n in range(1, LINES + 1)])


#: Each step at which the first gateway kills itself, and how often it has been done then: uploads add a file too.
DEATHS = [
    "enter:1", "examine:1", "accept:1", "life:1", "open:1", "chunk:1", "part:1", "part:3", "tell:1", "tell:3",
    "file:2", "file:3", "end:1", "close:1", *(f"write:{n}" for n in range(4, 12)),
]  # fmt: skip


def test_every_step_is_tried() -> None:
    """No step of a batch is left out below."""
    assert set(STEPS) == {death.partition(":")[0] for death in DEATHS}


@pytest.mark.parametrize("death", DEATHS)
async def test_a_gateway_killed_after_any_step_is_followed_by_another(
    system_redis_url: str, tmp_path: Path, death: str
) -> None:
    """What it had written is gone on with; every line ends in exactly one line of the files (G1, G16).

    Redis has room for few results: those that were told to be in the storage are trimmed at once.
    """
    redis = Redis.from_url(system_redis_url)
    await redis.hset(QueueKeys("default").config, "results_max_bytes", "2000")
    await redis.aclose()
    async with serving(system_redis_url, SimEngine.from_url("sim://?instant=1"), concurrency=4):
        with gateway_process(system_redis_url, tmp_path, die=death) as (first, process):
            client = first.client()
            file_id = await uploaded(client, mixed())
            with contextlib.suppress(openai.APIConnectionError):
                await client.batches.create(
                    input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
                )
            assert -signal.SIGKILL == await asyncio.to_thread(process.wait, 30)
            await client.close()
        async with gateway(system_redis_url, tmp_path) as second:
            client = second.client()
            (batch,) = (await client.batches.list()).data
            batch = await ended(client, batch.id)
            assert "completed" == batch.status
            output, errors = await each_line_once(client, batch, LINES)
            assert (LINES - LINES // 10, LINES // 10) == (len(output), len(errors))
            assert {"batch", "batch_output"} == {file.purpose for file in (await client.files.list()).data}
            assert 3 == len((await client.files.list()).data)
            await nothing_left(system_redis_url, tmp_path)


@pytest.mark.parametrize("death", ["write:1", "write:2", "write:3"])
async def test_what_was_cut_off_before_it_was_whole_never_was(
    system_redis_url: str, tmp_path: Path, death: str
) -> None:
    """A gateway that dies within an upload, or while it takes a batch up, leaves nothing that anybody sees."""
    with gateway_process(system_redis_url, tmp_path, die=death) as (first, process):
        client = first.client()
        with pytest.raises(openai.APIConnectionError):
            await created(client, mixed())
        assert -signal.SIGKILL == await asyncio.to_thread(process.wait, 30)
        await client.close()
    async with gateway(system_redis_url, tmp_path) as second:
        client = second.client()
        assert [] == (await client.batches.list()).data
        # An upload is there once its record is, whether its client was told or not.
        assert (0 if death == "write:1" else 1) == len((await client.files.list()).data)
        batch = await ended(client, (await created(client, b"{")).id)
        assert "failed" == batch.status


async def nothing_left(url: str, files: Path) -> None:
    """Wait until neither the storage nor Redis holds what only a running batch needs."""
    root = files / "queue-default"
    await until(lambda: [] == os.listdir(root / "open"))
    assert [] == os.listdir(root / "parts")
    redis = Redis.from_url(url)
    await until(lambda: _no_batches(redis))
    await redis.aclose()


async def _no_batches(redis: Redis) -> bool:
    return await redis.zcard(QueueKeys("default").batches) == 0


@contextlib.contextmanager
def two_gateways(url: str, files: Path) -> Iterator[list[tuple[Served, subprocess.Popen[bytes]]]]:
    """Two gateways on one storage and one Redis."""
    with gateway_process(url, files) as one, gateway_process(url, files) as other:
        yield [one, other]


@pytest.mark.parametrize("seed", [1, 2])
async def test_of_two_gateways_one_is_killed_at_any_moment(system_redis_url: str, tmp_path: Path, seed: int) -> None:
    """Batches are given to both; those that the dead one led end by the other (G16)."""
    chance = random.Random(seed)
    async with serving(system_redis_url, SimEngine.from_url("sim://?instant=1"), concurrency=4):
        with two_gateways(system_redis_url, tmp_path) as ((one, killed), (other, _)):
            clients = [one.client(), other.client()]
            ids = [(await created(clients[n % 2], questions(100))).id for n in range(6)]
            await asyncio.sleep(chance.uniform(0.0, 0.5))
            killed.kill()
            for batch_id in ids:
                batch = await ended(clients[1], batch_id)
                assert "completed" == batch.status
                await each_line_once(clients[1], batch, 100)
            for client in clients:
                await client.close()


async def test_a_gateway_that_slept_does_no_harm(system_redis_url: str, tmp_path: Path) -> None:
    """One that was frozen past its hold finds it lost; what it may still write late changes nothing (G3)."""
    with two_gateways(system_redis_url, tmp_path) as ((one, frozen), (other, _)):
        clients = [one.client(), other.client()]
        batch_id = (await created(clients[0], questions(60))).id
        await until_status(clients[0], batch_id, "in_progress")
        async with serving(system_redis_url, SimEngine.from_url("sim://?slots=4&decode_tps=200"), concurrency=4):
            await asyncio.sleep(0.3)
            frozen.send_signal(signal.SIGSTOP)
            batch = await ended(clients[1], batch_id)
            frozen.send_signal(signal.SIGCONT)
            await each_line_once(clients[0], batch, 60)
        assert batch == await clients[0].batches.retrieve(batch_id)
        for client in clients:
            await client.close()


async def test_a_restart_of_the_gateway_loses_nothing(system_redis_url: str, tmp_path: Path) -> None:
    """A batch waits while no gateway runs, and goes on with the next one."""
    async with gateway(system_redis_url, tmp_path) as served:
        batch_id = (await created(served.client(), questions(20))).id
        await until_status(served.client(), batch_id, "in_progress")
    async with (
        serving(system_redis_url, SimEngine.from_url("sim://?instant=1"), concurrency=4),
        gateway(system_redis_url, tmp_path) as served,
    ):
        batch = await ended(served.client(), batch_id)
        assert "completed" == batch.status
        await each_line_once(served.client(), batch, 20)


class TestRedis:
    """Redis that goes away, and that comes back with nothing."""

    async def test_a_redis_that_restarts_is_waited_for(self, own_server: OwnServer, tmp_path: Path) -> None:
        """With its data there: the batch goes on where it was (G12)."""
        server = own_server()
        async with gateway(server.url, tmp_path) as served:
            client = served.client(max_retries=10)
            batch_id = (await created(client, questions(50))).id
            await until_status(client, batch_id, "in_progress")
            server.kill()
            with pytest.raises(openai.InternalServerError) as refused:
                await served.client().batches.retrieve(batch_id)
            assert 503 == refused.value.status_code
            assert "retry-after" in refused.value.response.headers
            server.restart()
            async with serving(server.url, SimEngine.from_url("sim://?instant=1"), concurrency=4):
                batch = await ended(client, batch_id)
            await each_line_once(client, batch, 50)

    async def test_a_redis_that_comes_back_empty_runs_what_has_no_result_again(
        self, own_server: OwnServer, tmp_path: Path
    ) -> None:
        """Lines whose results are in the storage are not run again; the batch ends with all (G12, G13, G16)."""
        server = own_server()
        async with gateway(server.url, tmp_path) as served:
            client = served.client(max_retries=10)
            batch_id = (await created(client, questions(60))).id
            await until_status(client, batch_id, "in_progress")
            engine = SimEngine.from_url("sim://?slots=4&decode_tps=200")
            async with serving(server.url, engine, concurrency=4):
                await until(lambda: any((tmp_path / "queue-default" / "parts" / batch_id).glob("*.jsonl")))
                with server.client() as plain:
                    plain.flushall()
                batch = await ended(client, batch_id)
            assert "completed" == batch.status
            await each_line_once(client, batch, 60)
            assert batch.usage is not None
            assert batch.usage.total_tokens >= 60
