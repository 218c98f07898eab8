"""The typed function of each Lua script passes the KEYS and ARGV that the script's header names, in that order."""

from __future__ import annotations

import re
from typing import Any

import pytest

from llmq.scheduler import key_scripts, scripts
from llmq.scheduler.api_key import KeyLimits
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.lease import Answered, ErrorCode, Fence, HandedBack, Lease, Reason, Retry, Usage, Why
from tests.contract.lua_script import LuaScript
from tests.contract.test_lua_headers import SCRIPTS

QUEUE = QueueKeys("q")
LINE = Fence("batch:b1", "5-0", 2)
SINGLE = Fence("i:ann", "8-1", 3)
LIMITS = KeyLimits(60, 900, 4)

JOB = Lease(SINGLE, TrafficClass.INTERACTIVE, Why.CHAT, "ann", "j1", b"job", 77, reply_to="c1")
JOB_OF_BATCH = Lease(LINE, TrafficClass.BATCH, Why.BUCKET, "ann", "five", b"job", 77)
ANSWER = Answered(200, b"body", "r1", Usage(11, 22), dead=True)
ENDED = {
    "state": "completed", "status": 200, "request": "r1", "body": b"body", "code": "", "message": "", "prompt": 11,
    "completion": 22, "cost": 77, "dead": 1, "error": "HTTP 200",
}  # fmt: skip

