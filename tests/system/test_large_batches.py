"""Large batches as people run them: packed files, results in parts, samples, files larger than the queue."""

from __future__ import annotations

import gzip
import io
import json
import random
import shlex
from pathlib import Path

import pytest
import zstandard

from llmq import Client
from llmq.scheduler.parts import OutputName
from tests.system.cli_process import QUICK, TOO_LONG, ids, llmq, started, until, write_prompts
from tests.system.test_cli_run import queue_of, small_disk

#: What these tests leave queued is not the point: the next test begins on an empty server.
pytestmark = pytest.mark.leaves("llmq:*")

#: Four requests at a time, each 20 ms: slow enough to be killed in the middle.
STEADY = "sim://?slots=4&decode_tps=250"


@pytest.fixture
def url(system_redis_url: str) -> str:
    """The URL of an empty server."""
    return system_redis_url


def packed(prompts: Path, suffix: str) -> Path:
    """Pack a file of prompts; return the packed one."""
    pack = gzip.compress if suffix == ".gz" else zstandard.ZstdCompressor().compress
    target = prompts.with_name(prompts.name + suffix)
    target.write_bytes(pack(prompts.read_bytes()))
    return target


def files_of(out: Path) -> list[Path]:
    """Return the files of an output."""
    name = OutputName.parse(out)
    return [name.part(number) for number in name.sizes()]


def keys_in(out: Path) -> list[str]:
    """Return the custom_ids of an output, in its order, read by decoders that are not ours."""
    keys: list[str] = []
    for file in files_of(out):
        data = file.read_bytes()
        if file.suffix == ".gz":
            data = gzip.decompress(data)
        elif file.suffix == ".zst":
            data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True).read()
        keys += [json.loads(line)["custom_id"] for line in data.splitlines()]
    return keys


def size_of(out: Path) -> int:
    """Return the bytes of an output so far."""
    return sum(OutputName.parse(out).sizes().values())


