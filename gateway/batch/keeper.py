"""The keeper: finds the batches that have not ended and leads those that no other gateway does.

    keeper = Keeper(queue, conductor, ledger, files, storage, say)
    await keeper.run()          # until it is cancelled; batches then wait for the next gateway, or for this one again

Every gateway has one. Which of them leads a batch is decided by a hold in Redis (`hold.py`); what one that died has
left is found by the next look into `open`. It also removes files whose time is over, and what killed uploads have left.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from llmq.gateway.batch.clock import QueueClock
from llmq.gateway.batch.conductor import Conductor
from llmq.gateway.batch.facts import Ledger, Mark
from llmq.gateway.batch.files import Files
from llmq.gateway.batch.hold import Hold
from llmq.gateway.batch.storage import Storage, StorageError
from llmq.scheduler.errors import LLMQError
from llmq.scheduler.outage import REDIS_ERRORS, is_away
from llmq.scheduler.queue import Queue
from llmq.scheduler.tasks import end_tasks

#: Seconds between two looks for batches: with the time that a hold lasts, what a dead gateway led goes on within 13 s.
LOOK_S = 2.5

#: Seconds before a batch that failed to be led on is tried again; they double to the most.
FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 30.0

#: Seconds between two rounds of the janitor.
TIDY_S = 600.0

#: The hold of the one gateway whose janitor goes round.
_JANITOR = "janitor"


class Keeper:
    """Leads batches in one gateway."""

    def __init__(
        self,
        queue: Queue,
        conductor: Conductor,
        ledger: Ledger,
        files: Files,
        storage: Storage,
        clock: QueueClock,
        say: Callable[[str], None],
    ) -> None:
        self._queue = queue
        self.conductor = conductor
        self._ledger = ledger
        self._files = files
        self._storage = storage
        self._clock = clock
        self._say = say
        self._wake = asyncio.Event()
        self._led: dict[str, asyncio.Task[None]] = {}
        self._pauses: dict[str, tuple[float, float]] = {}  # batch -> not before, pause
        self._tidy_at = 0.0

    def wake(self) -> None:
        """Look now: a batch has come."""
        self._wake.set()

    async def run(self) -> None:
        """Lead batches until cancelled."""
        try:
            while True:
                self._wake.clear()
                try:
                    await self._look()
                except StorageError as error:
                    self._say(f"batches wait: {error}")
                try:
                    async with asyncio.timeout(LOOK_S * random.uniform(0.8, 1.2)):
                        await self._wake.wait()
                except TimeoutError:
                    pass
        finally:
            await end_tasks(*self._led.values())

    async def _look(self) -> None:
        marks = await self._ledger.marks()
        now = time.monotonic()
        for mark in marks:
            not_before, _ = self._pauses.get(mark.batch_id, (0.0, 0.0))
            if mark.batch_id not in self._led and now >= not_before:
                self._led[mark.batch_id] = asyncio.create_task(self._lead(mark))
        if now >= self._tidy_at:
            self._tidy_at = now + TIDY_S
            self._led[_JANITOR] = asyncio.create_task(self._tidy())

    async def _lead(self, mark: Mark) -> None:
        """Lead one batch, if no other gateway does; whatever goes wrong with it is its own affair."""
        hold = Hold(self._queue, mark.batch_id)
        try:
            if await hold.take():
                await hold.keep(self.conductor.conduct(mark, hold))
            self._pauses.pop(mark.batch_id, None)
        except Exception as error:  # a batch that cannot be led must not end the others
            self._put_off(mark.batch_id, error)
        finally:
            await hold.let_go()
            del self._led[mark.batch_id]

    def _put_off(self, batch_id: str, error: Exception) -> None:
        _, pause = self._pauses.get(batch_id, (0.0, FIRST_PAUSE_S / 2))
        pause = min(MOST_PAUSE_S, 2 * pause)
        self._pauses[batch_id] = (time.monotonic() + pause, pause)
        known = isinstance(error, LLMQError) or is_away(error)
        what = str(error) if known else f"{type(error).__name__}: {error}"
        self._say(f"batch {batch_id} waits {pause:g} s: {what}")

    async def _tidy(self) -> None:
        hold = Hold(self._queue, _JANITOR)
        try:
            if await hold.take():
                await self._storage.tidy()
                marks = await self._ledger.marks()
                await self._files.delete_expired({mark.input_file_id for mark in marks})
                await self._ledger.delete_expired(await self._clock.now(), {mark.batch_id for mark in marks})
        except (StorageError, *REDIS_ERRORS) as error:
            self._say(f"files and batches whose time is over are removed later: {error}")
        finally:
            await hold.let_go()
            del self._led[_JANITOR]
