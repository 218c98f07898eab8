"""Gathering: the way of a batch's results from Redis into the storage, while the batch runs.

Nothing is held in memory between two steps: results stay in Redis until there are enough of them for a part, or they
have waited long enough, or Redis has no room for more. A part that is certain is told to Redis as a collector's place;
from then on, and no sooner, Redis may trim those results.
"""

from __future__ import annotations

import asyncio
import time

from llmq.gateway.batch.parts import Chain, Line, sums_of
from llmq.scheduler.batch_record import RESULTS_NOT_COLLECTED, BatchRecord
from llmq.scheduler.batches import Batches
from llmq.scheduler.errors import NotFoundError, UsageError
from llmq.scheduler.records import render
from llmq.scheduler.result_reader import BEGINNING, Page, ResultReader

#: The name of all gateways together as a collector.
COLLECTOR = "gateway"

#: A part is written when so many results wait, or so many bytes have been read.
PART_LINES = 2000
PART_BYTES = 4 << 20

#: Results wait at most a twentieth of the batch's time so far, at least a second and at most a minute: the number of
#: parts then grows with the logarithm of the time.
PATIENCE_PART, LEAST_PATIENCE_S, MOST_PATIENCE_S = 1 / 20, 1.0, 60.0


class Gathering:
    """Gathers the results of one life of one batch into its chain.

    `before` lines were in the chain when this life began. `turns` bounds how many batches are gathered at a time.
    """

    def __init__(
        self, batches: Batches, batch_id: str, life: int, chain: Chain, before: int, turns: asyncio.Semaphore
    ) -> None:
        self._batches = batches
        self._batch_id = batch_id
        self._life = life
        self._chain = chain
        self._before = before
        self._turns = turns
        self._cursor = chain.cursor(life)
        self._started = self._gathered_at = time.monotonic()

    async def begin(self) -> None:
        """Tell Redis that there is a collector, so that nobody else's progress trims what is not in the chain."""
        await self._batches.collected(self._batch_id, COLLECTOR, self._cursor)

    async def step(self, record: BatchRecord) -> bool:
        """Gather what there is, if it is time for that; return whether the batch had ended and all is gathered."""
        if not (record.ended or self._is_time(record)):
            return False
        async with self._turns:
            await self._gather()
            if record.ended and self._waiting(record):
                await self._gather_again()
        self._gathered_at = time.monotonic()
        return record.ended

    def _is_time(self, record: BatchRecord) -> bool:
        waiting, now = self._waiting(record), time.monotonic()
        if waiting <= 0:
            return False
        patience = min(MOST_PATIENCE_S, max(LEAST_PATIENCE_S, PATIENCE_PART * (now - self._started)))
        full = waiting >= PART_LINES or record.reason == RESULTS_NOT_COLLECTED
        return full or now - self._gathered_at >= patience

    def _waiting(self, record: BatchRecord) -> int:
        return record.done - (self._chain.head.taken - self._before)

    async def _gather_again(self) -> None:
        """Look for results with earlier ids: Redis lost some and has others in their place (a failover)."""
        self._cursor = BEGINNING
        try:
            await self._gather()
        except NotFoundError:
            raise
        except UsageError:
            pass  # trimmed, so the chain has them; lines that are missing even so get an error line

    async def _gather(self) -> None:
        """Read to the end of what is there, and write it in parts."""
        reader = self._batches.reader(self._batch_id, self._cursor)
        while True:
            lines, more = await self._read_part(reader)
            if reader.cursor != self._cursor:
                if lines:
                    await self._chain.append(self._life, lines, reader.cursor)
                self._cursor = reader.cursor
                await self._batches.collected(self._batch_id, COLLECTOR, self._cursor)
            if not more:
                return

    async def _read_part(self, reader: ResultReader) -> tuple[list[Line], bool]:
        """Read results for one part; also say whether more may be there."""
        lines: list[Line] = []
        numbers: set[int] = set()
        size = 0
        while size < PART_BYTES and len(lines) < PART_LINES:
            page: Page = await self._batches.next_page(reader)
            if not page.results:
                return lines, False
            for _, result in page.results:
                # A line whose first result a failover has lost to Redis, but not to the chain, has a second one.
                if result.line not in self._chain.taken and result.line not in numbers:
                    text = render(result, self._batch_id)
                    lines.append(Line(result.line, result.ok, text, sums_of(result)))
                    numbers.add(result.line)
                    size += len(text)
        return lines, True