class TestRun:
    """`llmq run` with packed files and parts."""

    @pytest.mark.parametrize("suffix", [".gz", ".zst"])
    def test_a_packed_file_becomes_packed_parts_in_order_and_is_recognised(
        self, url: str, tmp_path: Path, suffix: str
    ) -> None:
        """The same command says that it is complete; the plain file is the same file."""
        prompts = write_prompts(tmp_path / "p.jsonl", 100)
        out = tmp_path / f"out-{{part}}.jsonl{suffix}"
        words = ("-o", out, "--part-size", "30lines", "--ordered", "--engine", QUICK, "--json")
        done = llmq("run", packed(prompts, suffix), *words, url=url)
        assert 0 == done.code, done.err
        assert [out.name.replace("{part}", f"0000{part}") for part in range(1, 5)] == [
            Path(part).name for part in done.json["parts"]
        ]
        assert ids(100) == keys_in(out)
        assert "(4 parts)" in done.err
        for again in (packed(prompts, ".gz"), packed(prompts, ".zst"), prompts):
            repeated = llmq("run", again, *words, url=url)
            assert 0 == repeated.code
            assert "is complete: 100 lines ok, 0 failed" in repeated.err

    def test_killed_at_any_moment_every_line_ends_in_the_parts_once(self, url: str, tmp_path: Path) -> None:
        """G16: SIGKILL after a random number of bytes, three times, then to its end."""
        prompts = packed(write_prompts(tmp_path / "p.jsonl", 240, max_tokens=5, ignore_eos=True), ".gz")
        out = tmp_path / "o-{part}.jsonl.gz"
        command = ("run", prompts, "-o", out, "--part-size", "50lines", "--engine", STEADY)
        chance = random.Random(11)
        for _ in range(3):
            with started(*command, url=url) as run:
                wanted = size_of(out) + chance.randint(1, 2500)
                until(lambda wanted=wanted: size_of(out) >= wanted or run.process.poll() is not None, "more results")  # type: ignore[misc]
                run.kill()
        done = llmq(*command, "--json", url=url)  # the same engine: all of it may have run already
        assert 0 == done.code, done.err
        assert sorted(ids(240)) == sorted(keys_in(out))
        assert 5 == len(files_of(out))

    def test_a_pattern_or_a_size_that_cannot_be_meant_is_exit_2_before_anything_is_read(self, tmp_path: Path) -> None:
        """The file is not even opened."""
        for words, told in (
            (("-o", "o-{part}-{part}.gz"), "expected {part} once at most"),
            (("-o", "o.jsonl", "--part-size", "1MiB"), "needs a name with the place of the number"),
            (("-o", "o-{part}.jsonl", "--part-size", "some"), "expected a size or a number of lines"),
            (("--part-size", "1MiB"), "--part-size needs"),
            (("--sample", "0"), "expected a number of lines, 1 or more"),
        ):
            for verb in (("run", "missing.jsonl", "--engine", QUICK), ("submit-batch", "missing.jsonl")):
                done = llmq(*verb, *words, "--json", folder=tmp_path)
                assert (2, "") == (done.code, done.out)
                assert told in done.error

    @pytest.mark.parametrize("suffix", [".gz", ".zst"])
    def test_an_archive_that_was_cut_is_exit_2_and_nothing_is_queued(
        self, url: str, tmp_path: Path, suffix: str
    ) -> None:
        """One line that says where, for both commands, from a file and from stdin."""
        prompts = packed(write_prompts(tmp_path / "p.jsonl", 5000), suffix)
        prompts.write_bytes(prompts.read_bytes()[:-20])
        for verb in ("run", "submit-batch"):
            for name, stdin in ((prompts, b""), ("-", prompts.read_bytes())):
                done = llmq(verb, name, "-o", tmp_path / "out", url=url, stdin=stdin)
                assert 2 == done.code
                assert "data is cut short, after " in done.error
                assert not (tmp_path / "out").exists()
        assert [] == llmq("batch", "ls", "--json", url=url).json["batches"]


