"""The sidecar: the small file beside an output that says what the output holds, `OUT.llmq` (`out-{part}.jsonl.llmq`).

It names the batch, how many bytes of OUT are certain, and the collector's place in the result stream for that length;
so a run that was killed goes on where it stopped, and one that was finished is recognised. It is replaced as a whole
(written aside, synced, renamed), never edited: after a crash it is the old one or the new one.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from llmq.scheduler.errors import UsageError

#: Raised when a field changes its meaning; new fields do not raise it.
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Sidecar:
    """What an output holds: its first `length` bytes are the results of `batch_id` up to `cursor`.

    Where it has parts, `finished` has the bytes of those before the last one, to which `length` and `lines` belong.
    `source` tells what the batch was made of (`llmq run`: the digest of the input), so that a finished output is
    recognised before there is a batch. `complete` means that every line of the batch is in it; `placing` that every
    line is in parts of these bytes, in order, which stand aside and are to take the places of all others.
    """

    batch_id: str
    source: str = ""
    cursor: str = ""
    length: int = 0
    complete: bool = False
    finished: tuple[int, ...] = ()
    lines: int = 0
    placing: tuple[int, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """The bytes of all parts."""
        return *self.finished, self.length


#: Fields that the first sidecars had; the others came later, and a sidecar of one plain file may lack them.
_FIRST_FIELDS = {"batch_id": str, "source": str, "cursor": str, "length": int, "complete": bool}


def sidecar_path(output: Path) -> Path:
    """Return where the sidecar of an output file stands."""
    return output.with_name(f"{output.name}.llmq")


def read_sidecar(output: Path) -> Sidecar | None:
    """Return what is known of an output file; None when it has no sidecar. Raises UsageError for a broken one."""
    path = sidecar_path(output)
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        return _decode(content)
    except (orjson.JSONDecodeError, TypeError):
        raise UsageError(
            f"{path}: is not a sidecar file of this llmq; move it and {output.name} away, or overwrite both: --force"
        ) from None


def write_sidecar(output: Path, sidecar: Sidecar) -> None:
    """Replace the sidecar, so that it survives a crash of this host from here on. Raises OSError."""
    path = sidecar_path(output)
    aside = path.with_name(f"{path.name}.tmp")
    try:
        with open(aside, "wb") as file:
            file.write(orjson.dumps({"format": FORMAT, **asdict(sidecar)}) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames and new files in a folder survive a crash of this host."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _decode(content: bytes) -> Sidecar:
    record = orjson.loads(content)
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise TypeError("no sidecar, or of a newer format")
    if any(type(record.get(name)) is not kind for name, kind in _FIRST_FIELDS.items()):
        raise TypeError("fields missing or of the wrong type")
    finished, placing = (tuple(record.get(name, ())) for name in ("finished", "placing"))
    lines = record.get("lines", 0)
    if any(type(number) is not int for number in (*finished, *placing, lines)):
        raise TypeError("fields of the wrong type")
    first = {name: record[name] for name in _FIRST_FIELDS}
    return Sidecar(**first, finished=finished, lines=lines, placing=placing)
