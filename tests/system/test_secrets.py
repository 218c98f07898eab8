"""Secrets show nowhere: not in outputs, errors, logs, `--json`, heartbeats, Redis, or the arguments of a process."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis import Redis

from llmq.scheduler.keyring import new_key
from tests.servers import client_of
from tests.system.cli_process import QUICK, Done, answering, free_port, llmq, started, write_prompts

PASSWORD = "p4ssw0rd-of-redis-0f3a"
ENGINE_KEY = "sk-key-of-the-engine-77c1"
PROMPT = "the-words-of-a-prompt-5be2"

READS = [
    ["status"], ["status", "--json"], ["workers"], ["workers", "--json"], ["config"], ["config", "--json"],
    ["doctor"], ["doctor", "--json"], ["health"], ["health", "--json"], ["keys", "ls"], ["keys", "ls", "--json"],
    ["batch", "ls", "--json"], ["dead", "ls", "--json"], ["set", "--json"], ["rate"], ["why", "unknown"],
]  # fmt: skip


@pytest.fixture
def client(system_redis_url: str) -> Iterator[Redis]:
    """A server with a user who has a password."""
    with client_of(system_redis_url) as client:
        client.execute_command("ACL", "SETUSER", "llmq", "on", f">{PASSWORD}", "~*", "&*", "+@all")
        yield client
        client.execute_command("ACL", "DELUSER", "llmq")
        client.flushall()


@pytest.fixture
def url(client: Redis, system_redis_url: str) -> str:
    """The URL with that user's password."""
    return f"redis://llmq:{PASSWORD}@{urlsplit(system_redis_url).netloc}/0"


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What may show nowhere; all of it is in the environment."""
    key = new_key()
    monkeypatch.setenv("LLMQ_ENGINE_API_KEY", ENGINE_KEY)
    monkeypatch.setenv("LLMQ_ENCRYPTION_KEY", key)
    return [PASSWORD, ENGINE_KEY, key]


def stored(client: Redis) -> str:
    """Return all that Redis holds, as one text."""
    read: dict[bytes, Any] = {
        b"hash": client.hgetall, b"string": client.get, b"stream": client.xrange, b"set": client.smembers,
        b"list": lambda name: client.lrange(name, 0, -1), b"zset": lambda name: client.zrange(name, 0, -1),
    }  # fmt: skip
    kinds: dict[bytes, Any] = {name: client.type(name) for name in client.scan_iter(count=1000)}
    return "".join(f"{name!r}{read[kind](name)!r}" for name, kind in kinds.items() if kind != b"none")


def arguments(pid: int) -> str:
    """Return what `ps` shows of a process and of those that it started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return "".join(Path(f"/proc/{one}/cmdline").read_text() for one in (pid, *children))


def asked(port: int, key: str) -> str:
    """Ask a gateway with a key; return what it answers, with its status."""
    body = json.dumps({"model": "sim", "messages": [{"role": "user", "content": PROMPT}]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/chat/completions", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return f"{answer.status} {answer.headers} {answer.read().decode()}"
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.headers} {error.read().decode()}"


def said(done: Done) -> str:
    """Return all that a command printed."""
    return done.out + done.err


def test_no_secret_of_a_fleet_shows_anywhere(client: Redis, url: str, secrets: list[str], tmp_path: Path) -> None:
    """A worker, a gateway and every command, with all kinds of secrets: none is printed, stored or an argument."""
    made = llmq("keys", "create", "--tenant", "anna", url=url).out.strip()
    port = free_port()
    seen = []
    with (
        started("worker", "--engine", QUICK, "--log-level", "debug", url=url) as worker,
        started("gateway", "--port", port, "--log-level", "debug", url=url) as gateway,
    ):
        worker.until("ready ")
        gateway.until(f":{port}")
        good, bad = asked(port, made), asked(port, made[:-4] + "beef")
        assert good.startswith("200 "), good
        assert bad.startswith("401 "), bad
        prompts, output = write_prompts(tmp_path / "prompts.jsonl", 3), tmp_path / "out.jsonl"
        seen += [said(llmq("submit-batch", prompts, "--wait", "-o", output, url=url))]
        seen += [said(llmq(*words, url=url)) for words in READS]
        held = stored(client)
        assert PROMPT not in held
        seen += [bad, held, arguments(worker.process.pid), arguments(gateway.process.pid)]
        for process in (worker, gateway):
            process.terminate()
            seen.append(said(process.end()))
    for secret in (*secrets, made, made.rpartition("-")[2]):
        assert [] == [text[:2000] for text in seen if secret in text]


@pytest.mark.parametrize(
    "broken",
    [
        "redis://llmq:{}@127.0.0.1:1/0",
        "redis://llmq:{}@127.0.0.1:no-port/0",
        "redis://llmq:{}@[::1/0",
        "redis://llmq:{}@127.0.0.1/0?password={}&timeout=5",
        "http://llmq:{}@127.0.0.1/0",
        "redis://:{}#@127.0.0.1:1/x",
        "rediss+sentinel://llmq:{}@127.0.0.1:1/s?sentinel_password={}",
    ],
)
def test_an_error_about_a_url_hides_its_password(broken: str, secrets: list[str]) -> None:
    """Whatever is wrong with a URL or behind it, the message shows the URL without its secrets."""
    address = broken.replace("{}", PASSWORD)
    for words in (["status"], ["status", "--json"], ["config"], ["doctor"], ["health"]):
        done = llmq(*words, url=address)
        assert PASSWORD not in said(done), words


def test_an_engine_that_refuses_the_key_is_told_without_it(url: str, secrets: list[str], tmp_path: Path) -> None:
    """The engine's key goes to the engine alone: what is printed about its refusal does not hold it."""
    heard: list[bytes] = []

    def refuse(request: bytes) -> bytes:
        heard.append(request)
        return b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"

    with answering(refuse) as port:
        prompts = write_prompts(tmp_path / "prompts.jsonl", 1)
        done = llmq("run", prompts, "-o", tmp_path / "out.jsonl", "--engine", f"http://127.0.0.1:{port}", url=url)
    assert any(ENGINE_KEY.encode() in request for request in heard)
    output = tmp_path / "out.jsonl"
    assert ENGINE_KEY not in said(done) + (output.read_text() if output.exists() else "")