class TestSubmitBatch:
    """`llmq submit-batch` with files larger than the queue."""

    def test_a_file_larger_than_queue_and_results_together_is_fed_as_it_is_collected(
        self, url: str, tmp_path: Path
    ) -> None:
        """Lines wait for room, room for results to be taken: whoever has `-o` takes them meanwhile."""
        assert 0 == llmq("set", "cap_batch", "40", url=url).code
        assert 0 == llmq("set", "results_max_bytes", "1MiB", url=url).code
        prompts = packed(write_prompts(tmp_path / "p.jsonl", 1000, max_tokens=400), ".zst")
        out = tmp_path / "o-{part}.jsonl.zst"
        with started("worker", "--engine", QUICK, "-c", "8", url=url) as worker:
            worker.until("ready ")
            done = llmq("submit-batch", prompts, "-o", out, "--part-size", "300lines", "--ordered", url=url)
        assert 0 == done.code, done.err
        assert ids(1000) == keys_in(out)
        assert 4 == len(files_of(out))

    def test_killed_at_any_moment_it_is_resumed_and_every_line_ends_once(self, url: str, tmp_path: Path) -> None:
        """G16: the file is still being queued, by a cap of 60, while its results are written; three kills."""
        assert 0 == llmq("set", "cap_batch", "60", url=url).code
        prompts = packed(write_prompts(tmp_path / "p.jsonl", 400, max_tokens=5, ignore_eos=True), ".gz")
        out = tmp_path / "o-{part}.jsonl.gz"
        command: tuple[object, ...] = ("submit-batch", prompts, "-o", out, "--part-size", "64lines")
        chance = random.Random(5)
        with started("worker", "--engine", STEADY, url=url) as worker:
            worker.until("ready ")
            for _ in range(3):
                with started(*command, url=url) as submit:
                    said = submit.until("queueing as ")
                    wanted = size_of(out) + chance.randint(1, 2500)
                    until(lambda wanted=wanted: size_of(out) >= wanted or submit.process.poll() is not None, "results")  # type: ignore[misc]
                    submit.kill()
                if "--resume" not in command:
                    (batch,) = llmq("batch", "ls", "--json", url=url).json["batches"]
                    assert f"queueing as {batch['id']}" in said
                    command = (*command, "--resume", batch["id"])
            done = llmq(*command, "--json", url=url)
        assert 0 == done.code, done.err
        assert {"total": 400, "completed": 400, "failed": 0} == done.json["request_counts"]
        assert sorted(ids(400)) == sorted(keys_in(out))

    def test_a_disk_that_fills_up_while_the_file_is_queued_is_the_error_that_is_told(
        self, url: str, tmp_path: Path
    ) -> None:
        """Queueing more is of no use then; what was written stays."""
        assert 0 == llmq("set", "cap_batch", "40", url=url).code
        prompts, out = write_prompts(tmp_path / "p.jsonl", 1000, max_tokens=400), tmp_path / "out.jsonl"
        with started("worker", "--engine", QUICK, url=url) as worker:
            worker.until("ready ")
            with started("submit-batch", prompts, "-o", out, url=url, preexec_fn=small_disk) as submit:
                done = submit.end()
        assert 1 == done.code
        assert "cannot be written (File too large)" in done.error

    def test_interrupted_while_the_file_is_queued_it_prints_the_command_that_goes_on(
        self, url: str, tmp_path: Path
    ) -> None:
        """With the output and the size of its parts."""
        assert 0 == llmq("set", "cap_batch", "20", url=url).code
        prompts, out = write_prompts(tmp_path / "p.jsonl", 50), tmp_path / "o-{part}.jsonl.gz"
        with started("submit-batch", prompts, "-o", out, "--part-size", "9lines", url=url) as submit:
            submit.until("queueing as ")
            until(lambda: 20 == llmq("batch", "ls", "--json", url=url).json["batches"][0]["lines"], "20 lines queued")
            submit.interrupt()
            done = submit.end()
        assert 130 == done.code
        words = shlex.split(done.err.splitlines()[-1].partition("llmq ")[2])
        assert {"submit-batch", "--resume", str(out), "9lines"} <= set(words)

    def test_python_submits_a_packed_file(self, url: str, tmp_path: Path) -> None:
        """As the command line does."""
        with Client(url) as client:
            batch = client.submit_batch(packed(write_prompts(tmp_path / "p.jsonl", 30), ".zst"))
            assert 30 == batch.status().lines

    def test_results_are_delivered_in_packed_parts_later_too(self, url: str, tmp_path: Path) -> None:
        """`batch results -o`, all lines, and those that failed, of which there are none."""
        assert 0 == llmq("submit-batch", write_prompts(tmp_path / "p.jsonl", 50), url=url).code
        assert 0 == llmq("worker", "--engine", QUICK, "--until-empty", url=url).code
        (batch,) = llmq("batch", "ls", "--json", url=url).json["batches"]
        out, none = tmp_path / "o-{part}.jsonl.gz", tmp_path / "failed.jsonl.zst"
        done = llmq("batch", "results", batch["id"], "-o", out, "--part-size", "20lines", "--json", url=url)
        assert (0, 50, 3) == (done.code, done.json["written"], len(done.json["parts"]))
        assert sorted(ids(50)) == sorted(keys_in(out))
        assert 0 == llmq("batch", "results", batch["id"], "-o", none, "--failed", url=url).code
        assert [] == keys_in(none)
        assert none.stat().st_size > 0

    def test_a_file_that_never_fits_is_told_so(self, url: str, tmp_path: Path) -> None:
        """`--no-wait` above the cap: exit 5, and no advice to try again (G15)."""
        assert 0 == llmq("set", "cap_batch", "20", url=url).code
        done = llmq("submit-batch", write_prompts(tmp_path / "p.jsonl", 21), "--no-wait", url=url)
        assert 5 == done.code
        assert "21 jobs never fit at once into a queue of at most 20 batch jobs" in done.error
        assert "try again" not in done.error