#: A call of every script, and what its ARGV must be by the header's names (of a repeated group, the first).
CALLS: list[tuple[scripts.Call[Any], dict[str, object]]] = [
    (
        scripts.submit_job(
            QUEUE,
            "j1",
            lane="i:ann",
            cls=TrafficClass.INTERACTIVE,
            tenant="ann",
            data=b"job",
            cost=7,
            ttl_ms=60,
            client="c1",
            digest="d1",
        ),
        {
            "id": "j1",
            "lane": "i:ann",
            "cls": "i",
            "tenant": "ann",
            "data": b"job",
            "cost": 7,
            "ttl": 60,
            "client": "c1",
            "digest": "d1",
        },
    ),
    (
        scripts.open_batch(
            QUEUE, "b1", lane="batch:b1", tenant="ann", window_ms=9, need=4, record={"digest": "d", "url": "u"}
        ),
        {"id": "b1", "lane": "batch:b1", "tenant": "ann", "window": 9, "lines": 4, "field": "digest", "value": "d"},
    ),
    (
        scripts.submit_lines(
            QUEUE,
            "b1",
            lane="batch:b1",
            first=5,
            after=7,
            lines=[scripts.SubmitLine(5, "five", b"job", 77), scripts.SubmitLine(6, "six", b"", fault="bad")],
        ),
        {"lane": "batch:b1", "from": 5, "to": 7, "number": 5, "key": "five", "data": b"job", "cost": 77},
    ),
    (scripts.seal_batch(QUEUE, "b1", lane="batch:b1", next_line=7), {"lane": "batch:b1", "next": 7}),
    (
        scripts.claim(QUEUE, "w1", room=4, free=3, reserve=2, suspects=1, candidates=["batch:b1"], youngest=LINE),
        {
            "consumer": "w1",
            "room": 4,
            "free": 3,
            "reserve": 2,
            "suspects": 1,
            "youngest": "batch:b1|5-0",
            "name": "batch:b1",
        },
    ),
    (
        scripts.renew(QUEUE, "w1", [LINE, SINGLE]),
        {"consumer": "w1", "lane": "batch:b1", "number": 1, "entry": "5-0", "delivery": 2},
    ),
    (
        scripts.first_delta(QUEUE, "w1", JOB, inbox=QUEUE.inbox("c1"), data=b"delta"),
        {"consumer": "w1", "lane": "i:ann", "entry": "8-1", "delivery": 3, "id": "j1", "data": b"delta"},
    ),
    (scripts.tell(QUEUE, inbox=QUEUE.inbox("c1"), data=b"deltas"), {"deltas": b"deltas"}),
    (
        scripts.finish(
            QUEUE,
            "w1",
            "h1",
            [scripts.Finish(JOB_OF_BATCH, ANSWER), scripts.Finish(JOB, ANSWER)],
        ),
        {
            "consumer": "w1",
            "host": "h1",
            "lane": "batch:b1",
            "entry": "5-0",
            "delivery": 2,
            "kind": "line",
            "key": "five",
            **ENDED,
        },
    ),
    (
        scripts.finish(QUEUE, "w1", "h1", [scripts.Finish(JOB, ANSWER)]),
        {
            "consumer": "w1",
            "host": "h1",
            "lane": "i:ann",
            "entry": "8-1",
            "delivery": 3,
            "kind": "job",
            "key": "j1",
            **ENDED,
        },
    ),
    (
        scripts.retry(QUEUE, "w1", LINE, Retry(1.5, "why", crashed=True)),
        {"consumer": "w1", "lane": "batch:b1", "entry": "5-0", "delivery": 2, "delay": 1500, "crashed": 1},
    ),
    (
        scripts.hand_back(
            QUEUE, "w1", [(LINE, HandedBack(Reason.PREEMPTED, 0.25, b"x")), (SINGLE, HandedBack(Reason.SHUTDOWN))]
        ),
        {
            "consumer": "w1",
            "lane": "batch:b1",
            "entry": "5-0",
            "delivery": 2,
            "delay": 250,
            "preempted": 1,
            "kept": b"x",
        },
    ),
    (
        scripts.sweep(QUEUE, "w1", lane="batch:b1", lease_ms=10, cursor="3-0", count=9, not_after_ms=5),
        {"consumer": "w1", "lane": "batch:b1", "lease": 10, "cursor": "3-0", "count": 9, "not_after": 5},
    ),
    (
        scripts.reap(QUEUE, "b1", lane="batch:b1", cursor="3-0", count=9),
        {"lane": "batch:b1", "cursor": "3-0", "count": 9},
    ),
    (
        scripts.cancel_job(
            QUEUE, "j1", lane="i:ann", client="c1", state="cancelled", code=ErrorCode.CANCELLED, message="m"
        ),
        {"id": "j1", "lane": "i:ann", "state": "cancelled", "code": "batch_cancelled", "message": "m"},
    ),
    (scripts.cancel_batch(QUEUE, "b1", lane="batch:b1"), {"lane": "batch:b1"}),
    (scripts.pause_batch(QUEUE, "b1", lane="batch:b1", paused=True), {"lane": "batch:b1", "state": "-"}),
    (
        scripts.collect(QUEUE, "b1", collector="out", cursor="3-0", lapse_ms=60_000),
        {"name": "out", "cursor": "3-0", "lapse": 60_000},
    ),
    (scripts.delete_batch(QUEUE, "b1", lane="batch:b1"), {"id": "b1", "lane": "batch:b1"}),
    (scripts.delete_job(QUEUE, "j1"), {"id": "j1"}),
    (scripts.configure(QUEUE, {"rate": "5", "burst": "1"}), {"field": "rate", "value": "5"}),
    (
        scripts.beat(QUEUE, "w1", ttl_ms=30, fields={"host": "h1"}),
        {"id": "w1", "ttl": 30, "field": "host", "value": "h1", "told": ""},
    ),
    (
        scripts.beat(QUEUE, "w1", ttl_ms=30, fields={}, totals={"n": 7}, told={"n": 5}),
        {"id": "w1", "ttl": 30, "field": "t.n", "value": 7, "told": 5},
    ),
    (scripts.lead(QUEUE, "w1", interval_ms=2500), {"consumer": "w1", "interval": 2500}),
    (scripts.hold(QUEUE, "batch_1", token="t1", ttl_ms=10_000, renew=True), {"token": "t1", "ttl": 10_000, "renew": 1}),
    (scripts.let_go(QUEUE, "batch_1", token="t1"), {"token": "t1"}),
    (scripts.forget(QUEUE, "w1", lane="i:ann"), {"consumer": "w1"}),
    (
        scripts.lose(QUEUE, lane="batch:b1", entries=["5-0"]),
        {"lane": "batch:b1", "kind": "line", "entry": "5-0"},
    ),
    (scripts.recount(QUEUE, lanes=["batch:b1"]), {"lane": "batch:b1"}),
    (
        key_scripts.keep_key(QUEUE, "k1", record=b"new", before=b"old", most=9),
        {"id": "k1", "record": b"new", "before": b"old", "most": 9},
    ),
    (
        key_scripts.enter(QUEUE, "k1", call_id="c1", limits=LIMITS, cost=7, lease_ms=30),
        {"pass": "c1", "requests": 60, "tokens": 900, "most": 4, "cost": 7, "lease": 30},
    ),
    (key_scripts.stay(QUEUE, "k1", call_ids=["c1", "c2"], lease_ms=30), {"lease": 30, "pass": "c1"}),
    (
        key_scripts.leave(QUEUE, "k1", call_id="c1", limits=LIMITS, more=-5),
        {"pass": "c1", "requests": 60, "tokens": 900, "more": -5},
    ),
]

