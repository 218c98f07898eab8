"""`llmq run` and `llmq submit-batch` as people and scripts use them: processes, a real server, signals, files."""

from __future__ import annotations

import hashlib
import json
import resource
import shlex
from pathlib import Path

import pytest

from tests.servers import client_of
from tests.system.cli_process import (
    QUICK,
    SLOW,
    TOO_LONG,
    answering,
    free_port,
    ids,
    ids_in,
    llmq,
    started,
    until,
    write_prompts,
)

#: What these tests leave queued is not the point: the next test begins on an empty server.
pytestmark = pytest.mark.leaves("llmq:*")


@pytest.fixture
def url(system_redis_url: str) -> str:
    """The URL of an empty server."""
    return system_redis_url


def queue_of(prompts: Path) -> str:
    """Return the queue in which `llmq run` runs a file."""
    return f"run-{hashlib.sha256(prompts.read_bytes()).hexdigest()[:16]}"


def printed(err: str, command: str) -> list[str]:
    """Return the arguments of the command line that a notice ends with."""
    (line,) = (line for line in err.splitlines() if command in line)
    return shlex.split(line[line.index(command) :])[1:]


def wait_for_lines(out: Path, count: int) -> None:
    """Wait until an output holds this many lines."""
    until(lambda: out.exists() and out.read_bytes().count(b"\n") >= count, f"{count} lines in {out}")


