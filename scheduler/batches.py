"""Batches: everything that is done with a batch as a whole, from opening it to deleting it.

    batches = Batches(queue)
    record = await batches.open(name="prompts.jsonl", digest=file.digest)
    await batches.feed(record.id, read_lines(file, checked))
    async for cursor, result in batches.results(record.id, follow=True):
        ...

How lines get in stands in `feeding.py`, how results are read in `result_reader.py`, and how they get into a file in
`collecting.py`. Which line starts when is decided by the claim script and by nothing here.

A Redis that cannot be reached at all is an error at once; one that goes away in the middle of something long (feeding,
following, waiting) is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import cast

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from llmq.scheduler import scripts
from llmq.scheduler.batch_lookup import read_batches
from llmq.scheduler.batch_record import EXTRA, BatchRecord, new_batch_id
from llmq.scheduler.encrypted_lines import encrypted_lines
from llmq.scheduler.errors import LineFault, NotFoundError, QueueFull, RedisFull, UsageError
from llmq.scheduler.feeding import Feeder, FeedProgress, encode_lines
from llmq.scheduler.lease import lane_of_batch
from llmq.scheduler.lines import InputLine
from llmq.scheduler.outage import PATIENCE_S, Outage, Pause
from llmq.scheduler.queue import Queue
from llmq.scheduler.records import ResultRecord
from llmq.scheduler.result_reader import BEGINNING, Page, ResultReader
from llmq.scheduler.retrying import failed_lines, nothing_to_retry, retry_id
from llmq.scheduler.scripts import SubmitLine
from llmq.scheduler.settings import check_tenant

#: Seconds for which a reader blocks: short enough for every client's socket timeout, and for a batch that ends
#: without a further result (sealed late, expired) to be noticed.
FOLLOW_S = 1.0

#: Calls of `collect` made in a row, while each trims something: the rest is for the next sync.
_TRIM_STEPS = 20

#: So long may a pipe be blocked, or Redis be away, before a collector that writes into one counts as killed.
_LAPSE_MS = 15 * 60 * 1000

#: Seconds for which a feed that may not wait looks after the lines that run already, before it leaves them to end.
_UNDO_S = 10.0

#: What to do when Redis stays away while somebody waits.
_GOES_ON = "the batch goes on; when it is back, give the same command again"

OnFeed = Callable[[FeedProgress], None]


class Batches:
    """The batches of one queue. `patience_s` is how long a Redis that went away is waited for, each time."""

    def __init__(self, queue: Queue, *, patience_s: float = PATIENCE_S) -> None:
        self._queue = queue
        self._redis = queue.redis
        self._keys = queue.keys
        self._patience_s = patience_s

    async def open(
        self,
        *,
        name: str,
        digest: str,
        tenant: str = "default",
        window: float | None = None,
        need: int = 0,
        batch_id: str | None = None,
        retry_of: str = "",
        extra: Mapping[str, str] | None = None,
    ) -> BatchRecord:
        """Make a batch, without lines; the same `batch_id` and `digest` again is the same batch.

        `window` is in seconds from now; `need` lines must have room now (0: the feed will wait for room). `extra` is
        kept with the record. Raises QueueFull, and UsageError where the id is taken by a batch of another file.
        """
        await self._queue.agree_on_key()
        batch_id = batch_id or new_batch_id()
        record = {"name": name, "digest": digest} | ({"retry_of": retry_of} if retry_of else {})
        call = scripts.open_batch(
            self._keys,
            batch_id,
            lane=lane_of_batch(batch_id),
            tenant=check_tenant(tenant),
            window_ms=0 if window is None else max(1, round(window * 1000)),
            need=need,
            record=record | {EXTRA + field: value for field, value in (extra or {}).items()},
        )
        try:
            verdict = await scripts.run(self._redis, call)
        except (RedisConnectionError, RedisTimeoutError):
            # Its reply may be all that was lost, and nobody would ever feed, seal or end what it has opened.
            verdict = await scripts.run(self._redis, call)
        if verdict.word == "full":
            raise QueueFull("batch", verdict.number, need=need)
        return await self.reopen(batch_id, digest)

    async def reopen(self, batch_id: str, digest: str) -> BatchRecord:
        """Return a batch that is to be fed on, made of the file with this digest. Raises UsageError for another."""
        await self._queue.agree_on_key()
        record = await self.show(batch_id)
        if record.digest != digest:
            raise UsageError(
                f"batch {batch_id} was made of another file: its digest is {record.digest}, this file's is {digest}; "
                "give the file that it was made of, or submit this one as a new batch"
            )
        return record

    async def feed(
        self,
        batch_id: str,
        lines: Iterable[InputLine | LineFault],
        *,
        wait: bool = True,
        on_progress: OnFeed | None = None,
        resume: str = "",
    ) -> int:
        """Queue the lines of a batch from where it stands, and seal it; return how many lines it has.

        May be called again after any failure, and beside another producer of the same lines. While the queue or Redis
        is full it waits and says so to `on_progress`; with `wait` False QueueFull or RedisFull is raised then, and the
        batch is cancelled and deleted if it had no lines before (else it stays, to be fed on). Raises RedisUnavailable
        when Redis stays away, LLMQError when the batch was ended by somebody; what was queued stays queued. `resume`
        ends those messages: how to go on, where it is not `llmq submit-batch --resume`.
        """
        record = await self.show(batch_id, patient=True)
        async with contextlib.aclosing(encode_lines(lines, record.next_line)) as encoded:
            return await self._feed(record, encoded, wait, on_progress, resume)

    async def feed_encoded(self, batch_id: str, lines: AsyncGenerator[SubmitLine, None], *, resume: str) -> int:
        """As `feed`, for lines in their stored form, from the line that the batch expects or from an earlier one."""
        record = await self.show(batch_id, patient=True)
        async with contextlib.aclosing(lines):
            return await self._feed(record, lines, True, None, resume)

    async def show(self, batch_id: str, *, patient: bool = False) -> BatchRecord:
        """Return what is known of a batch now; `patient` waits for a Redis that went away. Raises NotFoundError."""
        if patient:
            return await self._outage(_GOES_ON).ride_out(lambda: self.show(batch_id))
        (record,) = await read_batches(self._redis, self._keys, [batch_id])
        if record is None:
            raise _unknown(batch_id)
        return record

    async def ls(self, limit: int = 100) -> list[BatchRecord]:
        """Return the newest batches, the newest first."""
        names = cast(list[bytes], await self._redis.zrevrange(self._keys.batches, 0, limit - 1))
        records = await read_batches(self._redis, self._keys, [name.decode(errors="replace") for name in names])
        return [record for record in records if record is not None]

    async def wait(self, batch_id: str) -> BatchRecord:
        """Return the record of a batch once it has ended. One whose window is over is ended, if nobody else does."""
        pause, outage = Pause(), self._outage(_GOES_ON)
        record = await self.show(batch_id)
        while not record.ended:
            await outage.ride_out(lambda: self._reap_overdue(batch_id))
            await pause()
            record = await self.show(batch_id, patient=True)
        return record

    async def pause(self, batch_id: str) -> BatchRecord:
        """Let no line of the batch start; those that run go on. Raises UsageError when it has ended."""
        return await self._set_paused(batch_id, paused=True)

    async def resume(self, batch_id: str) -> BatchRecord:
        """Put a paused batch back into its place. Raises UsageError when it has ended."""
        return await self._set_paused(batch_id, paused=False)

    async def cancel(self, batch_id: str) -> BatchRecord:
        """End a batch: waiting lines at once, running ones by their workers, who are told. One that has ended stays."""
        lane = lane_of_batch(batch_id)
        found = await scripts.run(self._redis, scripts.cancel_batch(self._keys, batch_id, lane=lane))
        if found.word == "unknown":
            raise _unknown(batch_id)
        for consumer in found.consumers:
            await self._queue.tell_worker(consumer, f"cancel-lane {lane}")
        if found.word == "cancelling":
            await self.reap(batch_id)
        return await self.show(batch_id)

    async def reap(self, batch_id: str) -> int:
        """End the waiting lines of a batch that was cancelled or is over its window; return how many there were."""
        cursor, ended, lane = BEGINNING, 0, lane_of_batch(batch_id)
        while True:
            call = scripts.reap(self._keys, batch_id, lane=lane, cursor=cursor)
            cursor, count = await scripts.run(self._redis, call)
            ended += count
            if cursor == BEGINNING:
                return ended

    async def delete(self, batch_id: str) -> None:
        """Remove a batch that has ended, with its results. Raises UsageError for one that has not."""
        call = scripts.delete_batch(self._keys, batch_id, lane=lane_of_batch(batch_id))
        verdict = await scripts.run(self._redis, call)
        if verdict.word == "open":
            raise UsageError(f"batch {batch_id} is {verdict.value}; cancel it first: llmq batch cancel {batch_id}")
        if verdict.word == "unknown":
            raise _unknown(batch_id)

    async def discard(self, batch_id: str) -> None:
        """End a batch and remove it with its results; lines that run on for long are left to end as cancelled."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_UNDO_S):
                await self.cancel(batch_id)
                await self.wait(batch_id)
                await self.delete(batch_id)

    async def retry(
        self, batch_id: str, *, window: float | None = None, wait: bool = True, on_progress: OnFeed | None = None
    ) -> BatchRecord:
        """Make a batch of the failed lines of one that has ended, with the same ids and new line numbers.

        A retry that was interrupted is continued by the same call. Raises UsageError when the batch has not ended, has
        nothing to retry, was retried already, or has had results trimmed.
        """
        old = await self.show(batch_id)
        if not old.ended:
            raise UsageError(f"batch {batch_id} is {old.status}; retry it when it has ended")
        if not await self._has_retryable(old):
            raise nothing_to_retry(old)
        new_id = retry_id(batch_id)
        new = await self.open(
            name=old.name,
            digest=f"retry:{batch_id}",
            tenant=old.tenant,
            window=window,
            batch_id=new_id,
            retry_of=batch_id,
            extra=old.extra,
        )
        if new.sealed:
            raise UsageError(f"batch {batch_id} was retried already, as {new_id} ({new.status}): retry that one")
        async with contextlib.aclosing(self.results(batch_id)) as results:
            await self._feed(new, failed_lines(results, new.next_line), wait, on_progress)
        return await self.show(new_id)

    async def results(
        self, batch_id: str, *, after: str = BEGINNING, follow: bool = False
    ) -> AsyncGenerator[tuple[str, ResultRecord], None]:
        """Iterate over (cursor, result) in the order of completion, those after a cursor.

        With `follow` until the batch has ended and all is read. Raises NotFoundError when Redis does not know the
        batch (any more), UsageError when results were collected elsewhere and trimmed.
        """
        await self.show(batch_id)
        reader = self.reader(batch_id, after)
        while True:
            page = await self.next_page(reader, FOLLOW_S if follow else 0.0)
            for result in page.results:
                yield result
            if page.over or not (page.results or follow):
                return

    def reader(self, batch_id: str, after: str = BEGINNING) -> ResultReader:
        """Return a reader of a batch's results after a cursor, for `next_page`."""
        return ResultReader(self._redis, self._keys, batch_id, after, cipher=self._queue.cipher)

    async def next_page(self, reader: ResultReader, wait_s: float = 0.0) -> Page:
        """Return the next page of results, waiting up to `wait_s` for it, and longer for a Redis that went away.

        While nothing comes, a batch whose window is over is ended, if nobody else does.
        """
        outage = self._outage("results stay in Redis; when it is back, give the same command again")
        page = await outage.ride_out(lambda: reader.next_page(wait_s))
        if wait_s and not page.results and not page.over:
            await outage.ride_out(lambda: self._reap_overdue(reader.batch_id))
        return page

    async def collected(self, batch_id: str, collector: str, cursor: str, *, lasting: bool = True) -> int:
        """Say how far a collector has written *and synced*; "" removes it. Return how many results were trimmed.

        Call it with the reader's cursor before the first page, so that nothing is trimmed that was not read. One that
        is not `lasting` cannot be gone on with after its process: it counts as gone when it was silent for long.
        """
        lapse_ms = 0 if lasting else _LAPSE_MS
        call = scripts.collect(self._keys, batch_id, collector=collector, cursor=cursor, lapse_ms=lapse_ms)
        outage = self._outage("what is written is safe; when it is back, give the same command again")
        trimmed = 0
        for _ in range(_TRIM_STEPS):
            step = await outage.ride_out(lambda: scripts.run(self._redis, call))
            trimmed += step
            if not step:
                break
        return trimmed

    async def _feed(
        self,
        record: BatchRecord,
        lines: AsyncGenerator[SubmitLine, None],
        wait: bool,
        on_progress: OnFeed | None,
        resume: str = "",
    ) -> int:
        feeder = Feeder(
            self._redis,
            self._keys,
            record,
            wait=wait,
            on_progress=on_progress,
            patience_s=self._patience_s,
            resume=resume,
        )
        try:
            return await feeder.feed(encrypted_lines(lines, record.id, self._queue.cipher))
        except (QueueFull, RedisFull):
            if record.next_line == 1:  # lines of an earlier feed, and their results, are not this one's to delete
                await self.discard(record.id)
            raise

    async def _reap_overdue(self, batch_id: str) -> None:
        """End a batch whose window is over: a worker's sweeper does, but maybe no worker lives (G13)."""
        record = await self.show(batch_id)
        if record.expires_at is not None and record.overdue(await self._queue.now_ms() / 1000):
            await self.reap(batch_id)

    async def _set_paused(self, batch_id: str, *, paused: bool) -> BatchRecord:
        call = scripts.pause_batch(self._keys, batch_id, lane=lane_of_batch(batch_id), paused=paused)
        verdict = await scripts.run(self._redis, call)
        if verdict.word == "ended":
            word = "pause" if paused else "resume"
            raise UsageError(f"batch {batch_id} is {verdict.value}: there is nothing to {word}")
        return await self.show(batch_id)  # says so where it is unknown

    async def _has_retryable(self, old: BatchRecord) -> bool:
        if not old.failed:
            return False
        async with (
            contextlib.aclosing(self.results(old.id)) as results,
            contextlib.aclosing(failed_lines(results)) as lines,
        ):
            return await anext(lines, None) is not None

    def _outage(self, advice: str) -> Outage:
        return Outage(advice, patience_s=self._patience_s)


def _unknown(batch_id: str) -> NotFoundError:
    return NotFoundError(
        f"batch {batch_id}: this queue does not know it; see: llmq batch ls, or name its queue: --queue NAME"
    )
