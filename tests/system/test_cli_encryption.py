"""Encryption from the command line: a key in the environment or a file, shown nowhere."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from llmq.scheduler.keyring import new_key
from llmq.workers.engines.engine_process import others_environment
from tests.conftest import OwnServer
from tests.redis.test_encryption import holds_marker
from tests.system.cli_process import QUICK, llmq, started

pytestmark = pytest.mark.leaves("llmq:*")

MARKED = {"messages": [{"role": "user", "content": "xyzzy-Marker-42"}]}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A file of prompts that hold the marker."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(f"{json.dumps(MARKED)}\n" * 20)
    return file


def test_run_submit_ask_and_results_work_with_a_key_and_leave_nothing_to_read(
    own_server: OwnServer, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same commands as without one; the key is in a file, as a service has it."""
    server, key, out = own_server(), tmp_path / "llmq.key", tmp_path / "out.jsonl"
    key.write_text(llmq("config", "--new-key").out)
    monkeypatch.setenv("LLMQ_ENCRYPTION_KEY_FILE", str(key))
    done = llmq("run", prompts, "-o", out, "--engine", QUICK, url=server.url)
    assert (0, 20) == (done.code, len(out.read_bytes().splitlines())), done.err
    batch = llmq("submit-batch", prompts, url=server.url).out.strip()
    assert [] == holds_marker(server.url, server.folder)
    with started("worker", "--engine", QUICK, url=server.url) as worker:
        worker.until("ready ")
        asked = llmq("ask", "xyzzy-Marker-42", url=server.url)
        assert (0, True) == (asked.code, bool(asked.out.strip())), asked.err
        results = llmq("batch", "results", batch, "--follow", url=server.url)
        assert (0, 20) == (results.code, len(results.out.splitlines())), results.err
    assert [] == holds_marker(server.url, server.folder)


def test_without_the_key_each_command_says_which_one_it_needs(
    system_redis_url: str, prompts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line and exit code 2; what shows no text works all the same."""
    url = system_redis_url
    with monkeypatch.context() as patch:
        patch.setenv("LLMQ_ENCRYPTION_KEY", new_key())
        batch = llmq("submit-batch", prompts, url=url).out.strip()
    for command in (
        ("worker", "--engine", QUICK),
        ("submit-batch", prompts),
        ("submit-batch", prompts, "--resume", batch),
        ("ask", "hello"),
    ):
        done = llmq(*command, url=url)
        assert 2 == done.code
        assert done.error.startswith("queue 'default' is encrypted with key "), done.err
        assert "set LLMQ_ENCRYPTION_KEY" in done.error
    for readable in (("status",), ("batch", "ls"), ("why", batch), ("batch", "cancel", batch, "--yes")):
        assert 0 == llmq(*readable, url=url).code


def test_a_key_shows_in_no_output_and_reaches_no_other_program(
    system_redis_url: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in `config`, not in an error, not in the environment of an engine; and there is no flag for it."""
    key = new_key()
    monkeypatch.setenv("LLMQ_ENCRYPTION_KEY", key)
    shown = [llmq("config"), llmq("config", "--json"), llmq("submit-batch", prompts, url=system_redis_url)]
    (tmp_path / "llmq.toml").write_text(f'encryption_key = "{key}"\nqueue = "no such name"\n')
    shown += [llmq("config", folder=tmp_path), llmq("worker", "--encryption-key", key)]
    monkeypatch.setenv("LLMQ_ENCRYPTION_KEY", f"{key},{key[:-5]}")
    shown.append(llmq("status", url=system_redis_url))
    assert [0, 0, 0, 2, 2, 2] == [done.code for done in shown]
    for done in shown:
        assert key[:-5] not in done.out + done.err
    assert "LLMQ_ENCRYPTION_KEY" in os.environ
    assert [] == [name for name in others_environment() if name.startswith("LLMQ_")]


def test_a_new_key_is_one_line(tmp_path: Path) -> None:
    """It goes into a file as it is, and is another one each time."""
    first, second = llmq("config", "--new-key").out, llmq("config", "--new-key", "--json").json["key"]
    assert (45, 44) == (len(first), len(second))
    assert first.strip() != second
