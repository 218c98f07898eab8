"""Finishing: the last step of a batch, in which its parts become the output file and the error file.

What was answered with success goes into the one, everything else into the other, and a file that would be empty is not
made. A line that has no result at all (the window was over, or the batch cancelled, before it was queued) gets its
error line here, so that every line ends in exactly one (G16). The files' ids follow from the batch and its end: a
gateway that dies in between is followed by one that writes the same files.

Beside the files stands the *sequence*: for each result, in the order in which lines ended, of which file it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import zlib
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, replace

from llmq.gateway.batch.batch_object import Outcome
from llmq.gateway.batch.facts import Accepted, Order
from llmq.gateway.batch.files import FileRecord, Files
from llmq.gateway.batch.parts import Chain, Line, Sums
from llmq.gateway.batch.slices import in_slices
from llmq.gateway.batch.storage import AsyncSpool, Storage
from llmq.scheduler.batch_record import sortable_name
from llmq.scheduler.input_file import InputFile
from llmq.scheduler.lease import ErrorCode
from llmq.scheduler.line_form import BadLine, parse_request
from llmq.scheduler.line_set import LineSet
from llmq.scheduler.records import ResultRecord, render

#: What stands in the sequence for a result.
OUTPUT, ERROR = 0, 1

#: Why a line has no result, by the last status of its batch.
_WHY = {
    "expired": (ErrorCode.EXPIRED, "the window of the batch was over before this line started"),
    "cancelled": (ErrorCode.CANCELLED, "the batch was cancelled"),
    "completed": (ErrorCode.LOST, "the result of this line was lost with data of Redis"),
}


@dataclass(frozen=True, slots=True)
class Ending:
    """How the lines of a batch have ended: the last status, and the exact times at which they had and were told to."""

    status: str
    ended_at: float
    cancelling_at: int | None = None


class Finishing:
    """Makes the files of one batch."""

    def __init__(self, storage: Storage, files: Files, order: Order, accepted: Accepted, ending: Ending) -> None:
        self._storage = storage
        self._files = files
        self._order = order
        self._accepted = accepted
        self._ending = ending
        self._sequence = bytearray()

    @property
    def sequence(self) -> bytes:
        """The sequence, packed."""
        return zlib.compress(bytes(self._sequence))

    async def finish(self, chain: Chain, input_file: InputFile | None, now: float) -> Outcome:
        """Make the files; `input_file` is needed where lines have no result."""
        sums = chain.head.sums
        async with await self._storage.spool() as output, await self._storage.spool() as errors:
            spools = {OUTPUT: output, ERROR: errors}
            for name, part in chain.parts:
                if part.lines:
                    await self._copy(chain.place_of(name), set(part.failed), spools)
            if input_file is not None:
                async for line in _without_result(input_file, self._order, chain.taken, self._ending.status):
                    await self._put(ERROR, line.text, spools)
                    sums = sums + line.sums
            output_file = await self._add(OUTPUT, output)
            error_file = await self._add(ERROR, errors)
        return self._outcome(sums, output_file, error_file, now)

    def _outcome(self, sums: Sums, output: FileRecord | None, errors: FileRecord | None, now: float) -> Outcome:
        ended_at = int(self._ending.ended_at)
        return Outcome(
            self._ending.status,
            ended_at,
            max(int(now), ended_at),
            self._ending.cancelling_at,
            sums,
            output.id if output else None,
            errors.id if errors else None,
        )

    async def _copy(self, place: str, failed: set[int], spools: dict[int, AsyncSpool]) -> None:
        """Copy the lines of a part, each to where it belongs."""
        position = 0
        async with contextlib.aclosing(self._storage.lines(place)) as slices:
            async for lines in slices:
                for line in lines:
                    await self._put(ERROR if position in failed else OUTPUT, line, spools)
                    position += 1

    async def _put(self, kind: int, line: bytes, spools: dict[int, AsyncSpool]) -> None:
        self._sequence.append(kind)
        await spools[kind].write(line + b"\n")

    async def _add(self, kind: int, spool: AsyncSpool) -> FileRecord | None:
        if not spool.size:
            return None
        return await self._files.add(
            self._order.tenant,
            spool,
            filename=f"{self._order.id}_{'error' if kind == ERROR else 'output'}.jsonl",
            purpose="batch_output",
            keep_s=self._order.keep_s,
            made=(_file_id(self._order.id, kind, self._ending.ended_at), self._ending.ended_at),
        )


def has_gaps(chain: Chain, accepted: Accepted) -> bool:
    """Whether lines have no result."""
    return chain.head.taken < accepted.total


async def _without_result(file: InputFile, order: Order, taken: LineSet, status: str) -> AsyncGenerator[Line, None]:
    code, message = _WHY[status]
    async for keys in in_slices(_keys(file, order.endpoint, taken)):
        for number, key in keys:
            result = ResultRecord(number, key, "failed", error_code=code, error_message=message)
            yield Line(number, False, render(result, order.id), replace(Sums(), failed=1))


def _keys(file: InputFile, endpoint: str, taken: LineSet) -> Iterator[tuple[int, str]]:
    for number, raw, _ in file.raw_lines():
        if raw is not None and number not in taken:
            with contextlib.suppress(BadLine):  # it was examined, and had none
                yield number, parse_request(raw, endpoint)[0]


def _file_id(batch_id: str, kind: int, at: float) -> str:
    chance = int.from_bytes(hashlib.sha256(f"{batch_id} {kind}".encode()).digest())
    return f"file-{sortable_name(at, chance)}"
