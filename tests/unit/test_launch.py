"""What is started as an engine, read from what a user types: commands, ports, GPUs, local models."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from llmq.scheduler.errors import UsageError
from llmq.workers.engines.guardian import Log
from llmq.workers.engines.launch import launch_of_command
from llmq.workers.engines.local import launch_of_local
from llmq.workers.engines.managed import LONGEST_PAUSE_S, STABLE_S, Deaths

#: A program that is there on every machine, in the place of an engine.
PYTHON = shlex.quote(sys.executable)


class TestCommand:
    """`--serve 'CMD'`."""

    @pytest.mark.parametrize(
        ("command", "url"),
        [
            (f"{PYTHON} x --port 9000", "http://127.0.0.1:9000"),
            (f"{PYTHON} x --port=9001 -v", "http://127.0.0.1:9001"),
            (f"{PYTHON} x --port 1 --port 9002", "http://127.0.0.1:9002"),
            (f"{PYTHON} x --host 0.0.0.0 --port 9000", "http://127.0.0.1:9000"),
            (f"{PYTHON} x --host 10.0.0.5 --port 9000", "http://10.0.0.5:9000"),
            (f"{PYTHON} x --host ::1 --port 9000", "http://[::1]:9000"),
            (f"{PYTHON} -m vllm.entrypoints.openai.api_server", "http://127.0.0.1:8000"),
            (f"{PYTHON} -m sglang.launch_server", "http://127.0.0.1:30000"),
            ("env -i /opt/llama/bin/llama-server -m x", "http://127.0.0.1:8080"),
            ("env vllm serve 'a model'", "http://127.0.0.1:8000"),
        ],
    )
    def test_the_url_is_found_in_the_command(self, command: str, url: str) -> None:
        """A port that is given wins over the program's usual one; all of a host means its loopback."""
        launch = launch_of_command(command, "0", None)
        assert (url, tuple(shlex.split(command))) == (launch.url, launch.command)

    def test_a_url_that_is_named_wins(self) -> None:
        """Where the command says nothing of it, or something else, --engine says it."""
        assert "http://h:1" == launch_of_command(f"{PYTHON} x --port 9000", "0", "http://h:1").url

    def test_the_key_that_the_engine_is_given_is_the_one_that_it_wants(self) -> None:
        """Nobody has to say it twice; a setting of one's own wins."""
        command = f"{PYTHON} --port 1 --api-key secret"
        keys = (launch_of_command(command, "0", None, key).api_key for key in (None, "mine"))
        assert ["secret", "mine"] == list(keys)

    def test_the_gpu_is_all_that_it_sees(self) -> None:
        """For CUDA and for ROCm; two of them for tensor parallelism."""
        launch = launch_of_command(f"{PYTHON} --port 1", "0, 1", None)
        assert {"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0,1"} == launch.environment

    @pytest.mark.parametrize(
        ("command", "gpu", "engine", "fault"),
        [
            ("", "0", None, "expected a command"),
            ("vllm 'serve", "0", None, "check its quotes"),
            ("no-such-program --port 1", "0", None, "no program 'no-such-program'"),
            ("A=1 vllm serve", "0", None, "there is no shell"),
            (f"{PYTHON} server.py", "0", None, "put --port N into the command"),
            (f"{PYTHON} --port x", "0", None, "expected a port from 1 to 65535 after --port, got 'x'"),
            (f"{PYTHON} --port 70000", "0", None, "got '70000'"),
            (f"{PYTHON} --port 1", "0,,1", None, "expected GPUs as 0, or 0,1 for two, got '0,,1'"),
            (f"{PYTHON} --port 1", "0,0", None, "got '0,0'"),
            (f"{PYTHON} --port 1", "0", "sim", "expected its URL as --engine, or none, got 'sim'"),
        ],
    )
    def test_what_cannot_be_started_says_why(self, command: str, gpu: str, engine: str | None, fault: str) -> None:
        """Each message names what was expected and what came; nothing was started."""
        with pytest.raises(UsageError, match=fault):
            launch_of_command(command, gpu, engine)


