"""`--serve` and `local:` as people use them: the engine comes up, comes back, and goes with the command."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine import tiny_model
from tests.engine.served import LOADS_FOR_EVER, Served
from tests.servers import client_of
from tests.system.cli_process import free_port, ids, ids_in, llmq, started, submitted, until, write_prompts

#: What these tests leave queued is not the point: the next test begins on an empty server.
pytestmark = pytest.mark.leaves("llmq:*")

LONG = {"max_tokens": 150, "ignore_eos": True}


@pytest.fixture
def url(system_redis_url: str) -> str:
    """The URL of an empty server."""
    return system_redis_url


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """The processes of a test's engine; none may outlive the test."""
    processes = Served(tmp_path)
    yield processes
    left = processes.alive
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert [] == left


def results(url: str, batch: str) -> int:
    """Return how many lines of a batch have ended."""
    with client_of(url) as client:
        return int(client.xlen(f"llmq:{{default}}:b:{batch}:results"))


class TestWorker:
    """`llmq worker --serve`."""

    def test_an_engine_that_is_killed_comes_back_and_nothing_is_lost(
        self, url: str, tmp_path: Path, served: Served
    ) -> None:
        """G2, G7, G16: kill -9 of the engine in mid-batch, twice; SIGTERM of the worker then stops the engine too."""
        batch = submitted(url, write_prompts(tmp_path / "prompts.jsonl", 24, **LONG))
        with started("worker", "--serve", served.llama(free_port()), url=url) as worker:
            worker.until("ready ")
            for deaths in (1, 2):
                so_far = results(url, batch)
                until(lambda: results(url, batch) > so_far, "a result more")  # noqa: B023  # awaited within the round
                served.kill()
                worker.until("healthy again", deaths)
            until(lambda: results(url, batch) == 24, "all results")
            worker.terminate()
            done = worker.end()
        assert 0 == done.code, done.err
        assert 3 == len(served.pids)
        assert [] == served.alive
        out = tmp_path / "out.jsonl"
        collected = llmq("batch", "results", batch, "-o", out, url=url)
        assert 0 == collected.code, collected.err
        assert sorted(ids(24)) == sorted(ids_in(out))

    def test_a_killed_worker_takes_its_engine_with_it(self, url: str, served: Served) -> None:
        """SIGKILL: nobody is left to say goodbye, and the GPU is free all the same; the next worker can take it."""
        port = free_port()
        for _ in range(2):
            with started("worker", "--serve", served.llama(port), url=url) as worker:
                worker.until("ready ")
                worker.kill()
            until(lambda: not served.alive, "no engine left")
        assert 2 == len(served.pids)

    def test_it_can_be_stopped_while_the_engine_loads(self, url: str, tmp_path: Path, served: Served) -> None:
        """Ctrl-C and SIGTERM: exit 0, as with every worker that is stopped; the engine is gone."""
        log = tmp_path / "log"
        command = served.program(LOADS_FOR_EVER)
        for stop in ("interrupt", "terminate"):
            with started(
                "worker", "--serve", command, "--serve-log", log, "--engine", f"http://127.0.0.1:{free_port()}", url=url
            ) as worker:
                worker.until("starting ")
                until(lambda: log.exists() and b"loading" in log.read_bytes(), "an engine that loads")
                getattr(worker, stop)()
                done = worker.end()
            assert 0 == done.code
            assert "interrupted before the engine was ready; nothing was claimed" in done.err
            assert [] == served.alive
            log.unlink()

    def test_a_second_engine_on_one_gpu_is_refused(self, url: str, served: Served) -> None:
        """It is a mistake that costs both their memory; another GPU is another matter."""
        with started("worker", "--gpu", "0", "--serve", served.llama(free_port()), url=url) as worker:
            worker.until("ready ")
            second = llmq("worker", "--gpu", "0,1", "--serve", served.llama(free_port()), url=url)
            with started("worker", "--gpu", "1", "--serve", served.llama(free_port()), url=url) as third:
                third.until("ready ")
                third.terminate()
                assert 0 == third.end().code
            worker.terminate()
            assert 0 == worker.end().code
        assert 2 == second.code
        assert (
            f"GPU 0 of this host has an engine that llmq started already (process {worker.process.pid})" in second.err
        )

    def test_an_engine_that_does_not_start_is_one_clear_error(self, url: str, served: Served) -> None:
        """Exit 4, its exit code and its last words; on stderr they are there already."""
        command = served.program("import sys; sys.exit('no such model')")
        address = f"http://127.0.0.1:{free_port()}"
        done = llmq("worker", "--serve", command, "--engine", address, url=url)
        assert 4 == done.code
        assert "ended before it was healthy (exit code 1); its last words:\n  no such model" in done.err
        with started("worker", "--serve", command, "--engine", address, "--serve-log", "-", url=url) as worker:
            loud = worker.end()
        assert 4 == loud.code
        assert 1 == loud.err.count("no such model")


class TestLocal:
    """`--engine local:MODEL.gguf`."""

    def test_a_file_of_prompts_runs_on_a_model_file(self, url: str, tmp_path: Path) -> None:
        """One command and two files; how many slots the model has is not part of what was asked for."""
        prompts, out = write_prompts(tmp_path / "prompts.jsonl", 20, max_tokens=8), tmp_path / "out.jsonl"
        done = llmq("run", prompts, "-o", out, "--engine", f"local:{tiny_model()}?slots=2&context=512", url=url)
        assert 0 == done.code, done.err
        assert sorted(ids(20)) == sorted(ids_in(out))
        out.unlink()
        again = llmq("run", prompts, "-o", out, "--engine", f"local:{tiny_model()}?slots=4", url=url)
        assert 0 == again.code, again.err
        assert "was run before" in again.err

    def test_interrupted_it_prints_the_command_that_goes_on(self, url: str, tmp_path: Path, served: Served) -> None:
        """With all that was said of the engine; Ctrl-C while it loads included."""
        prompts = write_prompts(tmp_path / "prompts.jsonl", 3)
        command = served.program(LOADS_FOR_EVER) + " --port 9"
        with started("run", prompts, "-o", tmp_path / "out", "--gpu", "2", "--serve", command, url=url) as run:
            run.until("starting ")
            until(lambda: len(served.pids) == 1, "an engine that loads")
            run.interrupt()
            done = run.end()
        assert 130 == done.code
        assert "--serve 'sh -c" in done.err.splitlines()[-1]
        assert "--gpu 2" in done.err.splitlines()[-1]
        assert [] == served.alive

    def test_a_worker_serves_a_model_file(self, url: str, tmp_path: Path) -> None:
        """The same words as for `llmq run`."""
        batch = submitted(url, write_prompts(tmp_path / "prompts.jsonl", 5, max_tokens=4))
        done = llmq("worker", "--engine", f"local:{tiny_model()}?slots=2", "--until-empty", url=url)
        assert 0 == done.code, done.err
        assert "5 jobs answered" in done.err
        assert 5 == results(url, batch)
