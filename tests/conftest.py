"""Fixtures for all tests: a clean environment, real servers, and a check of what a test leaves in Redis.

A test that asks for `redis`, `redis_url` or `own_server` runs once for each kind of server at hand; tests in
`tests/system` and `tests/gateway`, and those that ask for `system_redis_url`, on the first kind only: they are slow.
`pytest --server redis` chooses one kind.
"""

from __future__ import annotations

import fnmatch
import itertools
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import llmq
from llmq.scheduler.server_folder import ServerFolder
from tests.servers import DURABLE, Server, Servers, client_of, kinds_at_hand, process_kinds, version_of

if TYPE_CHECKING:
    from redis.asyncio import Redis

SLOW_TESTS = {Path(__file__).parent / name for name in ("system", "gateway")}

#: What a drained queue may hold without a TTL (G11): its settings, the keys of its users, its dead letters.
PERMANENT_KEYS = re.compile(r"llmq:\{[^}]*\}:(config|dead|keys.*)")

#: `own_server(*options)` starts a private server; without options it keeps its data in an append-only file.
OwnServer = Callable[..., Server]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--server", choices=kinds_at_hand(), help="run on this kind of server only (default: on all)")
    parser.addoption("--installed", action="store_true", help="fail unless llmq is an installed wheel, not this tree")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "leaves(*patterns): keys without a TTL that this test may leave in Redis")
    if config.getoption("--installed") and "site-packages" not in Path(llmq.__file__).parts:
        raise pytest.UsageError(f"expected the installed llmq, found {llmq.__file__}: run with -o pythonpath=")


def pytest_report_header() -> str:
    servers = ", ".join(f"{kind} {version_of(binary)}" for kind, binary in process_kinds().items())
    return f"llmq: {Path(llmq.__file__).parent}; servers: {servers}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that needs a server on each kind that it can run on."""
    if "server_kind" not in metafunc.fixturenames:
        return
    chosen = metafunc.config.getoption("--server")
    kinds = [chosen] if chosen else list(kinds_at_hand())
    if "own_server" in metafunc.fixturenames:
        kinds = [kind for kind in kinds if kind in process_kinds()]
    slow = not SLOW_TESTS.isdisjoint(metafunc.definition.path.parents)
    if slow or "system_redis_url" in metafunc.fixturenames:
        kinds = kinds[:1]
    metafunc.parametrize("server_kind", kinds, scope="session")


@pytest.fixture(scope="session")
def homes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders that do not exist yet, as many as are asked for."""
    base = tmp_path_factory.mktemp("homes")
    return (base / str(number) for number in itertools.count())


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, homes: Iterator[Path]) -> Iterator[None]:
    """Hide the developer's own settings and data from the test, and from the processes that it starts.

    The test fails if it leaves the embedded server of its own home running.
    """
    for name in list(os.environ):
        if name.startswith("LLMQ_"):
            monkeypatch.delenv(name)
    home = next(homes)
    monkeypatch.setenv("LLMQ_HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "config"))
    yield
    if (folder := ServerFolder(home)).is_held():
        os.kill(int(folder.pid_file.read_text()), signal.SIGKILL)
        pytest.fail("left its embedded server running: end the test with `llmq server stop`", pytrace=False)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """All servers of this run; they end with it."""
    running = Servers(tmp_path_factory.mktemp("servers"))
    yield running
    running.close()


@pytest.fixture
def redis_url(server_kind: str, servers: Servers, request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of an empty server. The test fails if it leaves a key without a TTL that it does not declare."""
    url = servers.shared(server_kind).url
    with client_of(url) as client:
        client.flushall()
        yield url
        declared = [pattern for mark in request.node.iter_markers("leaves") for pattern in mark.args]
        keys = sorted(key.decode(errors="replace") for key in client.scan_iter(count=1000) if client.ttl(key) == -1)
        left = [key for key in keys if not _may_stay(key, declared)]
    if left:
        pytest.fail(f"left in Redis without a TTL: {left[:20]} (delete them, or mark: leaves(pattern))", pytrace=False)


@pytest.fixture
def system_redis_url(redis_url: str) -> str:
    """As `redis_url`, on the first kind of server only."""
    return redis_url


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """The client that llmq itself uses, on an empty server."""
    from llmq.scheduler.connection import connect

    client = connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
def own_server(server_kind: str, servers: Servers) -> Iterator[OwnServer]:
    """Start private servers, which the test may kill, freeze and start again: `own_server(*options)`."""

    def start(*options: str) -> Server:
        return servers.private(server_kind, options or DURABLE)

    yield start
    servers.close_private()


def _may_stay(key: str, declared: list[str]) -> bool:
    return PERMANENT_KEYS.fullmatch(key) is not None or any(fnmatch.fnmatchcase(key, glob) for glob in declared)
