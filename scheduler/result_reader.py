"""The result reader: walks the result stream of a batch page by page, while it grows and after.

Results stand in the order of completion; a cursor is the id of the last one read. Trimming (`collect`) only ever takes
results off the beginning, and a reader that would have read those finds out and says so, rather than pass over them.
Reading changes nothing in Redis; what is done with the results is for `collecting.py` and the callers to say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from llmq.scheduler.batch_record import COLLECTOR, BatchStatus
from llmq.scheduler.cipher import Cipher
from llmq.scheduler.errors import NotFoundError, UsageError
from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.records import ResultRecord
from llmq.scheduler.scripts import text
from llmq.scheduler.stored_number import whole

#: The cursor of a reader that has read nothing.
BEGINNING = "0-0"

#: A page aims at this many bytes. A server cannot be asked for bytes, only for a number of results, so the number
#: follows the size of those before; the most makes 256 MiB of the largest answers allowed (8 MiB).
PAGE_BYTES = 4 << 20
MOST_RESULTS = 32


@dataclass(frozen=True, slots=True)
class Page:
    """Some results, each with its cursor, in order; `over` when the batch has ended and all of them were read."""

    results: list[tuple[str, ResultRecord]]
    over: bool


class ResultReader:
    """Reads the results of one batch that come after `cursor`."""

    def __init__(
        self, redis: Redis, keys: QueueKeys, batch_id: str, cursor: str = BEGINNING, *, cipher: Cipher
    ) -> None:
        self.batch_id = batch_id
        self.cursor = cursor
        self._redis = redis
        self._keys = keys
        self._cipher = cipher
        self._count = MOST_RESULTS
        self._ended = False
        self._trimmed = 0

    async def next_page(self, wait_s: float = 0.0) -> Page:
        """Return the next page; an empty one when none has come in `wait_s` seconds (at most what a client may block).

        May be repeated after an error of Redis. Raises NotFoundError when Redis does not know the batch (any more),
        UsageError when results that come next were collected elsewhere and trimmed, KeyMissing when they are encrypted
        with a key that is not here.
        """
        page = await self._read()
        if page.results or page.over:
            return page
        if not self._ended:
            if not wait_s:
                return page
            # Only to be woken: what has come is read as a page, with all checks.
            results = self._keys.results(self.batch_id)
            await self._redis.xread({results: self.cursor}, count=1, block=max(1, round(wait_s * 1000)))
        return await self._read()

    async def _read(self) -> Page:
        ended_before = self._ended
        pipe = self._redis.pipeline(transaction=False)
        pipe.xrange(self._keys.results(self.batch_id), min=f"({self.cursor}", max="+", count=self._count)
        # After the page: what was not trimmed now was not when the page was read.
        pipe.hmget(self._keys.batch(self.batch_id), "status", "trimmed")
        entries, (status, trimmed) = await pipe.execute()
        if status is None:
            raise NotFoundError(
                f"batch {self.batch_id}: this queue does not know it (deleted, or its results are older than "
                "keep_batch); see: llmq batch ls, or name its queue: --queue NAME"
            )
        if whole(trimmed) != self._trimmed:
            await self._check_for_gap()
            self._trimmed = int(trimmed)
        results = [
            (text(entry), ResultRecord.from_fields(fields).decrypted(self.batch_id, self._cipher))
            for entry, fields in entries
        ]
        if results:
            self.cursor = results[-1][0]
            self._count = _next_count(self._count, results)
        self._ended = text(status) in _ENDED
        return Page(results, over=ended_before and not results)

    async def _check_for_gap(self) -> None:
        """Raise UsageError when results after the cursor were trimmed. At worst it is one trim too careful."""
        try:
            facts: dict[str, Any] = await self._redis.xinfo_stream(self._keys.results(self.batch_id))
            gone_up_to = text(facts["max-deleted-entry-id"])
        except ResponseError:  # no stream at all: everything was trimmed
            gone_up_to = "the last one"
        if gone_up_to != "the last one" and _place(gone_up_to) <= _place(self.cursor):
            return
        record = await self._redis.hgetall(self._keys.batch(self.batch_id))
        names = [name for name in sorted(map(text, record)) if name.startswith(COLLECTOR)]
        places = ", ".join(name.removeprefix(COLLECTOR) for name in names) or "a collector that was removed"
        done = whole(record.get(b"completed")) + whole(record.get(b"failed"))
        raise UsageError(
            f"batch {self.batch_id}: {whole(record.get(b'trimmed')):,} of {done:,} results are no longer in Redis; "
            f"they were collected and made room for others. Read them there: {places}; "
            f"Redis has those after {gone_up_to}"
        )


_ENDED = frozenset(status.value for status in BatchStatus if status.ended)


def _place(cursor: str) -> tuple[int, int]:
    milliseconds, _, sequence = cursor.partition("-")
    return int(milliseconds), int(sequence or 0)


def _next_count(count: int, results: list[tuple[str, ResultRecord]]) -> int:
    """Return how many results the next page has: fewer at once when they are large, more by and by when not."""
    mean = max(1, sum(len(record.body) + len(record.data) for _, record in results) // len(results))
    return max(1, min(PAGE_BYTES // mean, 2 * count, MOST_RESULTS))
