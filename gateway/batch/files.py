"""Files: what was uploaded, and what batches have made, each the property of one tenant.

A file is its content and its record; it exists while its record does, so that one of which only the content is there
(an upload in its last moment, a deletion that was cut off) does not. Files that expire are gone to everybody at that
moment, and removed when the janitor comes (`keeper.py`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from llmq.gateway.batch import places
from llmq.gateway.batch.clock import QueueClock
from llmq.gateway.batch.paging import Listing, following, page_of
from llmq.gateway.batch.storage import AsyncSpool, Storage
from llmq.gateway.errors import ApiError
from llmq.scheduler.batch_record import sortable_name
from llmq.scheduler.input_file import InputFile

#: Records read at once while a page is put together.
_CHUNK = 100

#: Seconds that an input file is kept where its upload does not say, as OpenAI does.
KEEP_INPUT_S = 30 * 86_400


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What is known of a file. Times are whole Unix seconds; `expires_at` None: it stays until it is deleted."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int | None = None

    def to_openai(self) -> dict[str, Any]:
        """Return the file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class Files:
    """The files of all tenants."""

    def __init__(self, storage: Storage, clock: QueueClock) -> None:
        self._storage = storage
        self._clock = clock

    async def add(
        self,
        tenant: str,
        spool: AsyncSpool,
        *,
        filename: str,
        purpose: str,
        keep_s: int | None,
        made: tuple[str, float] | None = None,
    ) -> FileRecord:
        """Make a file of what was spooled. `made` is id and time of one that may be added again (a batch's output)."""
        now = await self._clock.now() if made is None else made[1]
        file_id = f"file-{sortable_name(now)}" if made is None else made[0]
        expires_at = None if keep_s is None else int(now) + keep_s
        record = FileRecord(file_id, spool.size, int(now), filename, purpose, expires_at)
        await spool.commit(places.content(tenant, file_id))
        if expires_at is not None:  # before the record, so that no file escapes the janitor
            await self._storage.write(places.expiring(expires_at, file_id), orjson.dumps({"tenant": tenant}))
        await self._storage.write(places.file_record(tenant, file_id), orjson.dumps(asdict(record)))
        return record

    async def get(self, tenant: str, file_id: str) -> FileRecord:
        """Return a file's record. Raises ApiError (404), also for another tenant's."""
        if places.is_file_id(file_id):
            record = _read(await self._storage.read_if_there(places.file_record(tenant, file_id)))
            if record is not None and not _is_over(record, await self._clock.now()):
                return record
        raise ApiError(404, f"No such File object: {file_id[:80]}", param="id")

    async def page(self, tenant: str, listing: Listing, purpose: str | None) -> dict[str, Any]:
        """Return a page of the tenant's files, those of one purpose where it is given."""
        names = await self._storage.names(places.files_of(tenant))
        ids = following([name.removesuffix(".json") for name in names], listing)
        now = await self._clock.now()
        found: list[FileRecord] = []
        for start in range(0, len(ids), _CHUNK):
            paths = [places.file_record(tenant, file_id) for file_id in ids[start : start + _CHUNK]]
            records = map(_read, await self._storage.read_many(paths))
            found += [
                record
                for record in records
                if record is not None and not _is_over(record, now) and purpose in (None, record.purpose)
            ]
            if len(found) > listing.limit:
                break
        page = found[: listing.limit]
        return page_of([record.to_openai() for record in page], len(found) > listing.limit)

    def content(self, tenant: str, file_id: str) -> AsyncGenerator[bytes, None]:
        """Iterate over the content of a file; FileNotFoundError comes with the first block."""
        return self._storage.blocks(places.content(tenant, file_id))

    def lines(self, tenant: str, file_id: str) -> AsyncGenerator[list[bytes], None]:
        """Iterate over the lines of a file, some at a time."""
        return self._storage.lines(places.content(tenant, file_id))

    async def filename(self, tenant: str, file_id: str) -> str:
        """Return the name of a file, also of one whose time is over while a batch reads it. May raise
        FileNotFoundError.
        """
        record = _read(await self._storage.read(places.file_record(tenant, file_id)))
        assert record is not None
        return record.filename

    async def open_input(self, tenant: str, file_id: str, max_line_bytes: int) -> InputFile:
        """Open a file as one of requests; the caller closes it. Raises FileNotFoundError, InputFileError."""
        return await self._storage.open_input(places.content(tenant, file_id), file_id, max_line_bytes)

    async def delete(self, tenant: str, record: FileRecord) -> None:
        """Remove a file."""
        await self._storage.remove(places.file_record(tenant, record.id))
        await self._storage.remove(places.content(tenant, record.id))
        if record.expires_at is not None:
            await self._storage.remove(places.expiring(record.expires_at, record.id))

    async def delete_expired(self, in_use: set[str]) -> int:
        """Remove the files whose time is over, except those that a batch still reads; return how many there were."""
        now, removed = await self._clock.now(), 0
        for name in await self._storage.names(places.EXPIRING):
            found = places.read_expiring(name)
            if found is None or found[1] in in_use or not places.is_file_id(found[1]):
                continue
            expires_at, file_id = found
            if expires_at > now:
                break
            mark = await self._storage.read_if_there(places.expiring(expires_at, file_id))
            if mark is not None:
                tenant = orjson.loads(mark)["tenant"]
                await self.delete(tenant, FileRecord(file_id, 0, 0, "", "", expires_at))
                removed += 1
        return removed


def _read(stored: bytes | None) -> FileRecord | None:
    return None if stored is None else FileRecord(**orjson.loads(stored))


def _is_over(record: FileRecord, now: float) -> bool:
    return record.expires_at is not None and record.expires_at <= now