#: What each name of a key in the headers stands for.
MEANINGS = {
    "stream": {QUEUE.lane("batch:b1"), QUEUE.lane("i:ann")},
    "lane": {QUEUE.lane("batch:b1"), QUEUE.lane("i:ann")},
    "back": {QUEUE.back("batch:b1"), QUEUE.back("i:ann")},
    "job": {QUEUE.job("j1")},
    "batch": {QUEUE.batch("b1")},
    "record": {QUEUE.job("j1"), QUEUE.batch("b1")},
    "results": {QUEUE.results("b1"), QUEUE.inbox("c1")},
    "inbox": {QUEUE.inbox("c1")},
    "worker": {QUEUE.worker("w1")},
    "sweeper": {QUEUE.sweeper},
    "totals": {QUEUE.totals},
    "keys": {QUEUE.api_keys},
    "limit": {QUEUE.limit("k1")},
    "passes": {QUEUE.passes("k1")},
    "hold": {QUEUE.hold("batch_1")},
}

HEADERS = {script.name: script for script in SCRIPTS}

by_script = pytest.mark.parametrize(("call", "argv"), CALLS, ids=[call.script.name for call, _ in CALLS])


def header_of(call: scripts.Call[Any]) -> LuaScript:
    """Return the header that a call must agree with."""
    return HEADERS[call.script.name]


def test_every_script_has_a_function_that_is_tried_here() -> None:
    """The files, the names in scripts/ and the calls of this test are the same set."""
    files = {script.name for script in SCRIPTS if not script.is_prelude}
    assert files == set(scripts.NAMES)
    assert files == {call.script.name for call, _ in CALLS}


@by_script
def test_the_arguments_are_those_that_the_header_names(call: scripts.Call[Any], argv: dict[str, object]) -> None:
    """Number and order of ARGV agree with the header."""
    named = header_of(call).argv
    assert named.takes(len(call.argv))
    assert argv == dict(zip(named.fixed + named.group, call.argv, strict=False))


@by_script
def test_the_keys_are_those_that_the_header_names(call: scripts.Call[Any], argv: dict[str, object]) -> None:
    """Number and order of KEYS agree with the header, and all keys share the queue's hash tag (F-091)."""
    named = header_of(call).keys
    shared = len(QUEUE.shared)
    assert named.takes(len(call.keys))
    assert QUEUE.shared == call.keys[:shared]
    assert all(name.startswith("queue") for name in named.fixed[:shared])
    own = named.fixed[shared:]
    groups = (len(call.keys) - len(named.fixed)) // max(1, len(named.group))
    for name, key in zip(own + named.group * groups, call.keys[shared:], strict=True):
        assert key in MEANINGS[name], f"{name} is {key}"
    assert all(key.startswith("llmq:{q}:") for key in call.keys)


@pytest.mark.parametrize("name", scripts.NAMES)
def test_a_script_is_sent_with_all_that_it_uses_of_the_prelude_and_no_more(name: str) -> None:
    """Each function of queue.lua that a script calls, itself or through another one, stands above the call."""
    functions = re.findall(r"^local function (\w+)", "\n".join(HEADERS["queue"].code), re.MULTILINE)
    text = scripts.script(name).text
    for function in functions:
        found = list(re.finditer(rf"\b{function}\(", text))
        assert not found or text[: found[0].start()].endswith("local function "), (
            f"{function} is used before it is made"
        )
        assert len(found) != 1, f"{function} is made and not used"


def test_a_claim_without_candidates_passes_no_lane() -> None:
    """The first claim of a worker knows no lane yet; what it passes is what the header allows."""
    call = scripts.claim(QUEUE, "w1", room=1, free=1, reserve=0, suspects=0, candidates=[])
    assert QUEUE.shared == call.keys
    assert header_of(call).keys.takes(len(call.keys))
    assert header_of(call).argv.takes(len(call.argv))
