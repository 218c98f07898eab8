"""Whoever can write to Redis may write anything: what llmq did not write stops no worker and no command."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest
from redis import Redis

from llmq.scheduler.job import Job
from llmq.scheduler.keys import QueueKeys
from tests.servers import client_of
from tests.system.cli_process import QUICK, Started, ids, ids_in, llmq, started, submitted, until, write_prompts

KEYS = QueueKeys("default")
CHAT = "/v1/chat/completions"
NO_TEXT = b"\xff\xfe\x00\x1b[31m"
ENDLESS = b"9" * 6000
GOOD = {"messages": [{"role": "user", "content": "x"}]}


def stored(url: object, body: object) -> bytes:
    """Encode a job as nobody checked it."""
    packed: bytes = msgpack.packb({"u": url, "b": body}, strict_types=False)
    return packed


#: Fields `d` that no llmq has written: what is in a job's place.
MALFORMED: dict[str, bytes] = {
    "nothing": b"",
    "no text": NO_TEXT,
    "an array of four thousand million": b"\xdd\xff\xff\xff\xff",
    "a map of four thousand million": b"\xdf\xff\xff\xff\xff",
    "a text of four thousand million": b"\xdb\xff\xff\xff\xff",
    "deep": b"\x91" * 5000,
    "deep body": stored(CHAT, {"messages": []})[:-1] + b"\x91" * 600 + b"\x01",
    "not all of it": Job(CHAT, GOOD).encode()[:-3],
    "more than all of it": Job(CHAT, GOOD).encode() + b"\x01",
    "another type": msgpack.packb(["u", "b"]),
    "no body": msgpack.packb({"u": CHAT}),
    "a body that is no object": stored(CHAT, "text"),
    "keys that are no text": stored(CHAT, {b"\xff": 1}),
    "bytes": stored(CHAT, {"messages": b"\x00\xff"}),
    "an extension": stored(CHAT, {"messages": msgpack.ExtType(42, b"code")}),
    "a time": stored(CHAT, {"messages": msgpack.Timestamp(2**33, 1)}),
    "raw that is no JSON": msgpack.packb({"u": CHAT, "j": b"{"}),
    "raw that is deep": msgpack.packb({"u": CHAT, "j": b'{"a":' + b"[" * 500 + b"]" * 500 + b"}"}),
    "another host": stored("http://elsewhere.example/v1/chat/completions", GOOD),
    "another host without a scheme": stored("//elsewhere.example/v1/chat/completions", GOOD),
    "another path": stored("/v1/chat/completions/../../metrics", GOOD),
    "a query": stored("/v1/chat/completions?model=x", GOOD),
    "another endpoint": stored("/v1/files", GOOD),
    "a url of another type": stored(7, GOOD),
    "pickle": b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    "large": b"\x00" * (3 << 20),
}

#: Whole entries whose other fields are of no use.
ODD_ENTRIES: list[dict[Any, Any]] = [
    {"nonsense": "x"},
    {"k": "odd-1"},
    {NO_TEXT: NO_TEXT},
    {"k": NO_TEXT, "d": b"?", "r": NO_TEXT},
    {"k": "odd-2", "d": b"?", "c": ENDLESS, "t": ENDLESS},
    {"k": "odd-3", "d": b"?", "c": "-5", "x": "nan", "r": "c" * 5000},
    {"k": "odd-4", "d": b"?", "c": "nan", "x": ENDLESS},
]

GARBAGE_SETTINGS = {
    "deadline": "nan", "reserve": "-1", "lease": "abc", "ttft_p95": ENDLESS, "preempt": NO_TEXT, "resume": "maybe",
    "attempts_batch": "-3", "queue_ttl": "nan", "cap_interactive": "nan", "cap_batch": "inf", "keep_interactive": "1.5",
    "keep_batch": "-1", "results_max_bytes": "abc", "results_quarter": "1e999", "windows": NO_TEXT, "plan": "x y z q;",
    "rate": "nan", "burst": "-inf", "unit": NO_TEXT, "virtual": "abc", "yields_b": "abc", "breach_b": ENDLESS,
    "weight.default": "0", "weight.ghost": NO_TEXT, NO_TEXT: NO_TEXT, "nonsense": "1",
}  # fmt: skip

#: Hashes, each with fields that readers of it look for.
GARBAGE_HASHES: dict[str, dict[Any, Any]] = {
    KEYS.config: GARBAGE_SETTINGS,
    KEYS.bucket: {"tokens": "nan", "at": "abc", "start": "x", "since": "-", "dry": "abc", "exhausted": "x",
                  "dry_ms": "1.5"},
    KEYS.lanes: {"ghost": "?", NO_TEXT: NO_TEXT, "i:z": "+z|t|0", "batch:z": "+b|t|x", "b:y": "+b|t|" + "9" * 20},
    KEYS.tries: {"ghost": "x", NO_TEXT: NO_TEXT, "i:default|1-1": "many attempts"},
    KEYS.counts: {"i": "abc", "b": "1.5"},
    KEYS.totals: {"dead|batch": "abc", NO_TEXT: ENDLESS, "retries|batch": ENDLESS},
    KEYS.api_keys: {"ghost": "{}", NO_TEXT: NO_TEXT, "a" * 12: b'{"tenant":5}'},
    KEYS.worker("ghost"): {"id": "ghost", "pid": ENDLESS, "slots": "-1", "models": "[" * 5000, "lanes": '["\\ud800"]',
                           "m.window_s": "nan", "host": "[/bold]\x1b[31m", NO_TEXT: NO_TEXT, "m.wait": "1 x"},
    KEYS.worker("nobody"): {"state": NO_TEXT},
    KEYS.batch("batch_ghost"): {"status": "weird", "created_at": ENDLESS},
    KEYS.job("ghost"): {"lane": NO_TEXT, "entry": "x", "state": "weird", "status": "abc", "ended_at": "nan"},
}  # fmt: skip

GARBAGE_ZSETS: dict[str, dict[Any, float]] = {
    KEYS.ready("i"): {NO_TEXT: -1e300, "nobody": -10.0, **{f"ghost-{n}": -5.0 for n in range(20)}},
    KEYS.ready("b"): {NO_TEXT: float("-inf"), **{f"ghost-{n}": -5.0 for n in range(20)}},
    KEYS.order("i"): {"nonsense": 0, NO_TEXT + b"|0|i:x": 0, "nobody|0|": 0, "nobody|0000000000000|i:nobody": 0,
                      "nobody|x|i:y": 0, "nobody|0|i:\xa0\ufffd": 0},
    KEYS.order("b"): {"nobody|0|b:nobody": 0, NO_TEXT: 0},
    KEYS.asleep: {"ghost": 1, NO_TEXT: -1, "batch:nobody": float("inf")},
    KEYS.starts: {"ghost": 5, NO_TEXT: -5},
    KEYS.ending: {"batch:ghost": 1, NO_TEXT: 1, "no batch": 2},
    KEYS.batches: {NO_TEXT: 1, "batch_ghost": 2, "batch_nobody": 3},
    KEYS.workers: {NO_TEXT: float("inf"), "ghost": 1, "nobody": float("-inf"), "replaced": 1e18},
    KEYS.back("i:default"): {"nonsense": 0, "1-1": 0, NO_TEXT: 0, "9" * 30 + "-1": 0},
}  # fmt: skip

#: Every command that reads a queue.
READS = [
    ["status"], ["status", "--json"], ["workers"], ["workers", "--json"], ["dead", "ls"], ["dead", "ls", "--json"],
    ["batch", "ls"], ["batch", "ls", "--json"], ["batch", "show", "batch_ghost"], ["job", "show", "ghost"],
    ["job", "show", "ghost", "--json"], ["why", "ghost"], ["why", "batch_ghost"], ["rate"], ["set"], ["set", "--json"],
    ["doctor"], ["doctor", "--json"], ["health"], ["health", "--worker", "ghost"], ["keys", "ls"],
    ["keys", "ls", "--json"],
]  # fmt: skip


def plant(client: Redis) -> None:
    """Put garbage wherever a worker, a client, a sweeper or a status looks."""
    for name, fields in GARBAGE_HASHES.items():
        client.hset(name, mapping=fields)
    for name, members in GARBAGE_ZSETS.items():
        client.zadd(name, members)
    client.set(KEYS.held, "abc")
    client.set(KEYS.worker("replaced"), "another type of key")
    client.set(KEYS.lane("i:replaced"), "another type of key")
    client.hset(KEYS.lanes, "i:replaced", "+i|replaced|0000000000000")
    client.zadd(KEYS.order("i"), {"replaced|0000000000000|i:replaced": 0})
    client.zadd(KEYS.ready("i"), {"replaced": -20.0})
    client.lpush(KEYS.bell("i"), NO_TEXT, "nonsense")
    for stream in (KEYS.dead, KEYS.decisions):
        client.xadd(stream, {NO_TEXT: NO_TEXT, "seen": "abc", "status": ENDLESS, "attempts": "-1", "class": NO_TEXT})


@pytest.fixture
def client(system_redis_url: str) -> Iterator[Redis]:
    """A server that holds garbage in each key of the default queue."""
    with client_of(system_redis_url) as client:
        yield client
        client.flushall()


@pytest.fixture
def worker(system_redis_url: str, client: Redis) -> Iterator[Started]:
    """A worker that began to work among garbage."""
    plant(client)
    with started("worker", "--engine", QUICK, "--log-level", "debug", url=system_redis_url) as worker:
        worker.until("ready ")
        yield worker


def ask(url: str) -> None:
    """Ask one question, and be answered."""
    done = llmq("ask", "is anybody there?", url=url)
    assert 0 == done.code, done.err


def test_garbage_in_every_key_stops_nobody(
    worker: Started, client: Redis, system_redis_url: str, tmp_path: Path
) -> None:
    """Chat and batch are answered among garbage in all shared keys, and the worker drains as ever (G2, G16)."""
    ask(system_redis_url)
    prompts, output = write_prompts(tmp_path / "prompts.jsonl", 8), tmp_path / "out.jsonl"
    done = llmq("submit-batch", prompts, "--wait", "-o", output, url=system_redis_url)
    assert 0 == done.code, done.err
    assert sorted(ids(8)) == sorted(ids_in(output))
    assert worker.process.poll() is None
    worker.terminate()
    end = worker.end()
    assert 0 == end.code, end.err


def test_reading_commands_end_with_a_word(worker: Started, client: Redis, system_redis_url: str) -> None:
    """Each command that reads ends with an exit code of its table and, at most, one line that says what is wrong."""
    plant(client)
    for words in READS:
        done = llmq(*words, url=system_redis_url)
        assert "unexpected" not in done.err, (words, done.err)
        assert "\x1b[31m" not in done.out + done.err, words
        assert done.code in (0, 1, 2, 3, 4), (words, done)
        assert 0 == done.code or done.err or "doctor" in words, words


def test_malformed_jobs_become_dead_letters(
    worker: Started, client: Redis, system_redis_url: str, tmp_path: Path
) -> None:
    """What is no job is a dead letter or an error line, the jobs between are answered; nothing is executed (G16)."""
    now = str(round(time.time() * 1000))
    client.hset(KEYS.lanes, "i:default", "+i|default|0000000000000")
    for name, data in MALFORMED.items():
        client.xadd(KEYS.lane("i:default"), {"k": name, "d": data, "c": "1", "x": "9" * 16, "r": "", "t": now})
    for entry in ODD_ENTRIES:
        client.xadd(KEYS.lane("i:default"), entry)
    with suppress(Exception):  # the worker may have made it
        client.xgroup_create(KEYS.lane("i:default"), "workers", 0)
    ask(system_redis_url)
    expected = len(MALFORMED) + len(ODD_ENTRIES) + 1  # and the letter that was planted
    until(lambda: client.xlen(KEYS.dead) >= expected, f"{expected} dead letters")
    letters: Any = client.xrange(KEYS.dead)
    codes = [fields.get(b"code") for _, fields in letters]
    assert len(MALFORMED) + len(ODD_ENTRIES) == codes.count(b"malformed_job")
    assert 0 == client.xlen(KEYS.lane("i:default"))
    assert worker.process.poll() is None


def test_a_malformed_line_harms_no_other(worker: Started, client: Redis, system_redis_url: str, tmp_path: Path) -> None:
    """Entries that somebody added to a batch end in error lines of their own; every line has its result (G16)."""
    assert 0 == llmq("pause", "batch", url=system_redis_url).code
    batch_id = submitted(system_redis_url, write_prompts(tmp_path / "prompts.jsonl", 5))
    lane = KEYS.lane(f"batch:{batch_id}")
    for number, data in enumerate(MALFORMED.values(), 1000):
        client.xadd(lane, {"k": f"added-{number}", "d": data}, id=f"{number}-0")
    assert 0 == llmq("resume", "batch", url=system_redis_url).code
    output = tmp_path / "out.jsonl"
    until(lambda: client.hget(KEYS.batch(batch_id), "status") == b"completed", "the end of the batch")
    done = llmq("batch", "results", batch_id, "-o", output, url=system_redis_url)
    assert done.code in (0, 3), done.err
    assert set(ids(5)) <= set(ids_in(output))
    assert {f"added-{number}" for number in range(1000, 1000 + len(MALFORMED))} <= set(ids_in(output))
