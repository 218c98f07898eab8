"""The start of a result file: from where to write it, decided by what is there. Values in, a value out or a refusal.

Nothing of somebody else's is overwritten, nothing that was collected is quietly left out.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmq.scheduler.errors import UsageError
from llmq.scheduler.parts import OutputName
from llmq.scheduler.sidecar import Sidecar

_OVERWRITE = "name another file, or overwrite it: --force"


def decide_start(name: OutputName, sizes: Mapping[int, int], found: Sidecar | None, wanted: Sidecar) -> Sidecar:
    """Decide from where to write an output, by the bytes of its parts and its sidecar. Raises UsageError to refuse."""
    ours = found is not None and found.batch_id == wanted.batch_id
    if not any(sizes.values()) and (found is None or not ours or found.complete):
        return wanted
    first = name.part(min(sizes, default=1))
    if found is None:
        raise UsageError(f"{first}: exists; {_OVERWRITE}")
    if not ours:
        raise UsageError(f"{first}: exists and holds results of batch {found.batch_id}; {_OVERWRITE}")
    if not found.placing:
        _check_sizes(name, sizes, found)
    return found


def matches(sizes: Mapping[int, int], found: Sidecar) -> bool:
    """Whether the parts that are there are exactly those of a finished output."""
    return dict(sizes) == dict(enumerate(found.sizes, 1))


def _check_sizes(name: OutputName, sizes: Mapping[int, int], found: Sidecar) -> None:
    """Refuse an output that was changed since it was written, other than at its uncertain end."""
    for number, written in enumerate(found.sizes, 1):
        size, path = sizes.get(number, 0), name.part(number)
        if size < written:
            raise UsageError(
                f"{path}: has {size:,} bytes, but {written:,} were written; it was cut since, so {name.path.name} "
                "cannot be continued. Name another file, or start it again: --force"
            )
        if size > written and (found.complete or number < len(found.sizes)):
            raise UsageError(f"{path}: was changed since it was complete; {_OVERWRITE}")
    if found.complete and max(sizes) > len(found.sizes):
        raise UsageError(f"{name.part(max(sizes))}: was put there since {name.path.name} was complete; {_OVERWRITE}")