def small_disk() -> None:
    """Let this process write no file beyond 64 KiB: to it that is a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, 65_536))


class TestRun:
    """`llmq run`: all of it in one process."""

    def test_it_runs_a_file_without_any_server_and_says_so_when_it_is_complete(self, tmp_path: Path) -> None:
        """The embedded server is started by itself; the same command again runs nothing."""
        prompts = write_prompts(tmp_path / "prompts.jsonl", 20)
        command = ("run", prompts, "-o", tmp_path / "out.jsonl", "--engine", QUICK, "--ordered")
        try:
            done = llmq(*command)
            assert (0, "") == (done.code, done.out), done.err
            assert "20 lines ok, 0 failed" in done.err
            assert "simulated" in done.err
            assert ids(20) == ids_in(tmp_path / "out.jsonl")
            before = (tmp_path / "out.jsonl").read_bytes()
            again = llmq(*command, "--engine", "http://127.0.0.1:9")  # no engine is needed for what is done
            assert 0 == again.code
            assert "complete" in again.err
            assert before == (tmp_path / "out.jsonl").read_bytes()
        finally:
            assert 0 == llmq("server", "stop").code

    def test_interrupted_it_ends_with_130_and_the_printed_command_goes_on(self, url: str, tmp_path: Path) -> None:
        """No line is lost, none is in the output twice (G6, F-031)."""
        prompts, out = write_prompts(tmp_path / "prompts.jsonl", 400, max_tokens=8), tmp_path / "out.jsonl"
        with started("run", prompts, "-o", out, "--engine", SLOW, url=url) as run:
            wait_for_lines(out, 4)
            run.interrupt()
            done = run.end()
        assert 130 == done.code
        hint = done.err.splitlines()[-1]
        assert f"Go on: llmq run {prompts} -o {out}" in hint
        some = ids_in(out)
        assert 0 < len(some) < 400
        done = llmq("run", prompts, "-o", out, "--engine", QUICK, url=url)
        assert 0 == done.code, done.err
        assert sorted(ids(400)) == sorted(ids_in(out))
        assert some == ids_in(out)[: len(some)]

    def test_sigterm_is_the_same_as_ctrl_c(self, url: str, tmp_path: Path) -> None:
        """A supervisor's word stops it as well (G6)."""
        prompts, out = write_prompts(tmp_path / "prompts.jsonl", 400, max_tokens=8), tmp_path / "out.jsonl"
        with started("run", prompts, "-o", out, "--engine", SLOW, url=url) as run:
            wait_for_lines(out, 1)
            run.terminate()
            assert 130 == run.end().code

    def test_killed_it_goes_on_from_there(self, url: str, tmp_path: Path) -> None:
        """After SIGKILL the same command finishes the file, once each line (G3, G5)."""
        prompts, out = write_prompts(tmp_path / "prompts.jsonl", 40, max_tokens=8), tmp_path / "out.jsonl"
        assert 0 == llmq("set", "lease", "1s", "--queue", queue_of(prompts), url=url).code
        with started("run", prompts, "-o", out, "--engine", SLOW, url=url) as run:
            wait_for_lines(out, 2)
            run.kill()
        done = llmq("run", prompts, "-o", out, "--engine", SLOW, url=url)
        assert 0 == done.code, done.err
        assert sorted(ids(40)) == sorted(ids_in(out))

    def test_failed_lines_are_exit_3_at_the_first_time_and_again(self, url: str, tmp_path: Path) -> None:
        """A line that the engine refuses is a result with its status; --force starts over."""
        prompts, out = write_prompts(tmp_path / "prompts.jsonl", 3, **TOO_LONG), tmp_path / "out.jsonl"
        command = ("run", prompts, "-o", out, "--engine", QUICK)
        done = llmq(*command, url=url)
        assert 3 == done.code
        assert "0 lines ok, 3 failed" in done.err
        assert {400} == {json.loads(line)["response"]["status_code"] for line in out.read_bytes().splitlines()}
        assert 3 == llmq(*command, url=url).code
        forced = llmq(*command, "--force", url=url)
        assert 3 == forced.code
        assert "completed" in forced.err

    def test_bad_lines_become_error_lines_on_request(self, url: str, tmp_path: Path) -> None:
        """One bad line never harms another (G16)."""
        prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
        prompts.write_text('{"prompt": "a"}\nnope\n{"prompt": "b"}\n')
        assert 2 == llmq("run", prompts, "-o", out, "--engine", QUICK, url=url).code
        done = llmq("run", prompts, "-o", out, "--engine", QUICK, "--skip-bad", "--ordered", url=url)
        assert 3 == done.code
        assert ids(3) == ids_in(out)
        results = [json.loads(line) for line in out.read_bytes().splitlines()]
        assert [None, results[1]["error"], None] == [result["error"] for result in results]
        assert results[1]["response"] is None

    def test_without_o_results_go_into_the_pipe(self, url: str, tmp_path: Path) -> None:
        """Stdout holds results and nothing else; a second time they are delivered again without being run."""
        prompts = write_prompts(tmp_path / "prompts.jsonl", 5)
        for _ in range(2):
            done = llmq("run", prompts, "--engine", QUICK, url=url)
            assert 0 == done.code
            assert ids(5) == sorted(json.loads(line)["custom_id"] for line in done.out.splitlines())
        assert "was run before" in done.err

    def test_json_is_one_object_and_the_results_are_in_a_file(self, url: str, tmp_path: Path) -> None:
        """With --json stdout cannot hold results too."""
        prompts = write_prompts(tmp_path / "prompts.jsonl", 5)
        done = llmq("--json", "run", prompts, "--engine", QUICK, url=url, folder=tmp_path)
        assert {"total": 5, "completed": 5, "failed": 0} == done.json["request_counts"]
        assert done.json["simulated"] is True
        assert 5 == len(ids_in(tmp_path / done.json["output"]))

    def test_another_engine_does_not_pass_off_earlier_answers(self, url: str, tmp_path: Path) -> None:
        """Whoever names another engine or model for a file that is done wants it run anew, and is told how."""
        prompts = write_prompts(tmp_path / "prompts.jsonl", 2)
        assert 0 == llmq("run", prompts, "-o", tmp_path / "a", "--engine", QUICK, url=url).code
        for other in (("--engine", "sim://?instant=1&seed=2"), ("--engine", QUICK, "--model", "m")):
            done = llmq("run", prompts, "-o", tmp_path / "b", *other, url=url)
            assert 2 == done.code
            assert "--force" in done.error
            assert not (tmp_path / "b").exists()
        forced = llmq("run", prompts, "-o", tmp_path / "b", "--engine", "sim://?instant=1&seed=2", "--force", url=url)
        assert 0 == forced.code

    def test_a_full_disk_loses_nothing(self, url: str, tmp_path: Path) -> None:
        """The output stays whole lines, and with room again the same command goes on from there."""
        prompts, out = write_prompts(tmp_path / "prompts.jsonl", 400), tmp_path / "out.jsonl"
        command = ("run", prompts, "-o", out, "--engine", QUICK)
        with started(*command, url=url, preexec_fn=small_disk) as run:
            done = run.end()
        assert 1 == done.code
        assert "Make room" in done.error
        assert out.read_bytes().endswith(b"\n") or not out.read_bytes()
        assert 0 == llmq(*command, url=url).code
        assert sorted(ids(400)) == sorted(ids_in(out))

    def test_an_engine_that_is_away_costs_nothing(self, url: str, tmp_path: Path) -> None:
        """It is said before anything is queued."""
        prompts = write_prompts(tmp_path / "prompts.jsonl", 2)
        done = llmq("run", prompts, "-o", tmp_path / "out", "--engine", f"http://127.0.0.1:{free_port()}/v1", url=url)
        assert 4 == done.code
        with client_of(url) as client:
            assert [] == client.keys("*")

    def test_starting_over_without_an_engine_costs_no_earlier_run(self, url: str, tmp_path: Path) -> None:
        """Nothing is overwritten, cancelled or deleted before there is an engine to make it anew."""
        prompts, out = write_prompts(tmp_path / "p.jsonl", 3), tmp_path / "out.jsonl"
        assert 0 == llmq("run", prompts, "-o", out, "--engine", QUICK, url=url).code
        kept = out.read_bytes()
        engine = f"http://127.0.0.1:{free_port()}"
        assert 4 == llmq("run", prompts, "-o", out, "--engine", engine, "--force", url=url).code
        assert kept == out.read_bytes()
        shown = llmq("batch", "show", queue_of(prompts), "--queue", queue_of(prompts), "--json", url=url)
        assert "completed" == shown.json["status"]

    def test_without_an_engine_no_output_is_begun(self, url: str, tmp_path: Path) -> None:
        """A run that could not begin leaves no empty files behind."""
        prompts = write_prompts(tmp_path / "p.jsonl", 3)
        engine = f"http://127.0.0.1:{free_port()}"
        assert 4 == llmq("run", prompts, "-o", tmp_path / "out.jsonl", "--engine", engine, url=url).code
        assert [prompts] == list(tmp_path.iterdir())

    def test_the_printed_commands_run_the_failed_lines_again(self, url: str, tmp_path: Path) -> None:
        """Each names the queue of the file: who follows them ends with the results of a second try."""
        prompts = write_prompts(tmp_path / "p.jsonl", 2, **TOO_LONG)
        done = llmq("run", prompts, "-o", tmp_path / "out.jsonl", "--engine", QUICK, url=url)
        assert 3 == done.code
        retried = llmq(*printed(done.err, "llmq batch retry"), url=url)
        assert 0 == retried.code
        serve = printed(retried.err, "llmq worker")
        assert 0 == llmq(*serve, "--engine", QUICK, "--until-empty", url=url).code
        results = llmq(*printed(retried.err, "llmq batch results"), url=url, folder=tmp_path)
        assert 3 == results.code
        assert ids(2) == sorted(ids_in(tmp_path / "retried.jsonl"))

    def test_a_web_page_is_no_engine(self, url: str, tmp_path: Path) -> None:
        """What answers HTML is not taken for an engine."""
        prompts = write_prompts(tmp_path / "prompts.jsonl", 2)
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 13\r\nConnection: close\r\n\r\n"
        with answering(lambda asked: head + b"<html></html>") as port:
            done = llmq("run", prompts, "-o", tmp_path / "out", "--engine", f"http://127.0.0.1:{port}", url=url)
        assert 4 == done.code
        assert str(port) in done.error


