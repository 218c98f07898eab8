"""The users of deploy/acl/llmq.acl: each can do its whole work, and what it should not do is refused.

`ACL LOG` is the judge of the first half: whatever a role's work was refused stands in it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import redis
from redis.exceptions import NoPermissionError, ResponseError

from llmq import AsyncClient, Client
from llmq.workers.engines.sim import SimEngine
from tests.conftest import OwnServer
from tests.redis.serving import KEYS, serving
from tests.servers import Server, client_of
from tests.system.cli_process import QUICK, TOO_LONG, llmq, started, submitted, write_prompts
from tests.topologies import ClusterSet, under_way
from tests.topology.conftest import ROOT, OwnSet

ACL_FILE = ROOT / "deploy" / "acl" / "llmq.acl"
PASSWORD = "a-throw-away-password"
ROLES = ("submitter", "gateway", "worker", "operator", "metrics")
BODY = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def server(own_server: OwnServer, tmp_path: Path) -> Server:
    """A server with the users of the file; the default user is who sets up and looks on."""
    file = tmp_path / "users.acl"
    users = [line for line in ACL_FILE.read_text().splitlines() if line and not line.startswith("#")]
    file.write_text("\n".join(line.replace("CHANGE-ME", PASSWORD) for line in users) + "\n")
    return own_server("--appendonly", "no", "--aclfile", str(file))


def url_of(server: Server, role: str) -> str:
    """Return the URL of a server for a role."""
    return f"redis://llmq-{role}:{PASSWORD}@127.0.0.1:{server.port}/0"


@contextmanager
def nothing_refused(server: Server, *but: str) -> Iterator[None]:
    """Fail if any user was refused a command or key within the block, other than those in `but`."""
    with server.client() as admin:
        admin.acl_log_reset()
        yield
        log: list[dict[str, Any]] = admin.acl_log()
    # Redis 7.0 does not know client|setinfo; clients tell their name with it where they may.
    harmless = {"client|setinfo", *but}
    refused = {(row["username"], row["object"], row["context"]) for row in log if row["object"].lower() not in harmless}
    assert set() == refused


def refuses(server: Server, role: str, *commands: tuple[Any, ...]) -> None:
    """Fail unless a role is refused each of these."""
    with client_of(server.url, username=f"llmq-{role}", password=PASSWORD) as client:
        for command in commands:
            with pytest.raises(ResponseError) as refusal:
                _run(client, command)
            # Of a command within a script each server has words of its own.
            inside = re.search("can't run this command|ACL failure in script", str(refusal.value))
            assert isinstance(refusal.value, NoPermissionError) or inside


def _run(client: redis.Redis, command: tuple[Any, ...]) -> object:
    return client.execute_command(*command)  # type: ignore[no-untyped-call]


#: What nobody needs: each of these reads or ends everything.
FOREIGN = (
    ("GET", "other:key"),
    ("SET", "other:key", "1"),
    ("FLUSHALL",),
    ("KEYS", "*"),
    ("CONFIG SET", "maxmemory", "1"),
    ("SHUTDOWN", "NOSAVE"),
    ("ACL LIST",),
    ("SCRIPT FLUSH",),
    ("MONITOR",),
    ("EVAL", "return redis.call('FLUSHALL')", 1, "llmq:{default}:x"),
)

CLAIM = ("XREADGROUP", "GROUP", "workers", "me", "STREAMS", "llmq:{default}:lane:i:default", ">")


@pytest.mark.parametrize("role", ROLES)
def test_no_role_may_touch_what_is_not_llmqs(server: Server, role: str) -> None:
    """Other keys, the server's settings, its users, its scripts, everybody's data."""
    refuses(server, role, *FOREIGN)


def test_a_worker_serves_and_sweeps(server: Server, tmp_path: Path) -> None:
    """Single jobs with deltas, a batch with retries and bad lines, a killed worker's jobs, a drain."""
    with nothing_refused(server, "config|get"):
        with started("worker", "--engine", QUICK, url=url_of(server, "worker")) as worker:
            worker.until("ready ")
            with Client(server.url) as client:
                assert "".join(delta.text for delta in client.submit(BODY).stream())
                assert 2 == len(list(client.submit_batch([{"prompt": "a"}, {"prompt": "b", **TOO_LONG}]).results()))
            worker.terminate()
            assert 0 == worker.end().code
        assert 0 == llmq("set", "lease", "1s", url=server.url).code
        with started("worker", "--engine", "sim://?decode_tps=1", url=url_of(server, "worker")) as worker:
            worker.until("ready ")
            batch_id = submitted(server.url, write_prompts(tmp_path / "p.jsonl", 2))
            _await_running(server, 2)
            worker.kill()
        with started("worker", "--engine", QUICK, "--until-empty", url=url_of(server, "worker")) as worker:
            worker.end()
        counts = llmq("batch", "show", batch_id, "--json", url=server.url).json["request_counts"]
        assert {"total": 2, "completed": 2, "failed": 0} == counts
    refuses(server, "worker", ("RPUSH", "llmq:{default}:ctl:x", "drain"), ("CONFIG GET", "*"))


def _await_running(server: Server, count: int) -> None:
    while llmq("status", "--json", url=server.url).json["batch"]["running"] < count:
        pass


