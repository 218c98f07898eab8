"""A worker for tests of batches: it claims lines and ends them by the scripts, without an engine.

It does what a worker does as far as Redis can see, one step at a time, so that a test says when.
"""

from __future__ import annotations

from collections.abc import Callable

import orjson

from llmq.scheduler import scripts
from llmq.scheduler.lease import Answered, Ended, ErrorCode, Lease, Usage
from llmq.scheduler.queue import Queue

#: Judges a line: the answer that it gets.
Answer = Callable[[Lease], Answered | Ended]


def good(lease: Lease) -> Answered:
    """Answer any line with success, naming it."""
    body = orjson.dumps({"echo": lease.key})
    return Answered(200, body, f"req-{lease.key}", Usage(3, 2))


def bad(lease: Lease) -> Answered:
    """Answer any line as an engine does that refuses it."""
    return Answered(400, orjson.dumps({"error": {"message": f"no {lease.key}"}}), "")


def lost(_: Lease) -> Ended:
    """End any line without an answer."""
    return Ended(ErrorCode.WORKER_LOST, "its worker was lost")


def good_but(*keys: str) -> Answer:
    """Answer all lines with success but these."""
    return lambda lease: bad(lease) if lease.key in keys else good(lease)


class LineWorker:
    """Claims and ends lines of one queue."""

    def __init__(self, queue: Queue, name: str = "worker-1") -> None:
        self.name = name
        self._queue = queue
        self._candidates: list[str] = []

    async def claim(self, count: int) -> list[Lease]:
        """Claim up to `count` lines; they run from now on."""
        for _ in range(3):
            call = scripts.claim(
                self._queue.keys,
                self.name,
                room=count,
                free=count,
                reserve=0,
                suspects=0,
                candidates=self._candidates,
            )
            claimed = await scripts.run(self._queue.redis, call)
            if claimed.candidates is None:
                return claimed.leases
            self._candidates = claimed.candidates
        return []

    async def end(self, leases: list[Lease], answer: Answer = good) -> None:
        """End claimed lines."""
        if leases:
            endings = [scripts.Finish(lease, answer(lease)) for lease in leases]
            await scripts.run(self._queue.redis, scripts.finish(self._queue.keys, self.name, "host", endings))

    async def serve(self, count: int, answer: Answer = good) -> int:
        """Claim and end up to `count` lines; return how many there were."""
        leases = await self.claim(count)
        await self.end(leases, answer)
        return len(leases)

    async def serve_all(self, answer: Answer = good) -> int:
        """Claim and end lines until none waits; return how many there were."""
        served = 0
        while count := await self.serve(100, answer):
            served += count
        return served
