"""What a worker's operator reads: the log of a real worker, in both forms."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from llmq.scheduler.keys import QueueKeys
from tests.conftest import OwnServer
from tests.system.cli_process import QUICK, Started, llmq, started, submitted, until, write_prompts

pytestmark = pytest.mark.leaves("llmq:*")

KEYS = QueueKeys("default")


@pytest.fixture
def url(system_redis_url: str) -> str:
    """The URL of an empty server."""
    return system_redis_url


def events(worker: Started) -> list[dict[str, Any]]:
    """Return what a worker has said since it serves, each line of which must be JSON."""
    lines = worker.said[worker.said.index("{") :].splitlines()
    return [json.loads(line) for line in lines]


def test_a_worker_tells_what_happens_in_json(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ready, engine down and back, a changed setting, a dead letter, drained: each one line, and no text of a job."""
    monkeypatch.setenv("LLMQ_LOG_FORMAT", "json")
    monkeypatch.setenv("LLMQ_LOG_LEVEL", "info")
    engine = "sim://?slots=2&instant=1&poison=xyzzy&down=0.5"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "xyzzy"}]}) + "\n")
    with started("worker", "--engine", engine, url=url) as worker:
        worker.until('"notice"')
        llmq("set", "deadline", "17s", url=url)
        worker.until('"settings_changed"')
        submitted(url, prompts)
        worker.until('"engine_back"', 3)
        worker.until('"dead_letter"')
        worker.terminate()
        worker.until('"drained"')
        said = events(worker)
        worker.end()
    by_name = {event["event"]: event for event in said}
    assert by_name["notice"]["text"].startswith("ready ")
    assert "17000" == by_name["settings_changed"]["deadline"]
    assert (3, 3) == tuple(sum(e["event"] == name for e in said) for name in ("engine_down", "engine_back"))
    assert ("worker_lost", 2) == (by_name["dead_letter"]["code"], by_name["dead_letter"]["crashes"])
    assert 1 == by_name["drained"]["failed"]
    assert "xyzzy" not in json.dumps([event for event in said if event["event"] != "notice"]).replace(engine, "")


def test_a_worker_is_quiet_by_default(url: str, tmp_path: Path) -> None:
    """Of a life without trouble: that it is ready, and what it did."""
    batch = submitted(url, write_prompts(tmp_path / "prompts.jsonl", 20))
    with started("worker", "--engine", QUICK, "--until-empty", url=url) as worker:
        done = worker.end()
    assert batch
    assert ["ready", "ended"] == [line.split()[0] for line in done.err.splitlines()][-2:]
    assert "WARNING" not in done.err


def test_redis_that_goes_and_comes_back_is_told(own_server: OwnServer) -> None:
    """Once each, without the password of its URL; the worker goes on (G12)."""
    server = own_server()
    with started("worker", "--engine", QUICK, url=server.url) as worker:
        worker.until("ready ")
        server.kill()
        worker.until("WARNING redis_lost")
        server.start()
        worker.until("WARNING redis_back away_s=")
        worker.terminate()
        assert 0 == worker.end().code


def test_a_worker_that_was_killed_is_told_by_the_one_that_takes_over(url: str, tmp_path: Path) -> None:
    """G5: how many jobs of which lane."""
    llmq("set", "lease", "1s", url=url)
    batch = submitted(url, write_prompts(tmp_path / "prompts.jsonl", 1, max_tokens=100_000, ignore_eos=True))
    slow = "sim://?slots=2&decode_tps=10&kv_tokens=1000000"
    with started("worker", "--engine", slow, url=url) as first, started("worker", "--engine", slow, url=url) as second:
        first.until("ready ")
        second.until("ready ")

        def holder() -> str:
            busy = [one["pid"] for one in llmq("workers", "--json", url=url).json["workers"] if one["busy"]]
            return str(busy[0]) if busy else ""

        until(lambda: bool(holder()), "one of them to run it")
        victim, heir = (first, second) if holder() == str(first.process.pid) else (second, first)
        victim.kill()
        assert f"reclaimed lane=batch:{batch} jobs=1" in heir.until("WARNING reclaimed")


def test_a_wrong_level_is_refused(url: str) -> None:
    """Before anything is done; the choices are named."""
    done = llmq("worker", "--engine", QUICK, "--log-level", "loud", url=url)
    assert (2, True) == (done.code, "'debug', 'info', 'warning' or 'error'" in done.error)
    assert "LLMQ_LOG_LEVEL" not in os.environ
