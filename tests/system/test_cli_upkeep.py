"""The verbs that keep a queue well, on a real server: dead, drain, health, why, doctor, job delete."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from llmq.scheduler.job import Job
from llmq.scheduler.keys import QueueKeys
from tests.conftest import OwnServer
from tests.servers import client_of
from tests.system.cli_process import QUICK, SLOW, free_port, llmq, started, submitted, until, write_prompts

#: What these tests leave queued is not the point: the next test begins on an empty server.
pytestmark = pytest.mark.leaves("llmq:*")

KEYS = QueueKeys("default")
JOB = Job("/v1/chat/completions", {"messages": [{"role": "user", "content": "a secret"}]})


@pytest.fixture
def url(system_redis_url: str) -> str:
    """The URL of an empty server."""
    return system_redis_url


def bury(url: str, *, lane: str = "i:anna", entry: str = "5-0", key: str = "j1", data: bytes = b"") -> str:
    """Make a dead letter, as the finish script does; return its id."""
    fields = {
        "key": key, "lane": lane, "entry": entry, "class": "i" if lane.startswith("i:") else "b", "tenant": "anna",
        "data": data or JOB.encode(), "code": "worker_lost", "status": "", "error": "three deaths", "attempts": 1,
        "crashes": 3, "host": "gpu-7",
    }  # fmt: skip
    with client_of(url) as client:
        return str(client.xadd(KEYS.dead, fields).decode())


def workers(url: str) -> list[dict[str, Any]]:
    """Return the workers of the queue."""
    found: list[dict[str, Any]] = llmq("workers", "--json", url=url).json["workers"]
    return found


def running(url: str, batch_id: str) -> int:
    """Return how many lines of a batch run."""
    return int(llmq("batch", "show", batch_id, "--json", url=url).json["running"])


def leave_silent(url: str, worker: str, *, seconds: float) -> None:
    """Leave what a worker leaves that died so long ago, without a word."""
    with client_of(url) as client:
        client.hset(KEYS.worker(worker), mapping={"id": worker, "host": "gpu-7", "pid": 4242, "state": "ready"})
        client.zadd(KEYS.workers, {worker: (time.time() - seconds) * 1000})


class TestDead:
    """`llmq dead`: jobs that were given up."""

    def test_they_are_listed_and_shown_without_their_jobs(self, url: str) -> None:
        """Prompts are private: the job is shown where it is asked for (F-051)."""
        assert "no dead letters" in llmq("dead", "ls", url=url).err
        first, second = bury(url), bury(url, lane="batch:b1", key="row-5")
        listed = llmq("dead", "ls", "--limit", 1, "--json", url=url).json
        assert (2, [second]) == (listed["total"], [letter["id"] for letter in listed["letters"]])
        table = llmq("dead", "ls", url=url).out
        assert table.index(second) < table.index(first)
        assert "three deaths" in table
        shown = llmq("dead", "show", first, url=url)
        assert "worker_lost: three deaths" in shown.out
        assert "secret" not in shown.out + table
        assert "a secret" in llmq("dead", "show", first, "--body", url=url).out
        asked = llmq("dead", "show", second, "--body", "--json", url=url).json
        assert (JOB.body, "b1", 5) == (asked["body"], asked["batch"], asked["line"])

    def test_they_run_again(self, url: str) -> None:
        """Single jobs as new ones, lines as a batch; what holds no job stays, and is named."""
        bury(url)
        bury(url, lane="batch:b1", key="row-5")
        broken = bury(url, data=b"\xc1")
        done = llmq("dead", "retry", "--all", "--json", url=url)
        assert (2, [broken]) == (done.json["retried"], done.json["unreadable"])
        assert f"llmq dead purge {broken}" in done.err
        assert 0 == llmq("worker", "--engine", QUICK, "--until-empty", url=url).code
        (job_id,), (batch,) = done.json["jobs"], done.json["batches"]
        assert "completed" == llmq("job", "show", job_id, "--json", url=url).json["state"]
        assert '"custom_id":"row-5"' in llmq("batch", "results", batch["id"], url=url).out
        assert [broken] == [letter["id"] for letter in llmq("dead", "ls", "--json", url=url).json["letters"]]
        assert 2 == llmq("dead", "show", broken, "--body", url=url).code

    def test_purging_asks(self, url: str) -> None:
        """With nobody to ask nothing goes, and the line to type is said."""
        first = bury(url)
        bury(url)
        refused = llmq("dead", "purge", "--all", url=url)
        assert 2 == refused.code
        assert "deletes 2 dead letters" in refused.error
        assert "llmq dead purge --all --yes" in refused.error
        assert 1 == llmq("dead", "purge", first, "--yes", "--json", url=url).json["purged"]
        assert "1 dead letter purged\n" == llmq("dead", "purge", "--all", "--yes", url=url).out
        assert "0 dead letters purged\n" == llmq("dead", "purge", "--all", url=url).out

    @pytest.mark.parametrize("verb", ["retry", "purge"])
    def test_which_ones_must_be_said(self, url: str, verb: str) -> None:
        """Neither ids nor --all, both, or one that is not there: usage."""
        bury(url)
        for words in ((), ("--all", "1-1"), ("1-1",)):
            assert 2 == llmq("dead", verb, *words, url=url).code
        assert 1 == llmq("dead", "ls", "--json", url=url).json["total"]


class TestDrain:
    """`llmq drain`: a worker is asked to end."""

    def test_the_worker_finishes_what_it_runs_and_is_gone(self, url: str, tmp_path: Path) -> None:
        """It exits 0 and is listed no more; what it had not begun waits for another (G6)."""
        batch_id = submitted(url, write_prompts(tmp_path / "p.jsonl", 8, max_tokens=500, ignore_eos=True))
        with started("worker", "--engine", SLOW, "--reserve", 0, url=url) as worker:
            worker.until("ready ")
            until(lambda: running(url, batch_id) == 2, "two lines that run")
            (found,) = workers(url)
            assert "drains; it runs" in llmq("drain", found["id"], url=url).out
            until(lambda: [one["state"] for one in workers(url)] == ["draining"], "a worker that drains")
            done = llmq("drain", found["id"], "--wait", "--json", url=url)
            assert 0 == worker.end().code
        assert {"worker": found["id"], "already_draining": True, "gone": True} == done.json
        record = llmq("batch", "show", batch_id, "--json", url=url).json
        assert (0, 0) == (record["running"], record["request_counts"]["failed"])
        # It was asked a second time while it drained, which to a worker would mean: hand back at once.
        completed = record["request_counts"]["completed"]
        assert completed >= 2
        assert 8 == completed + record["waiting"]

    def test_a_worker_that_is_not_there_is_said(self, url: str) -> None:
        """The line names those that are."""
        assert "there is none" in llmq("drain", "nobody", url=url).error
        with started("worker", "--engine", QUICK, url=url) as worker:
            worker.until("ready ")
            done = llmq("drain", "nobody", url=url)
            assert 2 == done.code
            assert workers(url)[0]["id"] in done.error

    def test_a_silent_worker_is_not_waited_for(self, url: str) -> None:
        """It would not hear: the line says where its process is."""
        leave_silent(url, "w1", seconds=30)
        done = llmq("drain", "w1", "--wait", url=url)
        assert 1 == done.code
        assert "gpu-7 (pid 4242)" in done.error
        with client_of(url) as client:
            assert not client.exists(KEYS.control("w1"))


class TestHealth:
    """`llmq health`: the probe for containers."""

    def test_a_queue_that_can_be_worked_on_is_healthy(self, url: str) -> None:
        """It takes no job, and what it writes goes by itself."""
        assert 0 == llmq("submit-batch", "-", url=url, stdin=b'"hello"\n').code
        before = llmq("status", "--json", url=url).json["batch"]
        done = llmq("health", url=url)
        assert (0, "") == (done.code, done.err)
        assert done.out.startswith("ok: claim ")
        assert llmq("health", "--json", url=url).json["healthy"] is True
        after = llmq("status", "--json", url=url).json["batch"]
        assert [(1, 0)] * 2 == [(shown["waiting"], shown["running"]) for shown in (before, after)]
        with client_of(url) as client:
            assert 0 < client.pttl(KEYS.probe) <= 10_000

    def test_a_worker_is_healthy_while_it_claims(self, url: str) -> None:
        """It is named by its id or its host; one that left no heartbeat is exit 4."""
        with started("worker", "--engine", QUICK, url=url) as worker:
            worker.until("ready ")
            (found,) = workers(url)
            for name in (found["id"], found["host"]):
                assert [found["id"]] == llmq("health", "--worker", name, "--json", url=url).json["workers"]
        for name in ("nobody", "gpu-7"):
            leave_silent(url, "w1", seconds=30)
            done = llmq("health", "--worker", name, url=url)
            assert (4, "") == (done.code, done.out)
            assert "llmq workers" in done.error
        assert "was last heard 3" in llmq("health", "--worker", "w1", url=url).error

    def test_without_redis_it_is_exit_4(self) -> None:
        """Unreachable, or the embedded server does not run: a probe starts none."""
        assert 4 == llmq("health", "--redis", f"redis://127.0.0.1:{free_port()}").code
        done = llmq("health")
        assert 4 == done.code
        assert "llmq server start" in done.error
        assert "stopped" == llmq("server", "status", "--json").json["state"]

    def test_a_server_that_answers_and_takes_no_writes_is_unhealthy(self, own_server: OwnServer) -> None:
        """PING alone would call it well: a replica, one that is full, one that is held up (F-026)."""
        server = own_server()
        with client_of(server.url) as client:
            client.config_set("maxmemory", 1)
            full = llmq("health", url=server.url)
            assert (4, True) == (full.code, "full" in full.error)
            client.config_set("maxmemory", 0)
            assert 0 == llmq("health", url=server.url).code
            client.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
            begun = time.monotonic()
            held = llmq("health", url=server.url)
            assert 4 == held.code
            assert time.monotonic() - begun < 6
            client.execute_command("CLIENT", "UNPAUSE")
            client.execute_command("REPLICAOF", "127.0.0.1", free_port())
            assert "replica" in llmq("health", url=server.url).error


class TestWhy:
    """`llmq why`: what a job or a batch waits for."""

    def test_it_says_what_holds_a_batch_back(self, url: str, tmp_path: Path) -> None:
        """Each cause with what to type about it; when that is done, the batch goes on."""
        batch_id = submitted(url, write_prompts(tmp_path / "p.jsonl", 2))
        assert 0 == llmq("batch", "pause", batch_id, url=url).code
        assert 0 == llmq("pause", "batch", url=url).code
        told = llmq("why", batch_id, "--json", url=url).json
        assert (True, "batch", "in_progress") == (told["blocked"], told["kind"], told["state"])
        assert {"batch_paused", "class_paused", "no_worker"} == {one["code"] for one in told["reasons"]}
        said = llmq("why", batch_id, url=url).out
        assert f"* the batch is paused; let it go on: llmq batch resume {batch_id}" in said
        assert 0 == llmq("batch", "resume", batch_id, url=url).code
        assert 0 == llmq("resume", "batch", url=url).code
        assert 0 == llmq("worker", "--engine", QUICK, "--until-empty", url=url).code
        assert "completed: 2 lines, 0 failed" in llmq("why", batch_id, url=url).out

    def test_a_line_of_a_batch_is_explained(self, url: str, tmp_path: Path) -> None:
        """By its number or its custom_id, in both ways to write it."""
        batch_id = submitted(url, write_prompts(tmp_path / "prompts.jsonl", 3))
        told = llmq("why", batch_id, 3, "--json", url=url).json
        assert (f"{batch_id}:3", "line", "waiting", True) == (told["id"], told["kind"], told["state"], told["blocked"])
        for words in ((f"{batch_id}:3",), (batch_id, "line-3")):
            said = llmq("why", *words, url=url).out
            assert said.startswith(f"line {batch_id}:3: waiting\n")
            assert "* no worker serves queue default" in said
            assert "* 2 lines of its batch come first" in said
        done = llmq("why", batch_id, "nobody", url=url)
        assert (2, True) == (done.code, "'nobody'" in done.error)

    def test_an_unknown_id_is_said(self, url: str) -> None:
        """It is exit 2."""
        done = llmq("why", "nope", url=url)
        assert 2 == done.code
        assert "no job and no batch" in done.error


class TestDoctor:
    """`llmq doctor`: what breaks queues in the field."""

    def test_all_is_fine_with_a_durable_server_and_a_worker(self, own_server: OwnServer) -> None:
        """Each thing is named; it is exit 0, and nothing stays behind."""
        url = own_server().url
        with started("worker", "--engine", QUICK, url=url) as worker:
            worker.until("ready ")
            done = llmq("doctor", "--engine", QUICK, url=url)
            assert (0, False) == (done.code, "WRONG" in done.out), done.out
            found = llmq("doctor", "--json", url=url)
        assert (0, True) == (found.code, found.json["fine"])
        checks = [
            "server",
            "settings",
            "disk",
            "memory",
            "clients",
            "replicas",
            "keys",
            "rights",
            "latency",
            "clock",
            "scripts",
            "claim",
            "workers",
        ]
        assert checks == [one["check"] for one in found.json["findings"]]
        assert [*checks, "engine"] == [line.split()[1] for line in done.out.splitlines()]

    def test_what_is_wrong_is_said_with_what_to_type(self, own_server: OwnServer) -> None:
        """A server that may lose jobs (F-026, F-094), no worker, no engine: exit 1."""
        url = own_server("--appendonly", "no", "--save", "", "--maxmemory-policy", "allkeys-lru").url
        done = llmq("doctor", "--engine", f"http://127.0.0.1:{free_port()}", url=url)
        assert 1 == done.code
        wrong = [line.split()[1] for line in done.out.splitlines() if line.startswith("WRONG")]
        assert ["settings", "settings", "workers", "engine"] == wrong
        assert "-> type CONFIG SET appendonly yes" in done.out
        assert "-> llmq worker --gpu 0" in done.out

    def test_a_server_that_cannot_be_reached_is_a_finding(self) -> None:
        """What needs no Redis is looked at all the same."""
        done = llmq("doctor", "--redis", f"redis://127.0.0.1:{free_port()}", "--engine", QUICK, "--json")
        assert 1 == done.code
        assert [("server", False), ("engine", True)] == [(one["check"], one["fine"]) for one in done.json["findings"]]

    def test_a_local_model_has_no_server_to_be_looked_at(self, own_server: OwnServer) -> None:
        """The command that uses it starts it; until then there is nothing that could be wrong."""
        done = llmq("doctor", "--engine", "local:model.gguf", "--json", url=own_server().url)
        assert "engine" not in [one["check"] for one in done.json["findings"]]


class TestJobDelete:
    """`llmq job delete`: what is left of a job."""

    def test_an_answer_is_deleted_and_a_living_job_is_not(self, url: str) -> None:
        """Private text goes when it is to go; whoever waits is not robbed of the end."""
        with started("ask", "hello", url=url) as ask:
            ask.until("no worker serves")
            with client_of(url) as client:
                (key,) = client.scan_iter(match=KEYS.job("*"))
            job_id = key.decode().rpartition(":")[2]
            refused = llmq("job", "delete", job_id, url=url)
            assert 2 == refused.code
            assert f"llmq job cancel {job_id}" in refused.error
            assert 0 == llmq("worker", "--engine", QUICK, "--until-empty", url=url).code
            assert 0 == ask.end().code
        assert llmq("job", "delete", job_id, "--json", url=url).json == {"id": job_id, "deleted": True}
        assert [2, 2] == [llmq("job", verb, job_id, url=url).code for verb in ("show", "delete")]
