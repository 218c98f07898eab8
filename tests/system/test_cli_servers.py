"""The command line on servers that cannot be used: exit 4, one line with the next step, nothing half queued."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import OwnServer
from tests.system.cli_process import answering, free_port, llmq, started, write_prompts


def test_a_server_that_is_away(tmp_path: Path) -> None:
    """The line names the URL without its password."""
    url = f"redis://:hush@127.0.0.1:{free_port()}/0"
    for words in (("submit-batch", write_prompts(tmp_path / "p.jsonl", 1)), ("ask", "x"), ("status",)):
        done = llmq(*words, url=url)
        assert (4, "") == (done.code, done.out)
        assert "cannot be reached" in done.error
        assert "hush" not in done.err


def test_a_server_that_wants_a_password(own_server: OwnServer) -> None:
    """The line says where to put it."""
    done = llmq("status", url=own_server("--requirepass", "hush").url)
    assert 4 == done.code
    assert "LLMQ_REDIS_URL" in done.error


def test_a_replica(own_server: OwnServer, tmp_path: Path) -> None:
    """It takes no writes, and says whose replica it is."""
    done = llmq(
        "submit-batch",
        write_prompts(tmp_path / "p.jsonl", 1),
        url=own_server("--replicaof", f"127.0.0.1 {free_port()}").url,
    )
    assert 4 == done.code
    assert "replica" in done.error


def test_a_database_that_does_not_exist(own_server: OwnServer) -> None:
    """A number that is too high is a wrong URL, and nothing unexpected."""
    done = llmq("status", url=f"{own_server().url.removesuffix('/0')}/99")
    assert 4 == done.code
    assert "has no database of that number" in done.error


def test_a_server_that_is_no_sentinel(own_server: OwnServer) -> None:
    """The line says which scheme it is."""
    address = own_server().url.partition("://")[2].removesuffix("/0")
    for words in (("status",), ("ask", "x")):
        done = llmq(*words, url=f"redis+sentinel://{address}/main")
        assert 4 == done.code
        assert "redis:// instead of redis+sentinel://" in done.error


def test_a_run_on_a_full_server_says_what_it_waits_for(own_server: OwnServer, tmp_path: Path) -> None:
    """A bar that stands still would tell nobody why (G13)."""
    server = own_server("--maxmemory-policy", "noeviction")
    with server.client() as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] + (3 << 20))
    prompts = write_prompts(tmp_path / "p.jsonl", 3000, user="x" * 3000)
    with started("run", prompts, "--engine", "sim://?slots=1&decode_tps=1", url=server.url) as run:
        assert "delete batches that are done" in run.until("Redis is full")
        run.interrupt()
        run.interrupt()
        assert 130 == run.end().code


def test_a_server_that_is_full(own_server: OwnServer, tmp_path: Path) -> None:
    """Without waiting it is said at once, and no part of the file stays queued."""
    server = own_server("--maxmemory", "1", "--maxmemory-policy", "noeviction")
    done = llmq("submit-batch", write_prompts(tmp_path / "p.jsonl", 3), "--no-wait", url=server.url)
    assert (4, "") == (done.code, done.out)
    assert "full" in done.error or "maxmemory" in done.error
    with server.client() as client:
        assert [] == client.keys("*")


def test_a_server_that_may_evict_is_warned_of_once(own_server: OwnServer, tmp_path: Path) -> None:
    """The work goes on: some people know what they are doing (F-026, F-094)."""
    server = own_server("--maxmemory-policy", "allkeys-lru", "--appendonly", "yes")
    done = llmq("submit-batch", write_prompts(tmp_path / "p.jsonl", 3), url=server.url)
    assert 0 == done.code
    assert 1 == done.err.count("maxmemory-policy is allkeys-lru")


def test_a_server_that_is_too_old() -> None:
    """The line names the versions that will do."""
    info = b"redis_version:6.2.14\r\nredis_mode:standalone\r\nrole:master\r\n"

    def answer(asked: bytes) -> bytes:
        replies = {b"INFO": b"$%d\r\n%s\r\n" % (len(info), info), b"PING": b"+PONG\r\n"}
        commands = [words.split(b"\r\n") for words in asked.split(b"*")[1:]]
        return b"".join(replies.get(words[2], b"+OK\r\n") for words in commands)

    with answering(answer) as port:
        done = llmq("status", url=f"redis://127.0.0.1:{port}")
    assert 4 == done.code
    assert "6.2.14" in done.error
    assert "7.0" in done.error


def test_what_is_no_redis() -> None:
    """A web server on the port is not waited for."""
    with answering(lambda asked: b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n") as port:
        done = llmq("status", url=f"redis://127.0.0.1:{port}")
    assert 4 == done.code
    assert str(port) in done.error