class TestSubmitBatch:
    """`llmq submit-batch`: a file into the queue, and its results out."""

    def test_it_prints_the_id_and_what_to_type_next(self, url: str, tmp_path: Path) -> None:
        """Stdout is the id, for scripts; all else is on stderr."""
        done = llmq("submit-batch", write_prompts(tmp_path / "p.jsonl", 7), url=url)
        assert 0 == done.code
        batch_id = done.out.strip()
        assert f"llmq batch results {batch_id}" in done.err
        assert "no worker serves queue default" in done.err
        shown = llmq("batch", "show", batch_id, "--json", url=url).json
        assert {"total": 7, "completed": 0, "failed": 0} == shown["request_counts"]
        assert "in_progress" == shown["status"]

    def test_json_is_one_object(self, url: str, tmp_path: Path) -> None:
        """It has the id and the number of lines; the same command again makes another batch."""
        prompts = write_prompts(tmp_path / "p.jsonl", 7)
        first, second = (llmq("submit-batch", prompts, "--json", url=url).json for _ in range(2))
        assert [7, 7] == [first["lines"], second["lines"]]
        assert first["id"] != second["id"]

    def test_it_reads_stdin(self, url: str) -> None:
        """`-` is spooled, since it is read twice."""
        done = llmq("submit-batch", "-", "--json", url=url, stdin=b'{"prompt": "a"}\n"b"\n')
        assert 2 == done.json["lines"]

    def test_with_o_it_waits_and_writes(self, url: str, tmp_path: Path) -> None:
        """A worker elsewhere serves; the output has every line, and the exit code says that some failed."""
        prompts, out = write_prompts(tmp_path / "p.jsonl", 3, **TOO_LONG), tmp_path / "out.jsonl"
        with started("worker", "--engine", QUICK, url=url) as worker:
            worker.until("ready ")
            done = llmq("submit-batch", prompts, "-o", out, "--ordered", url=url)
            assert 3 == done.code
            assert ids(3) == ids_in(out)
            waited = llmq("submit-batch", write_prompts(tmp_path / "q.jsonl", 3), "--wait", "--json", url=url)
            assert (0, "completed") == (waited.code, waited.json["status"])

    def test_interrupted_while_it_waits_the_batch_goes_on(self, url: str, tmp_path: Path) -> None:
        """The printed command collects the rest."""
        prompts, out = write_prompts(tmp_path / "p.jsonl", 5), tmp_path / "out.jsonl"
        with started("submit-batch", prompts, "-o", out, url=url) as submit:
            submit.until("queued 5 lines")
            submit.interrupt()
            done = submit.end()
        assert 130 == done.code
        words = done.err.splitlines()[-1].partition("llmq ")[2].split()
        assert ["batch", "results"] == words[:2]
        assert 0 == llmq("worker", "--engine", QUICK, "--until-empty", url=url).code
        assert 0 == llmq(*words, url=url).code
        assert sorted(ids(5)) == sorted(ids_in(out))

    def test_interrupted_while_the_queue_is_full_it_is_resumed(self, url: str, tmp_path: Path) -> None:
        """It waits for room and shows it; --resume queues the rest, of the same file only (G15)."""
        prompts = write_prompts(tmp_path / "p.jsonl", 50)
        assert 0 == llmq("set", "cap_batch", "20", url=url).code
        with started("submit-batch", prompts, url=url) as submit:
            until(lambda: lines_queued(url) == 20, "20 lines in the queue")
            submit.interrupt()
            done = submit.end()
        assert 130 == done.code
        words = done.err.splitlines()[-1].partition("llmq ")[2].split()
        assert "--resume" in words
        assert 0 == llmq("set", "cap_batch", "default", url=url).code
        other = [write_prompts(tmp_path / "other.jsonl", 49) if word == str(prompts) else word for word in words]
        refused = llmq(*other, url=url)
        assert 2 == refused.code
        assert "another file" in refused.error
        resumed = llmq(*words, "--json", url=url)
        assert 0 == resumed.code
        assert {"total": 50, "completed": 0, "failed": 0} == resumed.json["request_counts"]

    def test_without_waiting_a_full_queue_is_exit_5_and_nothing_is_queued(self, url: str, tmp_path: Path) -> None:
        """All of it or nothing (G15)."""
        assert 0 == llmq("set", "cap_batch", "20", url=url).code
        done = llmq("submit-batch", write_prompts(tmp_path / "p.jsonl", 50), "--no-wait", url=url)
        assert (5, "") == (done.code, done.out)
        assert "cap_batch" in done.error
        assert [] == llmq("batch", "ls", "--json", url=url).json["batches"]

    def test_a_model_that_no_worker_lists_is_a_warning(self, url: str, tmp_path: Path) -> None:
        """It is submitted all the same: the engine has the last word."""
        with started("worker", "--engine", QUICK, url=url) as worker:
            worker.until("ready ")
            done = llmq("submit-batch", write_prompts(tmp_path / "p.jsonl", 1, model="gpt-9"), url=url)
            assert 0 == done.code
            assert "'gpt-9'" in done.err
            known = llmq("submit-batch", write_prompts(tmp_path / "p.jsonl", 1, model="sim"), url=url)
            assert "warning" not in "".join(line for line in known.err.splitlines() if "model" in line)

    def test_an_output_that_cannot_be_used_costs_no_batch(self, url: str, tmp_path: Path) -> None:
        """It is said before a line is queued, for each kind of output."""
        prompts = write_prompts(tmp_path / "p.jsonl", 2)
        (tmp_path / "other").write_text("something else\n")
        for out, told in (
            (tmp_path / "other", "--force"),
            (tmp_path / "missing" / "out", "mkdir"),
            (tmp_path, "is a folder"),
            (prompts, "is the input file"),
        ):
            done = llmq("submit-batch", prompts, "-o", out, url=url)
            assert (2, "") == (done.code, done.out)
            assert told in done.error
        assert "something else\n" == (tmp_path / "other").read_text()
        assert [] == llmq("batch", "ls", "--json", url=url).json["batches"]

    def test_a_full_disk_ends_it_and_the_batch_goes_on(self, url: str, tmp_path: Path) -> None:
        """What was queued is not touched by an output that takes no more."""
        with started("worker", "--engine", QUICK, url=url) as worker:
            worker.until("ready ")
            done = llmq("submit-batch", write_prompts(tmp_path / "p.jsonl", 2), "-o", "/dev/full", url=url)
        assert 1 == done.code
        assert "No space left on device" in done.error


def lines_queued(url: str) -> int:
    """Return how many lines the newest batch has."""
    batches = llmq("batch", "ls", "--json", url=url).json["batches"]
    return int(batches[0]["lines"]) if batches else 0
