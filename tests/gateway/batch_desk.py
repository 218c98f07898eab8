"""Files and batches without HTTP: the part of a gateway on a real Redis in virtual time, its keeper run when asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
from redis.asyncio import Redis

from llmq.gateway.batch.asked import BatchAsked
from llmq.gateway.batch.clock import QueueClock
from llmq.gateway.batch.conductor import Limits
from llmq.gateway.batch.files import Files
from llmq.gateway.batch.part import BatchPart, open_batch_part
from llmq.gateway.batch.storage import Storage, open_storage
from llmq.scheduler.batches import Batches
from llmq.scheduler.errors import NotFoundError
from llmq.scheduler.queue import Queue
from llmq.scheduler.tasks import end_tasks
from tests.gateway.batch_gateway import CHAT, ENDED, questions
from tests.line_worker import LineWorker

#: Where the clock stands at first, in Unix seconds.
START = 1_800_000_000


class Desk:
    """One tenant's view of a gateway, and the ways to move time, lines and the keeper."""

    def __init__(self, redis: Redis, storage: Storage, tenant: str = "ann") -> None:
        self.tenant = tenant
        self.said: list[str] = []
        self.queue = Queue(redis)
        self.batches = Batches(self.queue)
        self.worker = LineWorker(self.queue)
        self.storage = storage
        self.part: BatchPart = open_batch_part(self.queue, storage, Limits(), self.said.append)
        self.service = self.part.service
        self.files = Files(storage, QueueClock(self.queue.now_ms))

    async def set_clock(self, seconds: float) -> None:
        """Let the queue's clock stand at a time after `START`."""
        await self.configure(virtual=str(round((START + seconds) * 1000)))

    async def configure(self, **fields: str) -> None:
        """Change live settings, in their stored form."""
        redis: Any = self.queue.redis
        await redis.hset(self.queue.keys.config, mapping=fields)

    async def upload(self, content: bytes, *, keep_s: int | None = None) -> str:
        """Make a file; return its id."""
        async with await self.storage.spool() as spool:
            await spool.write(content)
            record = await self.files.add(self.tenant, spool, filename="in.jsonl", purpose="batch", keep_s=keep_s)
        return record.id

    async def create(self, lines: int = 10, *, window: float = 3600.0, content: bytes | None = None) -> str:
        """Make a batch; return its id."""
        file_id = await self.upload(questions(lines) if content is None else content)
        asked = BatchAsked(file_id, CHAT, f"{window:g}s", window, None, None)
        return str((await self.service.create(self.tenant, asked))["id"])

    async def status(self, batch_id: str) -> str:
        """Return where a batch stands."""
        return str((await self.service.batch(self.tenant, batch_id))["status"])

    @contextlib.asynccontextmanager
    async def led(self) -> AsyncIterator[None]:
        """Lead batches until the block ends."""
        task = asyncio.create_task(self.part.run())
        try:
            yield
        finally:
            await end_tasks(task)

    async def queued(self, batch_id: str, lines: int) -> None:
        """Wait until so many lines of a batch are in Redis."""
        async with asyncio.timeout(20):
            while True:
                with contextlib.suppress(NotFoundError):
                    if (await self.batches.show(batch_id)).lines >= lines:
                        return
                await asyncio.sleep(0.01)

    async def sealed(self, batch_id: str, lines: int) -> None:
        """Wait until a batch is whole in Redis."""
        await self.queued(batch_id, lines)
        async with asyncio.timeout(20):
            while True:
                if (await self.batches.show(batch_id)).sealed:
                    return
                await asyncio.sleep(0.01)

    async def ended(self, batch_id: str) -> dict[str, Any]:
        """Wait for the end of a batch, and return it."""
        async with asyncio.timeout(20):
            while True:
                batch = await self.service.batch(self.tenant, batch_id)
                if batch["status"] in ENDED:
                    return batch
                await asyncio.sleep(0.01)

    async def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        """Return the lines of a file; of none, none."""
        if file_id is None:
            return []
        slices = [lines async for lines in self.files.lines(self.tenant, file_id)]
        return [orjson.loads(line) for lines in slices for line in lines]

    async def outcome(self, batch: dict[str, Any]) -> tuple[list[str], dict[str, int]]:
        """Return the ids in the output file, and how often each code stands in the error file."""
        output = [line["custom_id"] for line in await self.lines(batch["output_file_id"])]
        codes: dict[str, int] = {}
        for line in await self.lines(batch["error_file_id"]):
            code = line["error"]["code"] if line["error"] else str(line["response"]["status_code"])
            codes[code] = codes.get(code, 0) + 1
        counts = batch["request_counts"]
        assert (len(output), sum(codes.values())) == (counts["completed"], counts["failed"])
        return output, codes


def folder(path: Path) -> Storage:
    """Return a storage in a folder."""
    return open_storage(str(path / "files"), "default", path)