class TestLocal:
    """`local:MODEL.gguf`."""

    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        """A file that begins as a model does."""
        path = tmp_path / "m.gguf"
        path.write_bytes(b"GGUF rest")
        return path

    def test_its_parameters_are_those_of_the_server(self, model: Path) -> None:
        """Those that are not given have defaults; the key is in no argument, which all users of the host may read."""
        launch = launch_of_local(f"local:{model}?slots=2&context=1000", "3")
        assert str(model) in launch.command
        assert {"--slots=2", "--context=1000", "--embeddings=0"} <= set(launch.command)
        assert "3" == launch.environment["CUDA_VISIBLE_DEVICES"]
        assert "passive" == launch.environment["OMP_WAIT_POLICY"]
        assert launch.api_key
        assert launch.api_key not in " ".join(launch.command)
        assert launch.api_key not in repr(launch)

    @pytest.mark.parametrize(
        ("query", "fault"),
        [
            ("?slot=2", "no parameter 'slot'; it takes slots, context, threads, embeddings"),
            ("?slots=0", "expected a whole number from 1 for slots, got '0'"),
            ("?context=8k", "expected a whole number from 1 for context, got '8k'"),
        ],
    )
    def test_a_wrong_parameter_is_named(self, model: Path, query: str, fault: str) -> None:
        """The message says which there are."""
        with pytest.raises(UsageError, match=fault):
            launch_of_local(f"local:{model}{query}", "0")

    def test_a_file_that_is_no_model_is_refused(self, tmp_path: Path) -> None:
        """Missing, not named, or of another kind: before anything is started."""
        (tmp_path / "readme").write_text("# Read me")
        for name, fault in (("none.gguf", "No such file"), ("readme", "not a GGUF file"), ("", "directory")):
            with pytest.raises(UsageError, match=fault):
                launch_of_local(f"local:{tmp_path / name}", "0")
        with pytest.raises(UsageError, match="expected the model's file"):
            launch_of_local("local:", "0")

    def test_without_llama_cpp_it_says_what_to_install(self, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The extra has a name, and the line to type holds it."""
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(UsageError, match=r"pip install 'llmq-streams\[local-llm\]'"):
            launch_of_local(f"local:{model}", "0")


class TestDeaths:
    """How long to wait before an engine is started again."""

    def test_pauses_double_and_the_fifth_death_in_a_row_brings_the_longest(self) -> None:
        """An engine that cannot live is tried for ever, but seldom."""
        deaths = Deaths()
        assert [1, 2, 4, 8, LONGEST_PAUSE_S, LONGEST_PAUSE_S] == [deaths.pause(0.0) for _ in range(6)]

    def test_a_long_life_starts_the_count_again(self) -> None:
        """Ten minutes of health: whatever it died of now is another thing."""
        deaths = Deaths()
        assert [1, 2, 1, 2] == [deaths.pause(healthy_s) for healthy_s in (0.0, STABLE_S - 1, STABLE_S, 1.0)]


class TestLog:
    """Where the words of an engine go."""

    def test_it_is_set_aside_before_it_grows_over_its_limit(self, tmp_path: Path) -> None:
        """One older log is kept; both are for this user only."""
        path = tmp_path / "log"
        log = Log(path, limit=10)
        for words in (b"12345\n", b"abcde\n", b"x\n", b"vwxyz\n"):
            log.write(words)
        assert (b"vwxyz\n", b"abcde\nx\n") == (path.read_bytes(), path.with_name("log.1").read_bytes())
        assert 0o600 == path.stat().st_mode & 0o777

    def test_a_disk_that_takes_nothing_harms_nobody(self, tmp_path: Path) -> None:
        """The words are lost; the engine goes on."""
        Log(tmp_path / "no folder" / "log").write(b"words")
        assert [] == list(tmp_path.iterdir())
