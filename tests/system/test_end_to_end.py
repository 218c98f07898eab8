"""The whole way, as a user goes it: real prompts, real processes, a real engine, and what is killed on the way."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from llmq.scheduler.connection import connect_sync
from llmq.scheduler.embedded import server_status, stop_server
from tests.engine import LlamaServer, llama_server
from tests.system.cli_process import SLOW, llmq, started, until

PROMPTS = Path(__file__).parents[2] / "examples" / "gsm8k-50.jsonl"


@pytest.fixture(scope="module")
def engine() -> Iterator[LlamaServer]:
    """llama.cpp with the tiny model, eight slots."""
    with llama_server(slots=8) as server:
        yield server


@pytest.fixture
def home() -> Iterator[Path]:
    """The folder of an embedded server that ends with the test."""
    folder = Path(os.environ["LLMQ_HOME"])
    yield folder
    stop_server(folder)


def short_prompts(folder: Path, *, copies: int = 1, max_tokens: int = 32) -> tuple[Path, list[str]]:
    """Write the 50 real prompts with short answers; return the file and its custom_ids."""
    path, ids = folder / "prompts.jsonl", []
    with path.open("w") as file:
        for copy in range(copies):
            for text in PROMPTS.read_text().splitlines():
                line = json.loads(text)
                line["custom_id"] += f"-{copy}"
                line["body"]["max_tokens"] = max_tokens
                ids.append(line["custom_id"])
                file.write(json.dumps(line) + "\n")
    return path, ids


def answers(path: Path) -> list[dict[str, Any]]:
    """Return the result lines of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def has_lines(path: Path, least: int) -> bool:
    """Whether a file that is being written has this many lines."""
    return path.exists() and len(path.read_bytes().splitlines()) >= least


def test_fifty_real_prompts_are_answered_by_a_real_engine(home: Path, engine: LlamaServer, tmp_path: Path) -> None:
    """`llmq run` on the embedded server: every line has one whole answer, in the order of the file (G16)."""
    prompts, ids = short_prompts(tmp_path)
    out = tmp_path / "out.jsonl"
    done = llmq("run", prompts, "--engine", engine.url, "--ordered", "-o", out, folder=tmp_path)
    assert 0 == done.code, done.err
    assert "50 lines ok, 0 failed" in done.err
    assert ids == [answer["custom_id"] for answer in answers(out)]
    for answer in answers(out):
        body = answer["response"]["body"]
        assert (200, None) == (answer["response"]["status_code"], answer["error"])
        assert body["choices"][0]["finish_reason"] in ("stop", "length")
        assert 0 < body["usage"]["completion_tokens"] <= 32


def test_an_embedded_server_that_is_killed_in_mid_run_loses_nothing(home: Path, tmp_path: Path) -> None:
    """It is started again by the run, with all that it acknowledged; every line is answered once (G1, G3, G12)."""
    prompts, ids = short_prompts(tmp_path, max_tokens=64)
    out = tmp_path / "out.jsonl"
    with started("run", prompts, "--engine", f"{SLOW}&slots=8", "-o", out) as process:
        for least in (5, 20):
            until(partial(has_lines, out, least), f"{least} lines")
            until(lambda: server_status(home).state == "running", "the server, which may have been killed a moment ago")
            status = server_status(home)
            assert status.pid is not None
            assert status.url is not None
            with contextlib.closing(connect_sync(status.url)) as client:
                client.config_set("appendfsync", "always")  # else writes wait in memory while a slow sync runs
            os.kill(status.pid, signal.SIGKILL)
        assert 0 == process.end().code
    assert Counter(ids) == Counter(answer["custom_id"] for answer in answers(out))


def test_two_workers_share_batch_chat_goes_first_and_a_killed_one_loses_nothing(
    system_redis_url: str, engine: LlamaServer, tmp_path: Path
) -> None:
    """Chat is answered while batch waits, and SIGKILL of a worker fails no line and doubles none (G3, G5, G9)."""
    prompts, ids = short_prompts(tmp_path, copies=3, max_tokens=64)
    out = tmp_path / "out.jsonl"
    assert 0 == llmq("set", "lease", "2s", url=system_redis_url).code
    assert 0 == llmq("rate", "40/s", "--burst", "8", url=system_redis_url).code
    worker = ("worker", "--engine", engine.url, "--concurrency", "4", "--gpu")
    with (
        started(*worker, "0", url=system_redis_url) as first,
        started(*worker, "1", url=system_redis_url) as second,
    ):
        first.until("ready ")
        second.until("ready ")
        with started("submit-batch", prompts, "-o", out, url=system_redis_url) as batch:
            batch.until("queued 150 lines")
            asked = llmq("ask", "What is the sea?", "--max-tokens", "8", "--json", url=system_redis_url)
            assert 0 == asked.code, asked.err
            waiting = llmq("status", "--json", url=system_redis_url).json["batch"]
            assert waiting["waiting"] + waiting["running"] > 0  # chat did not wait for the end of batch
            first.kill()
            assert 0 == batch.end().code
        second.terminate()
        assert 0 == second.end().code
    assert Counter(ids) == Counter(answer["custom_id"] for answer in answers(out))
    assert {200} == {answer["response"]["status_code"] for answer in answers(out)}