class TestSample:
    """`--sample N`: what a file would take, without running it."""

    def test_a_sample_of_a_run_is_an_estimate_and_leaves_no_trace(self, url: str, tmp_path: Path) -> None:
        """The real run afterwards finds nothing of it; its own answers are kept where that was asked for."""
        prompts = write_prompts(tmp_path / "p.jsonl", 200, max_tokens=10, ignore_eos=True)
        out, answers = tmp_path / "out.jsonl", tmp_path / "sample.jsonl.gz"
        done = llmq("run", prompts, "--sample", 40, "-o", answers, "--engine", QUICK, "--json", url=url)
        assert 0 == done.code, done.err
        found = done.json
        assert (200, 40, 40, 0, True) == tuple(
            found[name] for name in ("lines", "sampled", "completed", "failed", "simulated")
        )
        assert {"estimate": 2000, "low": 2000, "high": 2000} == found["tokens"]["completion"]
        prompt = found["tokens"]["prompt"]
        assert 0 < prompt["low"] <= prompt["estimate"] <= prompt["high"]
        assert found["lines_per_second"] > 0
        assert 40 == len(set(keys_in(answers)))
        assert (
            []
            == llmq("batch", "ls", "--queue", queue_of(prompts).replace("run-", "sample-"), "--json", url=url).json[
                "batches"
            ]
        )
        real = llmq("run", prompts, "-o", out, "--engine", QUICK, url=url)
        assert (0, "") == (real.code, real.out)
        assert "going on" not in real.err
        assert sorted(ids(200)) == sorted(keys_in(out))
        mixed = llmq("run", prompts, "-o", answers, "--engine", QUICK, url=url)
        assert 2 == mixed.code
        assert "exists and holds results of batch" in mixed.error

    def test_a_sample_for_people_says_what_it_is_worth(self, url: str, tmp_path: Path) -> None:
        """Failures with their reasons, and exit 3; few lines say little."""
        prompts = write_prompts(tmp_path / "p.jsonl", 100, **TOO_LONG)
        done = llmq("run", prompts, "--sample", 5, "--engine", QUICK, url=url)
        assert 3 == done.code
        assert "5 of 100 lines, 5 failed" in done.out
        assert "5 lines failed: HTTP 400: " in done.err
        assert "5 lines say little" in done.err
        assert "a simulated engine answered" in done.err

    def test_a_sample_of_a_queue_is_answered_by_its_workers_before_what_waits(self, url: str, tmp_path: Path) -> None:
        """And is gone afterwards; the batch that waited stays: it takes longer than any machine to start a command."""
        prompts = write_prompts(tmp_path / "p.jsonl", 3000, max_tokens=5, ignore_eos=True)
        refused = llmq("submit-batch", prompts, "--sample", 20, url=url)
        assert 4 == refused.code
        assert "there is nothing to measure" in refused.error
        assert 0 == llmq("submit-batch", prompts, url=url).code
        with started("worker", "--engine", STEADY, url=url) as worker:
            worker.until("ready ")
            done = llmq("submit-batch", prompts, "--sample", 20, "--json", url=url)
            (batch,) = llmq("batch", "ls", "--json", url=url).json["batches"]
        assert 0 == done.code, done.err
        assert (3000, 20) == (done.json["lines"], done.json["sampled"])
        assert 15_000 == done.json["tokens"]["completion"]["estimate"]
        assert batch["request_counts"]["completed"] < 3000
        both = llmq("submit-batch", prompts, "--sample", 20, "--no-wait", url=url)
        assert 2 == both.code
