"""The verbs of the command line as people and scripts use them: processes, a real server, exit codes, streams."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.system.cli_process import (
    QUICK,
    SLOW,
    TOO_LONG,
    free_port,
    ids,
    llmq,
    started,
    submitted,
    until,
    write_prompts,
)

#: What these tests leave queued is not the point: the next test begins on an empty server.
pytestmark = pytest.mark.leaves("llmq:*")


@pytest.fixture
def url(system_redis_url: str) -> str:
    """The URL of an empty server."""
    return system_redis_url


class TestBatch:
    """`llmq batch`: looking at batches and changing them."""

    def test_a_batch_is_paused_resumed_run_and_shown(self, url: str, tmp_path: Path) -> None:
        """Paused, no line of it starts, though a worker serves until the queue is empty."""
        batch_id = submitted(url, write_prompts(tmp_path / "p.jsonl", 4))
        assert llmq("batch", "pause", batch_id, "--json", url=url).json["paused"] is True
        assert "paused" in llmq("batch", "ls", url=url).out
        with started("worker", "--engine", QUICK, "--until-empty", url=url) as worker:
            worker.until("ready ")
            assert 0 == llmq("batch", "show", batch_id, "--json", url=url).json["request_counts"]["completed"]
            assert llmq("batch", "resume", batch_id, "--json", url=url).json["paused"] is False
            assert 0 == worker.end().code
        assert "4 (100%)" in llmq("batch", "show", batch_id, url=url).out
        results = llmq("batch", "results", batch_id, url=url)
        assert (0, ids(4)) == (results.code, sorted(json.loads(line)["custom_id"] for line in results.out.splitlines()))

    def test_results_are_of_all_lines_or_of_a_choice(self, url: str, tmp_path: Path) -> None:
        """Exit 3 says that lines failed, whichever are asked for; with --json all of it is one object."""
        prompts = tmp_path / "p.jsonl"
        good, bad = {"prompt": "a"}, {"prompt": "b", **TOO_LONG}
        prompts.write_text("".join(json.dumps(body) + "\n" for body in (good, bad, good)))
        batch_id = submitted(url, prompts)
        so_far = llmq("batch", "results", batch_id, url=url)
        assert (0, "") == (so_far.code, so_far.out)
        assert 0 == llmq("worker", "--engine", QUICK, "--until-empty", url=url).code
        ok, failed = (llmq("batch", "results", batch_id, choice, url=url) for choice in ("--ok", "--failed"))
        assert [2, 1] == [done.out.count("\n") for done in (ok, failed)]
        assert [3, 3] == [done.code for done in (ok, failed)]
        whole = llmq("batch", "results", batch_id, "--json", url=url)
        assert 3 == whole.code
        assert (3, "completed") == (len(whole.json["results"]), whole.json["status"])

    def test_failed_lines_are_run_again_as_a_batch_of_their_own(self, url: str, tmp_path: Path) -> None:
        """The new batch has only them; a second retry of the same batch is refused."""
        batch_id = submitted(url, write_prompts(tmp_path / "p.jsonl", 2, **TOO_LONG))
        assert 2 == llmq("batch", "retry", batch_id, url=url).code
        assert 0 == llmq("worker", "--engine", QUICK, "--until-empty", url=url).code
        again = llmq("batch", "retry", batch_id, "--json", url=url).json
        assert (2, batch_id) == (again["lines"], again["retry_of"])
        assert 2 == llmq("batch", "retry", batch_id, url=url).code

    def test_destructive_verbs_ask_and_refuse_where_nobody_answers(self, url: str, tmp_path: Path) -> None:
        """They show a count and the line to type; with --yes they act (G14)."""
        batch_id = submitted(url, write_prompts(tmp_path / "p.jsonl", 4))
        refused = llmq("batch", "cancel", batch_id, url=url)
        assert 2 == refused.code
        assert "4 lines" in refused.error
        assert f"llmq batch cancel {batch_id} --yes" in refused.error
        assert "in_progress" == llmq("batch", "show", batch_id, "--json", url=url).json["status"]
        assert "cancel it first" in llmq("batch", "delete", batch_id, "--yes", url=url).error
        assert "cancelled" == llmq("batch", "cancel", batch_id, "--yes", "--json", url=url).json["status"]
        assert 3 == llmq("batch", "results", batch_id, url=url).code
        refused = llmq("batch", "delete", batch_id, url=url)
        assert (2, True) == (refused.code, "4 results" in refused.error)
        assert 0 == llmq("batch", "delete", batch_id, "--yes", url=url).code
        assert 2 == llmq("batch", "show", batch_id, url=url).code

    def test_a_reader_that_leaves_ends_it_quietly(self, url: str, tmp_path: Path) -> None:
        """`llmq batch results ID | head -1` is no error."""
        batch_id = submitted(url, write_prompts(tmp_path / "p.jsonl", 300, max_tokens=200))
        assert 0 == llmq("worker", "--engine", QUICK, "--until-empty", url=url).code
        with started("batch", "results", batch_id, url=url) as results:
            assert results.process.stdout is not None
            results.process.stdout.readline()
            results.process.stdout.close()
            assert 0 == results.process.wait(timeout=60)
            assert results.process.stderr is not None
            assert b"rror" not in results.process.stderr.read()


class TestAskAndJob:
    """`llmq ask`: chat on a terminal; `llmq job`: what became of it."""

    def test_an_answer_is_streamed_and_the_job_can_be_looked_at(self, url: str) -> None:
        """The text ends with a line break; --json is the engine's answer whole."""
        with started("worker", "--engine", QUICK, url=url) as worker:
            worker.until("ready ")
            done = llmq("ask", "hello", "--max-tokens", 5, url=url)
            assert (0, 5) == (done.code, len(done.out.split()))
            assert done.out.endswith("\n")
            asked = llmq("ask", "-", "--system", "be brief", "--json", url=url, stdin=b"hello").json
            assert asked["text"] == asked["body"]["choices"][0]["message"]["content"]
            shown = llmq("job", "show", asked["id"], "--json", url=url).json
            assert ("completed", "interactive", 0) == (shown["state"], shown["class"], shown["attempts"] or 0)
            assert "completed" in llmq("job", "show", asked["id"], url=url).out
            assert "ended" == llmq("job", "cancel", asked["id"], "--json", url=url).json["result"]

    def test_without_a_worker_it_says_so_and_expires(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Nobody waits for ever for an answer that nobody gives (G13)."""
        monkeypatch.setattr("llmq.cli.ask._NOTE_AFTER_S", 0.1)  # long before the end, however busy the machine is
        assert 0 == llmq("set", "queue_ttl", "3s", url=url).code
        done = llmq("ask", "hello", url=url)
        assert (1, "") == (done.code, done.out)
        assert "no worker serves queue default" in done.err
        assert "queue_ttl" in done.error

    def test_a_simulated_answer_is_called_one(self, url: str, tmp_path: Path) -> None:
        """Noise is never taken for an answer: each command that shows or awaits one says so."""
        with started("worker", "--engine", QUICK, url=url) as worker:
            worker.until("ready ")
            prompts = write_prompts(tmp_path / "p.jsonl", 1)
            for words in (("ask", "x"), ("ask", "x", "--json"), ("submit-batch", prompts)):
                assert "simulated" in llmq(*words, url=url).err

    def test_interrupted_it_cancels_the_job(self, url: str) -> None:
        """Whoever leaves waits for nothing: the job does not run later (G14)."""
        with started("ask", "hello", url=url) as ask:
            ask.until("no worker serves")
            ask.interrupt()
            done = ask.end()
        assert 130 == done.code
        assert 0 == llmq("status", "--json", url=url).json["interactive"]["waiting"]

    def test_a_refusal_of_the_engine_is_shown(self, url: str) -> None:
        """The engine's status and message are in the line."""
        with started("worker", "--engine", "sim://?instant=1&kv_tokens=10", url=url) as worker:
            worker.until("ready ")
            done = llmq("ask", "hello " * 50, url=url)
        assert 1 == done.code
        assert "HTTP 400" in done.error

    def test_an_unknown_job_is_said(self, url: str) -> None:
        """Looking at it, and cancelling it, are exit 2."""
        assert [2, 2] == [llmq("job", verb, "nope", url=url).code for verb in ("show", "cancel")]


class TestWorker:
    """`llmq worker`: a process that serves until it is asked to stop."""

    def test_it_says_when_it_is_ready_and_sigterm_is_exit_0(self, url: str) -> None:
        """One line on stderr, with its operating point; it is listed while it lives."""
        with started("worker", "--gpu", "0,1", "--engine", "sim://?slots=20", "--reserve", 3, url=url) as worker:
            ready = worker.until("ready ")
            assert "concurrency=20 reserve=3" in ready
            (listed,) = llmq("workers", "--json", url=url).json["workers"]
            assert ("0,1", 20, "sim", True) == (listed["gpu"], listed["slots"], listed["engine"], listed["simulated"])
            assert listed["id"] in llmq("workers", url=url).out
            worker.terminate()
            assert 0 == worker.end().code
        assert [] == llmq("workers", "--json", url=url).json["workers"]

    def test_drained_in_the_middle_nothing_is_lost(self, url: str, tmp_path: Path) -> None:
        """What the first worker hands back the second one runs (G6)."""
        batch_id = submitted(url, write_prompts(tmp_path / "p.jsonl", 12, max_tokens=10))
        with started("worker", "--engine", SLOW, "--grace", "0", url=url) as worker:
            worker.until("ready ")
            until(lambda: lines_done(url, batch_id) > 0, "a line that is done")
            worker.terminate()
            assert 0 == worker.end().code
        assert 0 == llmq("worker", "--engine", QUICK, "--until-empty", url=url).code
        shown = llmq("batch", "show", batch_id, "--json", url=url).json
        assert {"total": 12, "completed": 12, "failed": 0} == shown["request_counts"]

    def test_without_an_engine_it_is_exit_4(self, url: str) -> None:
        """The line names the choices; an unknown form is bad usage."""
        assert 4 == llmq("worker", "--engine", f"http://127.0.0.1:{free_port()}", url=url).code
        assert 2 == llmq("worker", "--engine", "ftp://x", url=url).code


class TestPolicy:
    """`llmq rate`, `pause`, `resume`, `set` and `status`: the policy of a queue."""

    def test_the_rate_is_shown_changed_and_taken_away(self, url: str) -> None:
        """Without an argument it is shown, in words and as numbers."""
        assert "off\n" == llmq("rate", url=url).out
        assert "5/s, burst 10\n" == llmq("rate", "5/s", "--burst", 10, url=url).out
        shown = llmq("rate", "--json", url=url).json
        assert ("5/s", 5, 10) == (shown["set"], shown["rate"], shown["burst"])
        assert "off\n" == llmq("rate", "off", url=url).out

    def test_a_class_is_paused_and_resumed(self, url: str) -> None:
        """The status says which classes are paused."""
        assert llmq("pause", "batch", "--json", url=url).json["paused"] is True
        assert ["batch"] == llmq("status", "--json", url=url).json["paused"]
        assert "paused" in llmq("status", url=url).out
        assert 0 == llmq("resume", "batch", url=url).code
        assert [] == llmq("status", "--json", url=url).json["paused"]

    def test_live_settings_are_listed_with_their_source(self, url: str) -> None:
        """A change is shown as set, `default` takes it back."""
        assert "deadline = 15s (set)\n" == llmq("set", "deadline", "15s", url=url).out
        assert {"value": "15s", "source": "set"} == llmq("set", "--json", url=url).json["deadline"]
        assert "deadline = 30s (default)\n" == llmq("set", "deadline", "default", url=url).out
        assert 0 == llmq("set", "weight.evals", "3", url=url).code
        assert "weight.evals" in llmq("set", url=url).out
        assert "weight.evals is not set\n" == llmq("set", "weight.evals", "default", url=url).out

    def test_what_to_type_next_leads_to_the_same_queue_and_server(self, url: str, tmp_path: Path) -> None:
        """Options that led here are in each command that is printed; the environment needs no repeating."""
        where = ("--queue", "other", "--redis", url)
        prompts = write_prompts(tmp_path / "p.jsonl", 1)
        for words in (("status",), ("workers",), ("batch", "ls"), ("submit-batch", prompts)):
            err = llmq(*words, *where).err
            named = [line for line in err.splitlines() if "llmq " in line]
            assert named
            assert [] == [line for line in named if f"--queue other --redis {url}" not in line]
        assert "--redis" not in llmq("status", "--queue", "other", url=url).err

    def test_a_queue_of_another_name_has_a_policy_of_its_own(self, url: str) -> None:
        """Everything means the same queue, `default` where none is named."""
        assert 0 == llmq("pause", "batch", "--queue", "other", url=url).code
        assert [] == llmq("status", "--json", url=url).json["paused"]
        assert ["batch"] == llmq("status", "--json", "--queue", "other", url=url).json["paused"]

    def test_the_status_has_what_the_contract_names(self, url: str, tmp_path: Path) -> None:
        """Scripts rely on these names."""
        submitted(url, write_prompts(tmp_path / "p.jsonl", 3))
        status = llmq("status", "--json", url=url).json
        for cls in ("interactive", "batch"):
            assert {"waiting", "running", "delayed", "dead", "oldest_wait_s"} <= set(status[cls])
        assert 3 == status["batch"]["waiting"]
        assert {"throughput_per_s", "mean_wait_s"} <= set(status["batch"])
        assert {"rate", "burst", "tokens", "exhausted", "wait_s"} <= set(status["bucket"])
        assert {"queue", "paused", "latency", "workers"} <= set(status)


def lines_done(url: str, batch_id: str) -> int:
    """Return how many lines of a batch are answered."""
    return int(llmq("batch", "show", batch_id, "--json", url=url).json["request_counts"]["completed"])
