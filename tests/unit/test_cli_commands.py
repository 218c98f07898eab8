"""The command line before it needs a server: help, usage, settings, and files of prompts that cannot be taken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmq.cli.commands import app
from llmq.cli.main import run_line

Line = Callable[..., "Ended"]


class Ended:
    """A command line that ran in this process."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err


@pytest.fixture
def line(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Line:
    """Run a command line in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Ended:
        code = run_line([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return Ended(code, out, err)

    return run


def commands() -> Iterator[tuple[str, ...]]:
    """Yield the words of every command, of nouns too."""
    from typer.main import get_command

    def walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield words
        for name, inner in getattr(command, "commands", {}).items():
            yield from walk(inner, (*words, name))

    yield from walk(get_command(app), ())


COMMANDS = list(commands())
NOUNS = [("batch",), ("job",), ("dead",), ("keys",), ("server",)]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_has_help_that_fits_80_columns(line: Line, words: tuple[str, ...]) -> None:
    """Help is for a terminal of 80 columns, names `--json`, and shows how a verb is used."""
    done = line(*words, "--help")
    assert 0 == done.code
    assert "--json" in done.out
    assert [] == [text for text in done.out.splitlines() if len(text) > 80]
    assert "..." not in done.out.partition("Commands:")[2], "a summary that does not fit is cut"
    if words not in ((), *NOUNS):
        example = re.search(r"Examples?:\n +(.*)", done.out)
        assert example is not None
        assert " ".join(("llmq", *words)) in done.out.partition("Example")[2]


def test_the_shell_completes_commands(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script for a shell is printed, and what it asks is answered."""
    # Which shell the tests were started from, if any, is no matter.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    assert "complete -o default -F _llmq_completion llmq" in line("--show-completion", "bash").out
    for name, value in {"_LLMQ_COMPLETE": "complete_bash", "COMP_WORDS": "llmq batch re", "COMP_CWORD": "2"}.items():
        monkeypatch.setenv(name, value)
    done = line()
    assert (0, ["results", "resume", "retry"]) == (done.code, sorted(done.out.split()))


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_the_usage_line_names_arguments_without_alternatives(line: Line, words: tuple[str, ...]) -> None:
    """Versions of typer put brackets or braces around a name; one that has its own would be hard to read."""
    usage = line(*words, "--help").out.splitlines()[0]
    assert "|" not in usage
    assert "[[" not in usage


def test_the_version_is_the_package_s(line: Line) -> None:
    """`llmq --version` prints one line."""
    done = line("--version")
    assert 0 == done.code
    assert re.fullmatch(r"llmq \d+\.\d+\.\d+\S*\n", done.out)


@pytest.mark.parametrize("words", [(), *NOUNS], ids=" ".join)
def test_a_noun_without_a_verb_shows_its_help(line: Line, words: tuple[str, ...]) -> None:
    """It is a usage error, and the help is on stderr."""
    done = line(*words)
    assert (2, "") == (done.code, done.out)
    assert done.err.startswith("Usage: llmq")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("runn",), "no such command 'runn'"),
        (("batch", "sho"), "no such command 'sho'"),
        (("run",), "missing argument"),
        (("run", "f", "--nope"), "no such option: --nope"),
        (("run", "f", "--concurrency", "x"), "--concurrency"),
        (("run", "f", "--max-line-bytes", "many"), "--max-line-bytes: expected a size"),
        (("worker", "--grace", "soon"), "--grace: expected a duration"),
        (("run", "f", "--concurrency", "0"), "--concurrency: expected 1 or more"),
        (("run", ""), "got an empty name"),
        (("batch", "ls", "--limit", "x"), "--limit"),
        (("worker", "--reserve", "-1"), "--reserve"),
        (("worker", "--reserve", "5", "--concurrency", "4"), "--reserve: expected at most the concurrency, 4, got 5"),
        (("worker", "--gpu", ""), "--gpu: expected a label"),
        (("worker", "--gpu", "a b"), "--gpu: expected a label"),
        (("pause", "chat"), "'chat' is not one of"),
        (("rate", "fast"), "expected a rate"),
        (("rate", "0/s"), "llmq pause batch"),
        (("rate", "--burst", "3"), "a burst goes with a rate"),
        (("set", "deadlin", "3s"), "did you mean deadline"),
        (("set", "rate", "3/s"), "llmq rate"),
        (("submit-batch", "f", "--window", "tomorrow"), "--window: expected a duration"),
        (("submit-batch", "f", "--window", "0"), "--window: expected a time above 0"),
        (("submit-batch", "f", "--ordered"), "-o FILE"),
        (("submit-batch", "f", "--queue", "a b"), "--queue: expected a queue's name"),
        (("submit-batch", "f", "--tenant", "a|b"), "--tenant: expected a tenant's name"),
        (("batch", "results", "x", "--ok", "--failed"), "leave nothing"),
        (("ask", "  "), "expected a question"),
        (("status", "--redis", "http://x"), "expected a Redis URL"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(line: Line, words: tuple[str, ...], told: str) -> None:
    """The line says what was expected; nothing is printed on stdout, and no server is asked."""
    done = line(*words)
    assert (2, "") == (done.code, done.out)
    assert 1 == done.err.count("\n"), done.err
    assert done.err.startswith("error: ")
    assert told in done.err


GOOD = json.dumps({"prompt": "hello"})

BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "only white space": (b"\n  \n", "holds no lines"),
    "binary": (b"\x00\x01\x02" * 50, "is binary"),
    "gzip": (b"\x1f\x8b\x08" + bytes(20), "its gzip data is damaged"),
    "UTF-16": ('{"prompt": "x"}'.encode("utf-16"), "is UTF-16 text"),
    "not JSON": (b"hello\nworld\n", "line 1"),
    "an array": (b'[{"prompt": "x"}]\n', "line 1"),
    "an array over many lines": (b'[\n  {"prompt": "x"}\n]\n', "jq -c '.[]' FILE"),
    "an object over many lines": (b'{\n  "prompt": "x"\n}\n', "jq -c . FILE"),
    "a bad line among good ones": (f'{GOOD}\n{{"messages": []}}\n{GOOD}\n'.encode(), "line 2: messages"),
    "the same id twice": (
        b'{"custom_id": "a", "prompt": "x"}\n{"custom_id": "a", "prompt": "y"}\n',
        'line 2: custom_id: "a" is also on line 1',
    ),
}


