"""The history: what the server did, in its own words, read from its append-only file.

Every script's writes stand there as one step, with all that they did, in the order in which they took effect. A claim
and a renewal carry Redis' TIME in ms (`XCLAIM ... TIME`), and so do the ids of results and single jobs: a step without
a time of its own has that of the step before. The file is never rewritten in a chaos run, so it is the whole history,
also of what was flushed; a kill may cut off its last step.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

#: What a server must be started with, so that its file is a history.
OPTIONS = (
    "--appendonly", "yes", "--aof-use-rdb-preamble", "no", "--auto-aof-rewrite-percentage", "0",
    "--aof-timestamp-enabled", "yes",
)  # fmt: skip

Command = tuple[str, ...]

#: Commands of the file that change nothing of the data.
_SILENT = {"SELECT", "MULTI", "EXEC"}

#: Streams whose ids are the server's clock: those of single jobs, results, inboxes and dead letters.
_CLOCKED = (":lane:i:", ":lane:b:", ":results", ":inbox:", ":dead")


@dataclass(frozen=True, slots=True)
class Step:
    """What one command or script changed, all at once, at `at` (seconds, Redis' clock)."""

    at: float
    commands: tuple[Command, ...]


def read_history(folder: Path) -> list[Step]:
    """Return all steps of the server whose data is in `folder`."""
    files = sorted((folder / "appendonlydir").glob("*.aof"), key=_number)
    return list(in_steps(itertools.chain.from_iterable(parse(file.read_bytes()) for file in files)))


def in_steps(commands: Iterator[Command | None]) -> Iterator[Step]:
    """Group commands into steps, and give each its time; None is the end of a file that was cut off."""
    at, together, gathered = 0.0, False, list[Command]()
    for command in commands:
        verb = command[0].upper() if command else ""
        if verb == "MULTI" or command is None:  # what was not finished when the server was killed never happened
            together, gathered = verb == "MULTI", []
        elif verb not in _SILENT:
            gathered.append(command)
        if gathered and (verb == "EXEC" or not together):
            at = max(at, *map(time_of, gathered))
            yield Step(at, tuple(gathered))
        if verb == "EXEC" or not together:
            together, gathered = False, []


def time_of(command: Command) -> float:
    """Return when a command took effect, in seconds, as far as it says so itself; else 0."""
    verb = command[0].upper()
    if verb == "XCLAIM":
        return int(option(command, "TIME")) / 1000
    if verb == "XADD" and any(part in command[1] for part in _CLOCKED):
        found = next((word for word in command[2:7] if _is_id(word)), "")
        return int(found.partition("-")[0]) / 1000 if found else 0.0
    if verb == "ZADD" and command[1].endswith(":workers"):
        return float(command[2]) / 1000
    return 0.0


def option(command: Sequence[str], name: str) -> str:
    """Return the value after a named option."""
    return command[command.index(name) + 1]


def parse(data: bytes) -> Iterator[Command | None]:
    """Iterate over the commands of a file; at the end comes None where its last one is cut off."""
    reader = io.BytesIO(data)
    while line := reader.readline():
        if line.startswith(b"#"):
            continue
        words = [_word(reader) for _ in range(int(line[1:]))] if line.endswith(b"\r\n") else [None]
        if None in words:
            yield None
            return
        yield tuple(word.decode(errors="replace") for word in words if word is not None)


def _word(reader: io.BytesIO) -> bytes | None:
    head = reader.readline()
    if not head.endswith(b"\r\n"):
        return None
    size = int(head[1:])
    word = reader.read(size + 2)
    return word[:-2] if len(word) == size + 2 else None


def _number(file: Path) -> int:
    return int(file.name.split(".")[-3])


def _is_id(word: str) -> bool:
    ms, _, number = word.partition("-")
    return len(ms) == 13 and ms.isdigit() and number.isdigit()
