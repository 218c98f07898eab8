"""The batch part of a gateway: its pieces, put together.

part = open_batch_part(queue, storage, Limits(), say)
app routes: batch_routes(part.service, admission)       background: part.run()       at the end: part.close()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from llmq.gateway.batch.clock import QueueClock
from llmq.gateway.batch.conductor import Conductor, Limits
from llmq.gateway.batch.facts import Ledger
from llmq.gateway.batch.files import Files
from llmq.gateway.batch.keeper import Keeper
from llmq.gateway.batch.service import BatchService
from llmq.gateway.batch.storage import Storage
from llmq.scheduler.batches import Batches
from llmq.scheduler.queue import Queue

#: Seconds for which a step of a batch waits for Redis before the batch is put off: about as long as its hold lasts.
_PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class BatchPart:
    """What a gateway needs of files and batches: `service` for the routes, `run` in the background until cancelled."""

    service: BatchService
    keeper: Keeper
    storage: Storage

    async def run(self) -> None:
        """Lead batches until cancelled."""
        await self.keeper.run()

    def close(self) -> None:
        """Let go of the storage, after the last request."""
        self.storage.close()


def open_batch_part(queue: Queue, storage: Storage, limits: Limits, say: Callable[[str], None]) -> BatchPart:
    """Put the pieces together; `say` is told, in a line each, what an operator should know. Does nothing yet."""
    clock = QueueClock(queue.now_ms)
    files, ledger = Files(storage, clock), Ledger(storage)
    batches = Batches(queue, patience_s=_PATIENCE_S)
    conductor = Conductor(batches, storage, files, ledger, clock, limits, say)
    keeper = Keeper(queue, conductor, ledger, files, storage, clock, say)
    service = BatchService(queue, storage, files, ledger, clock, file_bytes=limits.file_bytes, wake=keeper.wake)
    return BatchPart(service, keeper, storage)
