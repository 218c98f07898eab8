"""The service: what clients can do with files and batches, each within its own tenant.

It takes batches up, shows and cancels them; it leads none (`keeper.py`). What belongs to another tenant is not found,
as if it did not exist.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

from llmq.gateway.batch import places
from llmq.gateway.batch.asked import BatchAsked, check_file_id, read_expiry, read_purpose
from llmq.gateway.batch.batch_object import batch_object
from llmq.gateway.batch.clock import QueueClock
from llmq.gateway.batch.facts import Facts, Ledger, Order
from llmq.gateway.batch.files import FileRecord, Files
from llmq.gateway.batch.paging import Listing, page_of
from llmq.gateway.batch.running_results import RunningResults
from llmq.gateway.batch.storage import Storage
from llmq.gateway.batch.upload import receive_upload
from llmq.gateway.errors import ApiError
from llmq.scheduler.batch_lookup import read_batches
from llmq.scheduler.batch_record import BatchRecord, new_batch_id
from llmq.scheduler.batches import Batches
from llmq.scheduler.errors import NotFoundError
from llmq.scheduler.queue import Queue


class BatchService:
    """Files and batches of all tenants; `wake` is called when a batch has come."""

    def __init__(
        self,
        queue: Queue,
        storage: Storage,
        files: Files,
        ledger: Ledger,
        clock: QueueClock,
        *,
        file_bytes: int,
        wake: Callable[[], None],
    ) -> None:
        self._queue = queue
        self._batches = Batches(queue, patience_s=0.0)  # who asks is told at once that Redis is away
        self._storage = storage
        self._files = files
        self._ledger = ledger
        self._clock = clock
        self._file_bytes = file_bytes
        self._wake = wake

    # --- files ------------------------------------------------------------------------------------------------------

    async def upload(self, tenant: str, headers: Mapping[str, str], chunks: AsyncIterator[bytes]) -> dict[str, Any]:
        """Take a file in. Raises ApiError."""
        async with await self._storage.spool() as spool:
            upload = await receive_upload(headers, chunks, spool, self._file_bytes)
            purpose, keep_s = read_purpose(upload.fields), read_expiry(upload.fields)
            record = await self._files.add(tenant, spool, filename=upload.filename, purpose=purpose, keep_s=keep_s)
        return record.to_openai()

    async def file(self, tenant: str, file_id: str) -> FileRecord:
        """Return a file's record. Raises ApiError (404)."""
        return await self._files.get(tenant, file_id)

    async def list_files(self, tenant: str, listing: Listing, purpose: str | None) -> dict[str, Any]:
        """Return a page of files."""
        return await self._files.page(tenant, listing, purpose)

    def content(self, tenant: str, record: FileRecord) -> AsyncGenerator[bytes, None]:
        """Iterate over a file's bytes."""
        return self._files.content(tenant, record.id)

    async def delete_file(self, tenant: str, file_id: str) -> dict[str, Any]:
        """Remove a file. Raises ApiError (404; 400 while a batch reads it)."""
        record = await self._files.get(tenant, file_id)
        for mark in await self._ledger.marks():
            if mark.input_file_id != file_id:
                continue
            # Who has seen the end of a batch may delete its input, though the batch is cleared away a moment later.
            if (await self._ledger.facts(mark.tenant, mark.batch_id)).ended is None:
                raise ApiError(
                    400,
                    f"File {file_id} is the input of {mark.batch_id}, which has not ended; cancel that first, or wait.",
                    param="id",
                    code="file_in_use",
                )
        await self._files.delete(tenant, record)
        return {"id": file_id, "object": "file", "deleted": True}

    # --- batches ----------------------------------------------------------------------------------------------------

    async def create(self, tenant: str, asked: BatchAsked) -> dict[str, Any]:
        """Take a batch up. Raises ApiError (400; 404: no such file)."""
        check_file_id(asked)
        await self._check_input(tenant, asked.input_file_id)
        now = await self._clock.now()
        order = Order(
            id=new_batch_id(now),
            tenant=tenant,
            endpoint=asked.endpoint,
            input_file_id=asked.input_file_id,
            completion_window=asked.completion_window,
            created_at=int(now),
            expires_at=int(now + asked.window),
            metadata=asked.metadata,
            keep_s=asked.keep_s,
        )
        await self._ledger.enter(order)
        self._wake()
        return batch_object(Facts(order), None)

    async def batch(self, tenant: str, batch_id: str) -> dict[str, Any]:
        """Return a batch as it stands. Raises ApiError (404)."""
        facts = await self._facts(tenant, batch_id)
        return batch_object(facts, await self._record(facts))

    async def list_batches(self, tenant: str, listing: Listing) -> dict[str, Any]:
        """Return a page of batches, the newest first."""
        found, more = await self._ledger.page(tenant, listing)
        running = [facts.order.id for facts in found if facts.ended is None and facts.order is not None]
        records = await read_batches(self._queue.redis, self._queue.keys, running)
        by_id = dict(zip(running, records, strict=True))
        shown = [batch_object(facts, by_id.get(facts.order.id) if facts.order else None) for facts in found]
        return page_of(shown, more)

    async def cancel(self, tenant: str, batch_id: str) -> dict[str, Any]:
        """Ask for the end of a batch. One that is being cancelled, or was, stays so. Raises ApiError (404, 400)."""
        facts = await self._facts(tenant, batch_id)
        shown = batch_object(facts, await self._record(facts))
        if shown["status"] in ("cancelling", "cancelled"):
            return shown
        if facts.ended is None and facts.order is not None and shown["status"] != "finalizing":
            # The fact first: whoever opens the batch in this moment looks for it afterwards (`conductor.py`).
            await self._ledger.cancel(facts.order, int(await self._clock.now()))
            with contextlib.suppress(NotFoundError):
                await self._batches.cancel(batch_id)
            facts = await self._facts(tenant, batch_id)
            shown = batch_object(facts, await self._record(facts))
            if shown["status"] in ("cancelling", "cancelled"):
                return shown
            if facts.order is not None and facts.ended is None:
                await self._ledger.uncancel(facts.order)  # its last line ended in this moment
        # Not 409, which official clients repeat: it would be refused again.
        raise ApiError(400, f"Cannot cancel a batch with status '{shown['status']}'.", param="id")

    async def results(self, tenant: str, batch_id: str, *, after: int, follow: bool) -> AsyncGenerator[bytes, None]:
        """Return the lines of results after the first `after`, as they come. Raises ApiError (404)."""
        await self._facts(tenant, batch_id)
        running = RunningResults(self._storage, self._files, self._ledger, self._batches, after=after)
        return running.lines(tenant, batch_id, follow=follow)

    async def _check_input(self, tenant: str, file_id: str) -> None:
        try:
            record = await self._files.get(tenant, file_id)
        except ApiError as error:
            raise ApiError(404, error.message, param="input_file_id") from None
        if record.purpose != "batch":
            raise ApiError(
                400,
                f"Invalid 'input_file_id': expected a file with the purpose 'batch', got '{record.purpose}'.",
                param="input_file_id",
                code="invalid_value",
            )

    async def _facts(self, tenant: str, batch_id: str) -> Facts:
        if places.is_batch_id(batch_id):
            facts = await self._ledger.facts(tenant, batch_id)
            if facts.order is not None or facts.ended is not None:
                return facts
        raise ApiError(404, f"No batch found with id '{batch_id[:80]}'.", param="id")

    async def _record(self, facts: Facts) -> BatchRecord | None:
        """Return what Redis knows of a batch that has not ended."""
        if facts.ended is not None or facts.order is None:
            return None
        (record,) = await read_batches(self._queue.redis, self._queue.keys, [facts.order.id])
        return record
