"""How the doctor judges what it measured."""

from __future__ import annotations

import pytest

from llmq.scheduler.findings import (
    Finding,
    judge_clock,
    judge_connections,
    judge_latency,
    judge_memory,
    judge_persistence,
    judge_place,
    judge_replicas,
    judge_rights,
    judge_workers,
)
from llmq.scheduler.fleet import WorkerStatus, worker_of

GIB = 2**30


def worker(name: str, state: str) -> WorkerStatus:
    """Return a worker in a state."""
    return worker_of({"id": name, "state": state, "slots": "4"}, 0, 60_000 if state == "silent" else 0, 10.0)


@pytest.mark.parametrize(
    ("used", "most", "machine", "fine", "text"),
    [
        (GIB, 4 * GIB, 8 * GIB, True, "1GiB used of 4GiB (maxmemory)"),
        (GIB, 0, 8 * GIB, True, "no maxmemory is set"),
        (GIB, 0, 0, True, "1GiB used; no maxmemory is set"),
        (9 * GIB, 10 * GIB, 64 * GIB, False, "about to refuse jobs"),
        (63 * GIB, 0, 64 * GIB, False, "about to refuse jobs"),
    ],
)
def test_memory(used: int, most: int, machine: int, fine: bool, text: str) -> None:
    """A server near its limit, or near its machine's, refuses jobs soon (F-096)."""
    found = judge_memory(used, most, machine)
    assert (fine, fine) == (found.fine, not found.step)
    assert text in found.text


def test_latency() -> None:
    """By the slowest in a hundred: the others are not what people notice."""
    assert Finding("latency", True, "p50 0.5 ms, p99 0.5 ms of 100 pings") == judge_latency([0.0005] * 100)
    found = judge_latency([0.0005] * 98 + [0.25, 0.25])
    assert (False, "p99 250.0 ms" in found.text, "SLOWLOG" in found.step) == (found.fine, True, True)
    assert judge_latency([0.0005] * 99 + [0.25]).fine


@pytest.mark.parametrize(
    ("offset", "fine", "text"),
    [(0.02, True, "20 ms ahead of"), (-3.0, True, "3.0 s behind"), (7.5, False, "7.5 s ahead of"), (-9.0, False, "")],
)
def test_clock(offset: float, fine: bool, text: str) -> None:
    """Some seconds do no harm; llmq goes by one clock alone."""
    found = judge_clock(offset)
    assert fine is found.fine
    assert text in found.text


@pytest.mark.parametrize(
    ("states", "fine", "text"),
    [
        (("ready", "ready"), True, "2 ready; 8 slots"),
        (("ready", "draining"), True, "1 draining, 1 ready; 8 slots"),
        (("ready", "silent"), False, "1 ready, 1 silent (w1)"),
        (("engine_down", "ready"), False, "1 engine_down, 1 ready (w0)"),
        (("silent",), False, "1 silent: nobody serves queue evals"),
        ((), False, "none: nobody serves queue evals"),
    ],
)
def test_workers(states: tuple[str, ...], fine: bool, text: str) -> None:
    """Somebody must serve, and nobody be sick."""
    found = judge_workers([worker(f"w{number}", state) for number, state in enumerate(states)], "evals")
    assert (fine, text) == (found.fine, found.text)
    assert fine is not bool(found.step)


@pytest.mark.parametrize(
    ("kept", "fsync", "fine", "words"),
    [
        (True, "everysec", True, "loses the last second"),
        (True, "always", True, "loses nothing"),
        (True, "no", False, "half a minute"),
        (True, None, True, "what appendfsync says"),
        (False, "no", True, "kept in memory"),
    ],
)
def test_disk(kept: bool, fsync: str | None, fine: bool, words: str) -> None:
    """What a crash of the server's machine loses (G1)."""
    found = judge_persistence(kept, fsync)
    assert (fine, True) == (found.fine, words in found.text)


def test_clients() -> None:
    """A server at its maxclients refuses the next worker."""
    assert judge_connections(10, 0).fine
    assert judge_connections(89, 100).fine
    found = judge_connections(90, 100)
    assert (False, True) == (found.fine, "CONFIG SET maxclients" in found.step)


def test_replicas() -> None:
    """One that lags is what a failover loses (F-072, F-088)."""
    good = {"ip": "a", "port": 1, "state": "online", "lag": 1}
    assert "none" == judge_replicas({"connected_slaves": 0}, 0).text
    assert "may lose" in judge_replicas({"connected_slaves": 1, "slave0": good}, 0).text
    assert "writes need 1" in judge_replicas({"connected_slaves": 1, "slave0": good}, 1).text
    for bad in (good | {"lag": 11}, good | {"state": "wait_bgsave"}):
        found = judge_replicas({"connected_slaves": 2, "slave0": good, "slave1": bad}, None)
        assert (False, True) == (found.fine, found.text.startswith("1 of 2 lag"))


def test_keys() -> None:
    """All keys of a queue share one hash slot (F-091)."""
    assert judge_place(["llmq:{a}:x", "llmq:{a}:y"], cluster=True).fine
    assert not judge_place(["llmq:a:x", "llmq:a:y"], cluster=True).fine


def test_rights() -> None:
    """A user has the rights of a role; one that may neither submit nor work can do nothing."""
    assert judge_rights("me", [], []).fine
    assert "not serve as a worker: it lacks xclaim" in judge_rights("me", [], ["xclaim"]).text
    assert "not submit: it lacks xread" in judge_rights("me", ["xread"], []).text
    found = judge_rights("me", ["xadd"], ["xclaim"])
    assert (False, True) == (found.fine, "deploy/acl" in found.step)