@pytest.mark.parametrize("verb", ["run", "submit-batch"])
@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_cannot_be_taken_is_refused_whole(line: Line, tmp_path: Path, verb: str, name: str) -> None:
    """It is said what is wrong and where; no output is begun, and no server is started for it."""
    content, told = BAD_FILES[name]
    (tmp_path / "prompts.jsonl").write_bytes(content)
    done = line(verb, "prompts.jsonl", "-o", "out.jsonl")
    assert (2, "") == (done.code, done.out)
    assert done.err.startswith("error: prompts.jsonl: ")
    assert told in done.err
    assert ["prompts.jsonl"] == [path.name for path in tmp_path.iterdir()]


@pytest.mark.parametrize("verb", ["run", "submit-batch"])
def test_a_file_that_is_none_is_said(line: Line, tmp_path: Path, verb: str) -> None:
    """Missing files and folders have a line of their own."""
    assert "no such file" in line(verb, "missing.jsonl").err
    assert "is a folder" in line(verb, tmp_path).err
    assert 2 == line(verb, tmp_path).code


def test_twenty_bad_lines_are_shown_and_the_rest_is_counted(line: Line, tmp_path: Path) -> None:
    """A file of another kind does not fill the terminal."""
    (tmp_path / "prompts.jsonl").write_text("nope\n" * 50)
    shown = line("submit-batch", "prompts.jsonl").err.splitlines()
    assert 22 == len(shown)
    assert "50 of 50 lines cannot be used" in shown[0]
    assert "  ... and 30 more" == shown[-1]


def test_settings_come_from_flag_environment_file_and_default(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is shown with where it is from; the first of the four that gives a value wins."""
    (tmp_path / "llmq.toml").write_text('queue = "from-file"\ntenant = "from-file"\ngrace = "15s"\n')
    monkeypatch.setenv("LLMQ_QUEUE", "from-environment")
    monkeypatch.setenv("LLMQ_TENANT", "from-environment")
    shown = json.loads(line("config", "--queue", "from-flag", "--json").out)
    assert {"value": "from-flag", "source": "argument"} == shown["queue"]
    assert {"value": "from-environment", "source": "LLMQ_TENANT"} == shown["tenant"]
    assert {"value": 15.0, "source": str(tmp_path / "llmq.toml")} == shown["grace"]
    assert {"value": 1024**2, "source": "default"} == shown["max_line_bytes"]


def test_secrets_are_not_shown(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither passwords of URLs nor keys of engines are printed."""
    monkeypatch.setenv("LLMQ_REDIS_URL", "redis://user:hush@host:6379")
    monkeypatch.setenv("LLMQ_ENGINE_API_KEY", "hush")
    for words in (("config",), ("config", "--json")):
        assert "hush" not in line(*words).out


def test_all_wrong_settings_are_reported_at_once(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that does not exist is refused with the nearest one that does."""
    monkeypatch.setenv("LLMQ_QEUE", "x")
    monkeypatch.setenv("LLMQ_GRACE", "soon")
    done = line("config")
    assert 2 == done.code
    assert "LLMQ_QUEUE" in done.err
    assert "LLMQ_GRACE: expected a duration" in done.err


@pytest.mark.parametrize("place", [0, 1, 2])
def test_json_may_stand_anywhere(line: Line, place: int) -> None:
    """Before the noun, behind it, and at the end it means the same."""
    words = ["server", "status"]
    words.insert(place, "--json")
    done = line(*words)
    assert 0 == done.code
    assert "stopped" == json.loads(done.out)["state"]


def test_a_home_that_cannot_be_used_is_said(line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The embedded server needs a folder; the line names the variables that help."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("LLMQ_HOME", str(tmp_path / "file" / "home"))
    done = line("server", "start")
    assert 4 == done.code
    assert "LLMQ_HOME" in done.err
