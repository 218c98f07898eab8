"""The tests' own servers do what the crash tests rely on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import redis

from tests.conftest import OwnServer
from tests.contract.project import ROOT, environment

RUN_THAT_IS_KILLED = """
import os, signal, sys
from pathlib import Path
from tests.servers import Servers
server = Servers(Path(sys.argv[1])).private(sys.argv[2])
print(server.url, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_each_test_finds_an_empty_server(redis_url: str) -> None:
    """What a test before this one left is gone."""
    with redis.Redis.from_url(redis_url) as client:
        assert client.dbsize() == 0
        client.set("with a TTL", 1, ex=60)


def test_a_killed_server_comes_back_with_its_data_on_its_port(own_server: OwnServer) -> None:
    """SIGKILL and restart keep what was written."""
    server = own_server()
    with server.client() as client:
        client.set("name", "value")
        before = server.url
        server.kill()
        with pytest.raises(redis.ConnectionError):
            client.ping()
        server.restart()
        assert (before, b"value") == (server.url, client.get("name"))


def test_a_frozen_server_answers_after_the_thaw(own_server: OwnServer) -> None:
    """SIGSTOP keeps the connection and the data; nobody answers meanwhile."""
    server = own_server()
    with server.client(socket_timeout=0.05) as client:
        client.set("name", "value")
        server.freeze()
        with pytest.raises(redis.TimeoutError):
            client.get("name")
        server.thaw()
    with server.client() as client:
        assert client.get("name") == b"value"


def test_no_server_outlives_a_test_run_that_is_killed(server_kind: str, tmp_path: Path) -> None:
    """The guardian ends the servers of a run that got SIGKILL: nothing is left on the developer's machine."""
    killed = subprocess.run(
        [sys.executable, "-c", RUN_THAT_IS_KILLED, str(tmp_path), server_kind],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    with redis.Redis.from_url(killed.stdout.strip(), retry=None) as client, pytest.raises(redis.ConnectionError):
        client.blpop(["nothing"], timeout=10)  # ends at once when the server does


TESTS_THAT_LEAVE_KEYS = """
import pytest
from tests.servers import client_of

def write(url, key, **options):
    with client_of(url) as client:
        client.set(key, 1, **options)

def test_a_lane(redis_url):
    write(redis_url, "llmq:{q}:lane:a")

@pytest.mark.leaves("llmq:{*}:lane:*")
def test_a_declared_lane(redis_url):
    write(redis_url, "llmq:{q}:lane:a")

def test_a_result(redis_url):
    write(redis_url, "llmq:{q}:job:a", ex=60)

@pytest.mark.parametrize("name", ["config", "dead", "keys:ann"])
def test_what_may_stay(redis_url, name):
    write(redis_url, "llmq:{q}:" + name)
"""


def test_a_test_that_leaves_a_key_without_a_ttl_fails(tmp_path: Path) -> None:
    """The fixture names the key; settings, dead letters, API keys and declared keys may stay (G11)."""
    tests = tmp_path / "test_keys.py"
    tests.write_text(TESTS_THAT_LEAVE_KEYS)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "tests.conftest", "-q"]
    run = subprocess.run(
        [*command, "--server", "valkey", "-p", "no:cacheprovider", str(tests)],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "left in Redis without a TTL: ['llmq:{q}:lane:a']" in run.stdout
    assert "6 passed, 1 error" in run.stdout
