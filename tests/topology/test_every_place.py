"""The whole of llmq on every way to Redis: Sentinel, Cluster, RESP3, TLS, a password, a unix socket (F-044).

The same tests on each: jobs, streams, batches, the command line. There is one code path behind all of them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pytest

from llmq import AsyncClient, Client, JobCancelled, JobState
from llmq.workers.engines.sim import SimEngine
from tests.conftest import PERMANENT_KEYS
from tests.redis.serving import serving, until
from tests.servers import Servers, client_of, free_port, process_kinds
from tests.system.cli_process import QUICK, ids, llmq, started, submitted, write_prompts
from tests.tls_files import make_tls_files
from tests.topologies import ClusterSet, SentinelSet
from tests.topology.conftest import OLDEST

BODY = {"messages": [{"role": "user", "content": "hello"}]}

#: Says about 24 words, in as many pieces, at once; and one word in ten seconds.
SIM = "sim://?instant=1"
ENDLESS = "sim://?decode_tps=1&answer=1000"


@dataclass(frozen=True, slots=True)
class Place:
    """A way to a Redis, and what it takes to empty it and to look at what was left there."""

    url: str
    flush: Callable[[], None]
    keys_without_ttl: Callable[[], list[str]]


def _set(servers: Servers, kind: str, which: type[SentinelSet] | type[ClusterSet], query: str = "") -> Place:
    found = which(servers, kind)
    return Place(found.url + query, found.flush, found.keys_without_ttl)


def _server(servers: Servers, kind: str, options: tuple[str, ...], url: str = "", password: str = "") -> Place:
    server = servers.private(kind, ("--appendonly", "no", *options))

    def flush() -> None:
        with client_of(server.url, password=password or None) as client:
            client.flushall()

    def left() -> list[str]:
        with client_of(server.url, password=password or None) as client:
            return [key.decode() for key in client.scan_iter(count=1000) if client.ttl(key) == -1]

    return Place(url.format(port=server.port) or f"{server.url}?protocol=3", flush, left)


def _tls(servers: Servers, kind: str, folder: Path) -> Place:
    files, port = make_tls_files(folder), free_port()
    query = f"ssl_ca_certs={files.ca}&ssl_certfile={files.certificate('client')}&ssl_keyfile={files.key('client')}"
    return _server(servers, kind, files.server_options(port, clients="yes"), f"rediss://127.0.0.1:{port}/0?{query}")


def _socket(servers: Servers, kind: str, folder: Path) -> Place:
    return _server(servers, kind, ("--unixsocket", str(folder / "s")), f"unix://{folder / 's'}?db=2")


PASSWORD = "p@ss/w:rd#%"

PLACES: dict[str, Callable[[Servers, Path], Place]] = {
    "sentinel": lambda servers, _: _set(servers, OLDEST, SentinelSet),
    "sentinel-valkey": lambda servers, _: _set(servers, "valkey", SentinelSet),
    "cluster": lambda servers, _: _set(servers, OLDEST, ClusterSet),
    "cluster-valkey-resp3": lambda servers, _: _set(servers, "valkey", ClusterSet, "?protocol=3"),
    "resp3": lambda servers, _: _server(servers, OLDEST, ()),
    "resp3-valkey": lambda servers, _: _server(servers, "valkey", ()),
    "password": lambda servers, _: _server(
        servers,
        OLDEST,
        ("--requirepass", PASSWORD),
        f"redis://:{quote(PASSWORD, safe='')}@127.0.0.1:{{port}}",
        PASSWORD,
    ),
    "unix-socket": lambda servers, folder: _socket(servers, "valkey", folder),
}


if "redis" in process_kinds():  # the embedded server has no TLS
    PLACES["tls"] = lambda servers, folder: _tls(servers, "redis", folder)


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """One way to Redis after the other; its servers live for all tests on it."""
    servers = Servers(tmp_path_factory.mktemp("places"))
    yield PLACES[request.param](servers, tmp_path_factory.mktemp("p"))
    servers.close()


@pytest.fixture
def url(place: Place) -> Iterator[str]:
    """The URL of an empty Redis; the test fails if it leaves a key for ever that is no setting (G11)."""
    place.flush()
    yield place.url
    assert [] == [key for key in place.keys_without_ttl() if not PERMANENT_KEYS.fullmatch(key)]


async def test_jobs_are_submitted_streamed_cancelled_and_found_again(url: str) -> None:
    """What a chat application does: G14 and the whole way of a single job (F-091, F-092)."""
    async with AsyncClient(url) as llmq, serving(url, SimEngine.from_url(SIM), concurrency=2):
        jobs = [await llmq.submit(BODY) for _ in range(5)]
        assert {200} == {(await job.result(20)).status_code for job in jobs}
        streamed = await llmq.submit(BODY)
        pieces = [delta.text async for delta in streamed.stream()]
        assert "".join(pieces) == (await streamed.result(20)).text
        once, again = [await llmq.submit(BODY, key="k") for _ in range(2)]
        assert once.id == again.id
        assert (await (await llmq.job(once.id)).result(20)).text
        assert JobState.COMPLETED == (await once.status()).state
    async with AsyncClient(url) as llmq:
        waiting = await llmq.submit(BODY)
        await waiting.cancel()
        with pytest.raises(JobCancelled):
            await waiting.result(20)


async def test_a_running_job_is_aborted_and_a_batch_goes_through(url: str) -> None:
    """Cancels reach the worker by its control list, results come back as a stream (G14, G16)."""
    async with AsyncClient(url) as llmq:
        async with serving(url, SimEngine.from_url(ENDLESS), concurrency=1) as one:
            running = await llmq.submit(BODY)
            await until(lambda: one.worker._slots.allowance().free == 0)
            async with asyncio.timeout(1.5):
                await running.cancel()
                with pytest.raises(JobCancelled):
                    await running.result()
        async with serving(url, SimEngine.from_url(SIM), concurrency=4):
            batch = await llmq.submit_batch([{"prompt": f"line {number}"} for number in range(40)])
            lines = [line async for line in batch.results()]
            assert (40, 40) == (len(lines), len({line.custom_id for line in lines}))
            assert "completed" == (await batch.wait(20)).status
            assert 1 == len((await llmq.status()).workers)


def test_the_blocking_client_and_the_command_line_do_the_same(url: str, tmp_path: Path) -> None:
    """Every verb that is used daily; the blocking client's submits take their own connections."""
    with started("worker", "--engine", QUICK, "--concurrency", "4", url=url) as worker:
        worker.until("ready ")
        with Client(url) as client:
            first = client.submit(BODY)
            assert "".join(delta.text for delta in first.stream()) == first.result(20).text
            assert {200} == {job.result(20).status_code for job in [client.submit(BODY) for _ in range(10)]}
        out = tmp_path / "out.jsonl"
        prompts = write_prompts(tmp_path / "p.jsonl", 8)
        done = llmq("submit-batch", prompts, "--wait", "-o", out, url=url)
        assert (0, ids(8)) == (done.code, sorted(json.loads(row)["custom_id"] for row in out.read_text().splitlines()))
        assert 0 == llmq("ask", "hello", url=url).code
        assert 0 == llmq("health", "--worker", _host(url), url=url).code
        worker.terminate()
        assert 0 == worker.end().code
    assert 0 == llmq("run", prompts, "-o", tmp_path / "run.jsonl", "--engine", QUICK, url=url).code
    batch_id = submitted(url, prompts)
    for verb in (
        ("batch", "pause", batch_id),
        ("rate", "5/s"),
        ("set", "deadline", "20s"),
        ("pause", "interactive"),
        ("status", "--json"),
        ("workers",),
        ("why", batch_id),
        ("batch", "resume", batch_id),
        ("batch", "cancel", batch_id, "--yes"),
        ("dead", "ls"),
    ):
        done = llmq(*verb, url=url)
        assert 0 == done.code, (verb, done.err)
    with started("worker", "--engine", QUICK, "--until-empty", url=url) as worker:
        assert 0 == worker.end().code


def _host(url: str) -> str:
    (worker,) = llmq("workers", "--json", url=url).json["workers"]
    return str(worker["id"])
