"""What the documents tell a reader to type: their code blocks, and the `llmq` command lines in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.contract.project import ROOT

FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=indent)```", re.M | re.S)
INLINE = re.compile(r"(?<!`)`(llmq [a-z][^`\n]*)`(?!`)")

#: Ends of a command in a shell line, and in a line of usage.
ENDS = {"|", "||", "&&", ";", ">", ">>", "<", "&", "2>", "2>&1", "..."}


#: A command as typer made it. Some versions of typer bring their own click, so that it has no type here.
Command = Any


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block of a document."""

    path: Path
    language: str
    text: str


def documents() -> list[Path]:
    """Return the documents that tell users what to do."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]


def blocks() -> Iterator[Block]:
    """Yield all fenced blocks of all documents."""
    for path in documents():
        for found in FENCE.finditer(path.read_text(encoding="utf-8")):
            yield Block(path, found["language"], found["text"])


def command_lines() -> Iterator[tuple[Path, str]]:
    """Yield (path, line) for each `llmq ...` that a document shows, in a block that is no program or in its text."""
    for block in blocks():
        if block.language in ("", "bash", "sh", "shell", "console", "text"):
            yield from ((block.path, line) for line in commands_in(block.text))
    for path in documents():
        prose = FENCE.sub("", path.read_text(encoding="utf-8"))
        yield from ((path, found) for found in INLINE.findall(prose))


def commands_in(text: str) -> Iterator[str]:
    """Yield the command lines of a block: prompts and assignments before them are left out, continued lines joined."""
    for line in text.replace("\\\n", " ").splitlines():
        if found := re.match(r"\s*(?:\$ )?(?:[A-Z_]+=\S* )*(llmq(?: .*)?)$", line):
            yield found[1]


def fault_of(line: str, root: Command) -> str | None:
    """Say what in a command line the command does not know; None where it is well.

    Options are looked up and not run. In a line of usage, brackets are left out, and what follows three spaces is an
    explanation.
    """
    bare = re.split(r"\s{3,}", re.sub(r"[\[\]]", "", line.strip()))[0]
    words = shlex.split(bare, comments=True)[1:]
    command, known, path = root, options_of(root), "llmq"
    while words:
        word = words.pop(0)
        if word in ENDS:
            break
        if word.startswith("-") and word != "-" and not re.fullmatch(r"-\d+", word):
            name, given, _ = word.partition("=")
            if name not in known:
                return f"{path} has no option {name}"
            if known[name] and not given and words:
                words.pop(0)
        elif hasattr(command, "commands"):
            choices = word.split("|")  # `llmq server start|stop|status`
            unknown = [choice for choice in choices if choice not in command.commands]
            if unknown:
                return f"{path} has no command {unknown[0]}"
            command, path = command.commands[choices[0]], f"{path} {choices[0]}"
            known = known | options_of(command)
    return None


def options_of(command: Command) -> dict[str, bool]:
    """Return the options of a command by each of their names, and whether they take a value."""
    found = {
        name: not (parameter.is_flag or parameter.count)
        for parameter in command.params
        if parameter.param_type_name == "option"
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    return {"--help": False} | found
