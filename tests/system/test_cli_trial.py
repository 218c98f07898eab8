"""`llmq bench` and `llmq tune` as people use them, on a simulated GPU: real Redis, the real worker, some seconds."""

from __future__ import annotations

import json
import math
import re
import signal
from pathlib import Path

import pytest

from llmq.workers.trial.figures import quantile
from tests.servers import client_of
from tests.system.cli_process import llmq, started

#: Slow enough that who waits for a slot waits for long, beside what a busy machine does to a test.
GPU = "sim://?slots=4&prefill_tps=20000&decode_tps=200"

pytestmark = pytest.mark.leaves("llmq:*")


@pytest.fixture
def url(system_redis_url: str) -> str:
    """The URL of an empty server."""
    return system_redis_url


def keys(url: str) -> set[str]:
    """Return the names of all keys of a server."""
    with client_of(url) as redis:
        return {key.decode() for key in redis.scan_iter()}


def test_bench_shows_that_chat_keeps_its_speed(url: str, tmp_path: Path) -> None:
    """Three phases on the same arrivals; table, JSON and plots say that it is simulated; its queues are gone."""
    options = ("--engine", GPU, "--seconds", "5s", "--warmup", "1s", "--tokens", "0.1", "--share", "0.6")
    done = llmq("bench", *options, "--objective", "1.5", "-o", tmp_path / "b", url=url)
    assert 0 == done.code, done.err
    assert "sim (SIMULATED), 4 slots" in done.out
    for phase in ("chat alone", "first come first served, 8 batch", "llmq"):
        assert phase in done.out
    report = json.loads((tmp_path / "b.json").read_text())
    alone, straight, through = report["phases"]
    assert report["simulated"] is True
    assert alone["requests"] == straight["requests"] == through["requests"] >= 20
    assert 0 == alone["batch_tps"] < through["batch_tps"]
    assert straight["p50_s"] > through["p50_s"]
    assert b"PNG" in (tmp_path / "b.png").read_bytes()[:8]
    assert "<svg" in (tmp_path / "b.svg").read_text()
    assert not {key for key in keys(url) if "bench-" in key}


def test_phases_of_a_bench_take_turns(url: str, tmp_path: Path) -> None:
    """All have the same requests in the end, and batch that waited goes on. First come, first served may be left out.

    The objective is made of chat alone once before and in its turns so far: the few requests of a first turn
    would make another.
    """
    options = (
        "--engine",
        GPU,
        "--seconds",
        "6s",
        "--turns",
        "2",
        "--warmup",
        "0s",
        "--tokens",
        "0.1",
        "--share",
        "0.6",
    )
    done = llmq("bench", *options, "--no-fcfs", "--caps", "1", "-o", tmp_path / "b", url=url)
    assert 0 == done.code, done.err
    said = [line.split(":")[0] for line in done.err.splitlines() if "x alone" in line]
    assert 2 * ["chat alone", "llmq", "fixed cap 1"] == said
    report = json.loads((tmp_path / "b.json").read_text())
    assert 2 == report["turns"]
    assert 1 == len({phase["requests"] for phase in report["phases"]})
    alone, through, capped = report["phases"]
    (before,) = report["before"]
    first = re.search(r"^llmq: .*, objective ([0-9]+) ms \(1 of 2 turns\)$", done.err, re.M)
    assert first is not None
    for until, objective_s in ((3.0, int(first[1]) / 1000), (math.inf, through["objective_s"])):
        seen = [seconds for _, seconds in before["first_tokens"]]
        seen += [seconds for at, seconds in alone["first_tokens"] if at < until]
        assert objective_s == pytest.approx(1.1 * quantile(seen, 0.95), abs=6e-4)
    assert min(through["batch_tps"], capped["batch_tps"]) > 0
    for phase in report["phases"]:
        assert all(len([at for at, _ in phase["first_tokens"] if low <= at < low + 3]) >= 10 for low in (0, 3))
    assert not {key for key in keys(url) if "bench-" in key}


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_an_engine_that_does_not_answer_ends_a_trial_with_a_word(command: str, url: str, tmp_path: Path) -> None:
    """Nothing can be compared with chat that gets no token. With this seed the few that measure it are answered."""
    engine = ("--engine", f"{GPU}&fail=0.5&seed=479")
    options = ("--seconds", "4s", "--tokens", "0.1", "--share", "0.6")
    more = ("--warmup", "0s", "--no-fcfs", "-o", tmp_path / "b") if command == "bench" else ()
    done = llmq(command, *engine, *options, *more, url=url)
    assert 4 == done.code, done.err
    assert "one in 20 of chat's requests alone got no token" in done.error
    assert [] == list(tmp_path.iterdir())
    assert not {key for key in keys(url) if "bench-" in key or "config" in key}