@pytest.mark.parametrize("role", ["submitter", "gateway"])
def test_a_submitter_submits_waits_collects_and_cancels(server: Server, tmp_path: Path, role: str) -> None:
    """Single jobs and batches, from both clients and the command line; a worker of its own rights serves."""
    url = url_of(server, role)
    with (
        nothing_refused(server, "config|get"),
        started("worker", "--engine", QUICK, url=url_of(server, "worker")) as worker,
    ):
        worker.until("ready ")
        with Client(url) as client:
            job = client.submit(BODY, key="k")
            assert "".join(delta.text for delta in job.stream())
            assert 200 == client.submit(BODY).result(20).status_code
            batch = client.submit_batch([{"prompt": "a"}, {"prompt": "b"}])
            assert 2 == len(list(batch.results()))
            client.submit_batch([{"prompt": "a"}] * 3).cancel()
        out = tmp_path / "out.jsonl"
        assert 0 == llmq("submit-batch", write_prompts(tmp_path / "p", 3), "--wait", "-o", out, url=url).code
        assert 3 == len([json.loads(line) for line in out.read_text().splitlines()])
        worker.terminate()
        worker.end()
        with Client(url) as client:
            client.submit(BODY).cancel()
            assert 0 == client.status().interactive.running
    refuses(server, role, CLAIM, ("XACK", "llmq:{default}:lane:i:default", "workers", "1-1"))


def test_an_operator_looks_at_everything_and_changes_settings(server: Server, tmp_path: Path) -> None:
    """Every verb of the command line that looks or changes; and the doctor, which reads a setting of the server."""
    url = url_of(server, "operator")
    batch_id = submitted(server.url, write_prompts(tmp_path / "p.jsonl", 3))
    with Client(server.url) as client:
        job_id = client.submit(BODY).id
    with nothing_refused(server):
        for verb in (
            ("status",), ("workers",), ("batch", "ls"), ("batch", "show", batch_id), ("batch", "pause", batch_id),
            ("batch", "resume", batch_id), ("why", batch_id), ("why", job_id), ("job", "show", job_id), ("rate", "5/s"),
            ("rate", "off"), ("set",), ("set", "deadline", "20s"), ("set", "windows", "22:00-06:00 off"),
            ("set", "windows", "default"), ("pause", "batch"), ("resume", "batch"), ("job", "cancel", job_id),
            ("batch", "cancel", batch_id, "--yes"), ("batch", "results", batch_id), ("dead", "ls"), ("health",),
        ):  # fmt: skip
            assert llmq(*verb, url=url).code in (0, 3), verb
        llmq("batch", "delete", batch_id, "--yes", url=url)
    refuses(server, "operator", CLAIM)


def test_metrics_are_read_and_nothing_is_written(server: Server, tmp_path: Path) -> None:
    """Its key pattern is %R~: not even a script of llmq's may write for it."""
    submitted(server.url, write_prompts(tmp_path / "p.jsonl", 3))
    url = url_of(server, "metrics")
    with nothing_refused(server, "config|get"):
        for verb in (("status", "--json"), ("workers", "--json")):
            done = llmq(*verb, url=url)
            assert 0 == done.code, done.err
    refuses(
        server,
        "metrics",
        CLAIM,
        ("SET", "llmq:{default}:x", "1"),
        ("DEL", "llmq:{default}:config"),
        ("EVAL", "return redis.call('SET', KEYS[1], '1')", 1, "llmq:{default}:x"),
        ("HSET", "llmq:{default}:config", "rate", "1"),
    )
    assert "does not permit" in llmq("rate", "5/s", url=url).error


async def test_the_same_users_work_in_a_cluster(own_set: OwnSet) -> None:
    """They may ask who holds what, and follow a key that is on its way."""
    cluster = cast(ClusterSet, own_set("cluster"))
    users = [line.split()[1:] for line in ACL_FILE.read_text().splitlines() if line.startswith("user ")]
    for node in cluster.servers:
        with node.client() as admin:
            for name, *rules in users:
                _run(admin, ("ACL SETUSER", name, *(rule.replace("CHANGE-ME", PASSWORD) for rule in rules)))
    submitter, worker = (cluster.url.replace("://", f"://llmq-{role}:{PASSWORD}@") for role in ("submitter", "worker"))
    async with AsyncClient(submitter) as client, serving(worker, SimEngine.from_url("sim://?instant=1")):
        assert 200 == (await (await client.submit(BODY)).result(20)).status_code
        await asyncio.to_thread(_move, cluster)
        assert 200 == (await (await client.submit(BODY)).result(20)).status_code


def _move(cluster: ClusterSet) -> None:
    with under_way(KEYS.config, cluster):
        pass


def test_the_doctor_says_what_a_user_lacks(server: Server) -> None:
    """It tries each kind of command on a key of another type, which changes nothing."""
    found = {role: _rights(server, role) for role in ROLES}
    assert {"submitter": True, "gateway": True, "worker": True, "operator": True, "metrics": False} == {
        role: finding["fine"] for role, finding in found.items()
    }
    assert "lacks xreadgroup, xclaim, xautoclaim, xack, blpop" in found["submitter"]["text"]
    assert "does not permit" in found["metrics"]["text"]


def _rights(server: Server, role: str) -> dict[str, Any]:
    findings = llmq("doctor", "--json", url=url_of(server, role)).json["findings"]
    found: dict[str, Any] = next(one for one in findings if one["check"] == "rights")
    return found
