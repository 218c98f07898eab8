"""A Lua script as the contract tests see it: its header of fixed form, and what its code does with keys.

    -- renew: keep the leases of jobs that this worker still runs.
    --
    -- KEYS    1..2 queue  the keys of the queue
    --         3 lane      the lane that they were claimed from
    -- ARGV    1 consumer  who renews
    --         2.. entry, delivery  one pair a job (the fence)
    -- From    running
    -- To      running
    -- Returns the entries whose lease belongs to another delivery
    --
    -- Anything else that a reader should know.

A script without KEYS is a prelude: the loader puts it in front of the others. `faults` lists what breaks the form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SECTIONS = ("KEYS", "ARGV", "From", "To", "Returns")

TITLE = re.compile(r"-- (?P<name>[a-z_]+): (?P<sentence>[A-Za-z].*\S)")
SECTION = re.compile(rf"-- ({'|'.join(SECTIONS)})(?: +(.*))?")
CONTINUATION = re.compile(r"-- {8,}(\S.*)")
ITEM = re.compile(r"(?P<first>\d+)(?P<more>\.\.(?P<last>\d+)?)? +(?P<names>[a-z_]+(?:, [a-z_]+)*)(?: .*)?")

CALL = re.compile(r"redis\.p?call\('(?P<command>[A-Z]+)'(?:, (?P<rest>.*))?")
BARE = re.compile(r"\b(?:KEYS|ARGV)\[\d+\]")
NAME = r"[A-Za-z_][\w.]*(?:\[[\w.]+\])?(?:\.\w+)?"

#: Commands without a key, and those all of whose arguments are keys.
KEYLESS = {"TIME", "INFO"}
ALL_KEYS = {"DEL", "UNLINK", "EXISTS"}


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a header says of KEYS or ARGV: `fixed` names in order, then `group` any number of times ("" is none)."""

    fixed: tuple[str, ...] = ()
    group: tuple[str, ...] = ()

    def takes(self, count: int) -> bool:
        """Whether a call may pass this many."""
        more = count - len(self.fixed)
        return more == 0 or (more > 0 and bool(self.group) and more % len(self.group) == 0)


@dataclass(frozen=True, slots=True)
class LuaScript:
    """One script: its file's name, and its text."""

    name: str
    text: str

    @classmethod
    def read(cls, path: Path) -> LuaScript:
        """Read a `.lua` file."""
        return cls(path.stem, path.read_text(encoding="utf-8"))

    @property
    def header(self) -> list[str]:
        """The comment lines that the file begins with."""
        lines = self.text.splitlines()
        end = next((number for number, line in enumerate(lines) if not line.startswith("--")), len(lines))
        return lines[:end]

    @property
    def code(self) -> list[str]:
        """The lines after the header, without comments."""
        lines = self.text.splitlines()[len(self.header) :]
        return [re.sub(r"(^|\s)--.*$", "", line) for line in lines]

    @property
    def sections(self) -> dict[str, list[str]]:
        """The lines of each section of the header, in the header's order."""
        sections: dict[str, list[str]] = {}
        current: list[str] | None = None
        for line in self.header:
            if found := SECTION.fullmatch(line):
                current = sections.setdefault(found[1], [])
                current.append(found[2] or "")
            elif current is not None and (more := CONTINUATION.fullmatch(line)):
                current.append(more[1])
            else:
                current = None
        return sections

    @property
    def is_prelude(self) -> bool:
        """Whether this text only stands in front of scripts."""
        return "KEYS" not in self.sections

    @property
    def keys(self) -> Arguments:
        """What the header says of KEYS."""
        return _arguments(self.sections["KEYS"])

    @property
    def argv(self) -> Arguments:
        """What the header says of ARGV."""
        return _arguments(self.sections["ARGV"])

    def faults(self) -> list[str]:
        """Say what breaks the form; empty is well."""
        return [f"{self.name}.lua: {fault}" for fault in (*self._header_faults(), *self._code_faults())]

    def _header_faults(self) -> Iterator[str]:
        title = TITLE.fullmatch(self.header[0]) if self.header else None
        if title is None or title["name"] != self.name:
            yield f"the first line is not `-- {self.name}: what it does`"
        if self.is_prelude:
            return
        if list(SECTIONS) != list(self.sections):
            yield f"the header has {list(self.sections)}, expected {list(SECTIONS)}"
            return
        for section in ("KEYS", "ARGV"):
            try:
                _arguments(self.sections[section])
            except ValueError as fault:
                yield f"{section}: {fault}"
        for section in ("From", "To", "Returns"):
            if not self.sections[section][0]:
                yield f"{section} says nothing"

    def _code_faults(self) -> Iterator[str]:
        if self.text.startswith("#!"):
            yield "begins with #!lua: Redis would then refuse every write at maxmemory"
        in_locals = True
        built = set(re.findall(r"local (\w+) = [^=\n]*\.\.", "\n".join(self.code)))
        for line in self.code:
            in_locals = in_locals and (not line.strip() or line.startswith(("local ", " ")))
            if not in_locals and (bare := BARE.search(line)):
                yield f"{bare[0]} stands below the local names: {line.strip()}"
            if "llmq:" in line:
                yield f"builds a key: {line.strip()}"
            for key in _keys_used(line):
                if not re.fullmatch(NAME, key) or key in built:
                    yield f"uses a key that is not passed in KEYS ({key}): {line.strip()}"


def _arguments(lines: list[str]) -> Arguments:
    """Read the items of a KEYS or ARGV section; raise ValueError where they are not numbered one after another."""
    if lines == ["none"]:
        return Arguments()
    fixed: list[str] = []
    group: tuple[str, ...] = ()
    for line in _joined(lines):
        if not line[0].isdigit():
            continue  # the description goes on
        item = ITEM.fullmatch(line)
        if item is None:
            raise ValueError(f"expected `number name  description`: {line}")
        if group:
            raise ValueError(f"nothing may follow {group} ..: {line}")
        if int(item["first"]) != len(fixed) + 1:
            raise ValueError(f"expected number {len(fixed) + 1}: {line}")
        names = tuple(item["names"].split(", "))
        if item["more"] and item["last"] is None:
            group = names
        else:
            count = int(item["last"] or item["first"]) - len(fixed)
            fixed += names if count == 1 else [f"{names[0]}{number}" for number in range(1, count + 1)]
    if not fixed and not group:
        raise ValueError(f"expected numbered names or `none`: {lines[0]}")
    return Arguments(tuple(fixed), group)


def _joined(lines: list[str]) -> Iterator[str]:
    """Yield the lines of a section; a list of names that goes on in the next line is one line."""
    whole = ""
    for line in lines:
        whole = f"{whole} {line}".strip()
        if not whole.endswith(","):
            yield whole
            whole = ""
    if whole:
        yield whole


def _keys_used(line: str) -> Iterator[str]:
    """Yield the expressions that stand where a command has its keys."""
    for call in CALL.finditer(line):
        command, words = call["command"], _words(call["rest"] or "")
        if command in KEYLESS:
            continue
        if "'STREAMS'" in words:
            yield words[words.index("'STREAMS'") + 1]
        elif command in ("XGROUP", "XINFO"):
            yield words[1]
        elif command in ALL_KEYS:
            yield from words
        elif words:
            yield words[0]


def _words(rest: str) -> list[str]:
    """Split the arguments of a call at its commas, up to the parenthesis that ends it."""
    words, depth, word = [], 0, ""
    for letter in rest:
        if letter == ")" and depth == 0:
            break
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            words.append(word.strip())
            word = ""
        else:
            word += letter
    return [*words, word.strip()]