@pytest.mark.parametrize(
    ("seconds", "turns", "said"), [("60s", "1", "phases of"), ("60s", "30", "phases of"), ("6s", "3", "llmq:")]
)
def test_bench_that_is_interrupted_leaves_nothing(
    seconds: str, turns: str, said: str, url: str, tmp_path: Path
) -> None:
    """Ctrl-C in a phase, before the turns, or in one: the queues are gone, nothing is written, the exit code is 130."""
    plan = ("--seconds", seconds, "--turns", turns, "--warmup", "0s")
    options = ("--engine", GPU, *plan, "--tokens", "0.1", "-o", str(tmp_path / "b"))
    with started("bench", *options, url=url) as process:
        process.until(said)
        process.process.send_signal(signal.SIGINT)
        assert 130 == process.process.wait(timeout=30)
    assert [] == list(tmp_path.iterdir())
    assert not {key for key in keys(url) if "bench-" in key}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("bench", "--share", "2"), "--share: expected a share between 0 and 1, got 2"),
        (("bench", "--objective", "0.5"), "--objective: expected 1 or more"),
        (("bench", "--caps", "two"), "--caps: expected numbers of batch requests"),
        (("bench", "--batch-prompt", "800-100"), "--batch-prompt: expected numbers of tokens from and to, as in 100-8"),
        (
            (
                "bench",
                "--engine",
                "sim",
                "--seconds",
                "1s",
                "--warmup",
                "0s",
                "--tokens",
                "1",
                "--batch-prompt",
                "9000",
            ),
            "a line of 1 times 9,000 and an answer has up to 9,400 tokens, and --most-tokens allows 2,000",
        ),
        (("bench", "--batch-prompt", "1" * 5000), "--batch-prompt: expected numbers of tokens from and to"),
        (("tune", "--batch-prompt", "long"), "--batch-prompt: expected numbers of tokens from and to"),
        (("bench", "--seconds", "5s", "--warmup", "5s"), "expected a warm-up shorter than"),
        (("bench", "--seconds", "10s", "--turns", "5", "--warmup", "2s"), "warm-up shorter than the 2 s of a turn"),
        (("bench", "-o", "nowhere/at/all"), "there is no folder"),
        (("tune", "--factor", "1"), "--factor: expected more than 1"),
        (("tune", "--tokens", "0"), "--tokens: expected a number above 0, got 0"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(arguments: tuple[str, ...], said: str, url: str) -> None:
    """Before an engine is asked, with what was expected."""
    done = llmq(*arguments, url=url)
    assert 2 == done.code
    assert said in done.error


def test_tune_stores_what_holds_and_workers_and_bench_begin_there(url: str, tmp_path: Path) -> None:
    """G9: stored in the queue for engine and model; read again by the next run of the command."""
    shared = ("--engine", GPU, "--tokens", "0.1", "--share", "0.6", "--queue", "evals")
    options = (*shared, "--seconds", "4s", "--factor", "1.6")
    done = llmq("tune", *options, "--json", url=url)
    assert 0 == done.code, done.err
    found = done.json
    assert found["simulated"] is True
    assert 0 <= found["batch"] <= 4
    assert {trial["batch"] for trial in found["trials"]} >= {1}
    with client_of(url) as redis:
        stored = json.loads(redis.hget("llmq:{evals}:config", "tuned.sim|sim"))
    assert (found["batch"], found["chat_in_flight"]) == (stored["batch"], round(stored["chat"], 2))
    text = llmq("tune", *options, url=url)
    assert 0 == text.code
    assert "requests at once hold" in text.out
    assert re.search(r"llmq set ttft_p95 [0-9]+ms --queue evals   [(]1.6 x chat alone[)]", text.out)
    bench = llmq("bench", *shared, "--seconds", "3s", "--warmup", "0s", "-o", tmp_path / "b", url=url)
    assert 0 == bench.code, bench.err
    assert re.search(r"llmq set ttft_p95 [0-9]+ms --queue evals   [(]1.1 x chat alone[)]", bench.out)
    assert "the governor begins where `llmq tune` has measured" in bench.err
