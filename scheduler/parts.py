"""Parts: what `-o OUT` names, one file or a series of them, and when one part is followed by the next.

    out.jsonl                 one file
    out.jsonl.gz, .zst        one file, packed
    out-{part}.jsonl.gz       out-00001.jsonl.gz, out-00002.jsonl.gz, ...

Every part is a whole file of its kind, and a line never stands in two. Here are names and sizes only; writing is for
`part_series.py`, and what belongs to which batch for `result_file.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmq.scheduler.compression import Codec, codec_of_name
from llmq.scheduler.errors import UsageError
from llmq.scheduler.units import parse_size

#: The place of a part's number in the name of an output.
FIELD = "{part}"

#: Parts sort by name up to this many digits.
_DIGITS = 5

#: Bytes of a part on the disk, as it is packed: large enough for few files, small enough to be sent around.
DEFAULT_PART_BYTES = 256 << 20

_ANY_FIELD = re.compile(r"\{[^{}]*\}")

_LINES = re.compile(r"\s*([0-9][0-9_,]*)\s*lines?\s*", re.IGNORECASE)

#: What a file is called while it is put in order, until it takes its part's place.
_ASIDE = ".llmq-ordered"


@dataclass(frozen=True, slots=True)
class PartLimit:
    """What fills a part: bytes on the disk (the block that takes it there still belongs to it), or so many lines."""

    bytes: int | None = DEFAULT_PART_BYTES
    lines: int | None = None

    @classmethod
    def parse(cls, text: str | None) -> PartLimit | None:
        """Read "256MiB" or "50000lines"; None is None. Raises UsageError."""
        if text is None:
            return None
        counted = _LINES.fullmatch(text)
        try:
            limit = cls(None, int(re.sub("[_,]", "", counted[1]))) if counted else cls(parse_size(text))
        except UsageError:
            raise UsageError(
                f"--part-size: expected a size or a number of lines (256MiB, 50000lines), got {text!r}"
            ) from None
        if not (limit.bytes or limit.lines):
            raise UsageError(f"--part-size: expected more than 0, got {text!r}")
        return limit


@dataclass(frozen=True, slots=True)
class OutputName:
    """Where an output stands; `limit` is None for one file. `path` names the whole, with the field in it if any."""

    path: Path
    codec: Codec
    limit: PartLimit | None = None

    @classmethod
    def parse(cls, path: str | os.PathLike[str], limit: PartLimit | None = None) -> OutputName:
        """Read what `-o` names; links are followed. Raises UsageError for a pattern that cannot be meant."""
        given = os.fspath(path)
        folder, name = os.path.split(given)
        if not name:
            raise UsageError(f"{given}: is a folder; name a file in it")
        if FIELD in folder:
            raise UsageError(f"{given}: {FIELD} belongs into the file's name, not into that of its folder")
        fields = _ANY_FIELD.findall(name)
        if fields and fields != [FIELD]:
            raise UsageError(f"{given}: expected {FIELD} once at most, and no other field, got {', '.join(fields)}")
        if limit is not None and not fields:
            raise UsageError(f"{given}: --part-size needs a name with the place of the number: -o 'out-{FIELD}.jsonl'")
        # Links are followed once and here: a rename would replace the link and not the file.
        resolved = Path(os.path.realpath(given))
        return cls(resolved, codec_of_name(name), (limit or PartLimit()) if fields else None)

    def part(self, number: int) -> Path:
        """Return the path of a part, counted from 1; the file itself where there is only one."""
        if self.limit is None:
            return self.path
        return self.path.with_name(self.path.name.replace(FIELD, f"{number:0{_DIGITS}}"))

    def aside(self, number: int) -> Path:
        """Return where a part stands that is to take the place of the one with its number."""
        part = self.part(number)
        return part.with_name(part.name + _ASIDE)

    def sizes(self) -> dict[int, int]:
        """Return the parts that are there, with the bytes of each."""
        return {number: path.stat().st_size for number, path in self._find("")}

    def asides(self) -> list[Path]:
        """Return what stands aside."""
        return [path for _, path in self._find(_ASIDE)]

    def _find(self, ending: str) -> Iterator[tuple[int, Path]]:
        if self.limit is None:
            path = self.path.with_name(self.path.name + ending)
            if path.exists():
                yield 1, path
            return
        before, _, after = self.path.name.partition(FIELD)
        found = re.compile(re.escape(before) + rf"([0-9]{{{_DIGITS},}})" + re.escape(after + ending))
        try:
            names = os.listdir(self.path.parent)
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in sorted(names):
            if matched := found.fullmatch(name):
                yield int(matched[1]), self.path.with_name(name)
