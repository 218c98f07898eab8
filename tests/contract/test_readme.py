"""What README and docs tell a reader to type exists."""

from __future__ import annotations

import ast
import importlib
import re
from typing import Annotated

import pytest
import typer
import typer.main

from tests.contract.documents import Block, Command, blocks, command_lines, commands_in, documents, fault_of
from tests.contract.project import ROOT


@pytest.fixture(scope="module")
def command() -> Command:
    """The command `llmq`."""
    from llmq.cli.commands import app

    return typer.main.get_command(app)


def python_blocks() -> list[Block]:
    """Return the Python programs of all documents."""
    return [block for block in blocks() if block.language in ("python", "py")]


def test_every_command_line_is_understood(command: Command) -> None:
    """Each `llmq ...` in README and docs names a command and options that exist."""
    faults = [f"{path.name}: {line}: {fault}" for path, line in command_lines() if (fault := fault_of(line, command))]
    assert [] == faults


def test_every_command_is_in_the_readme(command: Command) -> None:
    """No command is a secret: the README shows each one once at least."""
    shown = " ".join(line for path, line in command_lines() if path.name == "README.md").split()
    assert set() == {name for name, verb in command.commands.items() if not verb.hidden} - set(shown)


def test_every_python_block_compiles() -> None:
    """Programs in the documents are valid Python; `await` may stand at the top."""
    for block in python_blocks():
        compile(block.text, block.path.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_every_name_that_a_python_block_imports_exists() -> None:
    """What the programs in the documents import from llmq is there."""
    for block in python_blocks():
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "llmq":
                module = importlib.import_module(node.module or "")
                assert [] == [alias.name for alias in node.names if not hasattr(module, alias.name)], block.path.name


def test_every_link_inside_the_project_leads_somewhere() -> None:
    """Files that the documents link to exist."""
    for path in (*documents(), ROOT / "CHANGELOG.md"):
        for target in re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name}: {target}"


def test_the_readme_shows_how_to_test() -> None:
    """The first block with pytest in it is what CI runs."""
    shown = [block.text for block in blocks() if block.path == ROOT / "README.md" and "pytest" in block.text]
    assert shown
    assert "pip install" in shown[0]


class TestReading:
    """How command lines are found and judged."""

    @pytest.fixture
    def tree(self) -> Command:
        """A command with a group in it."""
        app, batch = typer.Typer(), typer.Typer()
        app.add_typer(batch, name="batch")

        @app.callback()
        def everywhere(json: bool = False) -> None: ...

        @app.command()
        def rate(value: str, burst: Annotated[int, typer.Option("--burst", "-b")] = 1) -> None: ...

        @batch.command()
        def ls(failed: bool = False) -> None: ...

        @batch.command()
        def show(batch_id: str) -> None: ...

        return typer.main.get_command(app)

    def test_commands_are_found_in_a_block(self) -> None:
        """Prompts, assignments, continued lines and output are told apart."""
        text = "$ llmq batch ls \\\n    --failed\nLLMQ_REDIS_URL=redis://h llmq rate 5/s\n12 lines\n# llmq rate\n"
        assert ["llmq batch ls      --failed", "llmq rate 5/s"] == list(commands_in(text))

    @pytest.mark.parametrize(
        "line",
        [
            "llmq batch ls --failed | jq .",
            "llmq rate 5/s --burst 3 && llmq nothing",
            "llmq rate [N/s|N/m|off] [-b B]     how many",
            "llmq batch ls --json  # all of them",
            "llmq --help",
        ],
    )
    def test_what_exists_is_well(self, tree: Command, line: str) -> None:
        """Options of a command and of those above it are known; pipes, comments and usage are left out."""
        assert None is fault_of(line, tree)

    @pytest.mark.parametrize(
        ("line", "fault"),
        [
            ("llmq bath ls", "llmq has no command bath"),
            ("llmq batch ls|rm", "llmq batch has no command rm"),
            ("llmq batch ls --fialed", "llmq batch ls has no option --fialed"),
            ("llmq rate 5/s --burst 3 --fast=1", "llmq rate has no option --fast"),
        ],
    )
    def test_what_does_not_exist_is_named(self, tree: Command, line: str, fault: str) -> None:
        """The fault says which command does not know which word."""
        assert fault == fault_of(line, tree)
