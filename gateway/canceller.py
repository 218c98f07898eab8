"""The canceller: takes back the jobs of clients that have left.

A cancel must not be lost because Redis is away in that moment, and no request waits for it: ids are taken here, and
cancelled from the background as soon as it can be done. What waits in the queue then never starts; what runs is aborted
in its engine within a second.
"""

from __future__ import annotations

import asyncio
import time

from llmq.scheduler.errors import LLMQError, NotFoundError
from llmq.scheduler.outage import REDIS_ERRORS, Pause
from llmq.scheduler.queue import Queue

#: Cancels under way at a time: a thousand clients that leave at once are done in tenths of a second.
AT_ONCE = 32

#: A submission whose reply did not come may arrive later than the first cancel: it is looked for this long.
UNSURE_S = 10.0

#: Ids that are kept while Redis is away; by then most of their jobs have expired.
MOST_KEPT = 20_000


class Canceller:
    """Cancels jobs of one queue, in the background (`run`)."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._left: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()

    def cancel(self, job_id: str, *, unsure: bool = False) -> None:
        """Cancel a job soon. `unsure`: nobody knows whether it was submitted."""
        if len(self._left) < MOST_KEPT:
            self._left[job_id] = time.monotonic() + (UNSURE_S if unsure else 0.0)
            self._settled.clear()
            self._wake.set()

    async def run(self) -> None:
        """Cancel until cancelled."""
        pause = Pause()
        while True:
            await self._wake.wait()
            self._wake.clear()
            some = list(self._left)[:AT_ONCE]
            done = await asyncio.gather(*(self._try(job_id) for job_id in some))
            if all(done):
                pause.reset()
            else:
                await pause()
            (self._wake if self._left else self._settled).set()

    async def flush(self, timeout: float) -> None:
        """Wait until all is cancelled, or `timeout` seconds are over."""
        try:
            async with asyncio.timeout(timeout):
                await self._settled.wait()
        except TimeoutError:
            pass  # Redis is away: their time in the queue ends what has not begun

    async def _try(self, job_id: str) -> bool:
        """Cancel one job; return whether that is settled."""
        try:
            await self._queue.cancel_job(job_id)
        except NotFoundError:
            if time.monotonic() < self._left.get(job_id, 0.0):
                return False
        except (*REDIS_ERRORS, OSError):
            return False
        except LLMQError:
            pass  # nothing that could be tried again
        self._left.pop(job_id, None)
        return True
