"""Feeding: the way of a file's lines into their batch, chunk by chunk, in constant memory.

A chunk says which line it begins with, and the batch takes it only when it expects that very line. So any chunk may be
sent again: after a lost reply, a restart of Redis, a crash of this process (`--resume`), or beside a second producer
of the same file. While one chunk is on its way the next is being encoded.

This module neither reads files (`lines.py`) nor opens, cancels or deletes batches (`batches.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, cast

from redis.asyncio import Redis

from llmq.scheduler.batch_record import BatchRecord, BatchStatus
from llmq.scheduler.errors import (
    EncodingError,
    LineFault,
    LLMQError,
    QueueFull,
    RedisFull,
    RedisUnavailable,
    UsageError,
)
from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.lines import InputLine, UnusableLine
from llmq.scheduler.live import LiveSettings
from llmq.scheduler.outage import PATIENCE_S, REDIS_ERRORS, Outage, Pause, is_full
from llmq.scheduler.scripts import Call, SubmitLine, Verdict, run, seal_batch, submit_lines

#: A chunk holds up the server for 2 ms; larger ones would be felt by chat, smaller ones cost more trips.
MAX_CHUNK_LINES = 500
MAX_CHUNK_BYTES = 1 << 20

#: What a line takes on the wire beside its key and data: its number, cost, and the protocol's lengths.
LINE_OVERHEAD = 64

#: Lines that are encoded before others of this event loop get their turn (about 1 ms).
SLICE = 64


class FeedState(StrEnum):
    """What a feed does at the moment, in words for a person."""

    QUEUEING = "queueing"
    WAITING_FOR_ROOM = "waiting for room"
    WAITING_FOR_MEMORY = "waiting: Redis is full (maxmemory)"
    WAITING_FOR_REDIS = "waiting for Redis"
    SEALED = "queued"


@dataclass(frozen=True, slots=True)
class FeedProgress:
    """How far a feed has come: lines of the batch that are queued, the line expected next, what it does now."""

    lines: int
    next_line: int
    state: FeedState


@dataclass(frozen=True, slots=True)
class Chunk:
    """Lines `[first, after)` of a file; numbers that are not among `lines` are blank lines."""

    first: int
    after: int
    lines: tuple[SubmitLine, ...]

    def past(self, number: int) -> Chunk:
        """Return what is left for a batch that expects line `number`."""
        if number <= self.first:
            return self
        return Chunk(number, max(number, self.after), tuple(line for line in self.lines if line.number >= number))

    def within(self, room: int) -> Chunk:
        """Return the longest beginning that has at most `room` good lines (bad ones need none)."""
        taken: list[SubmitLine] = []
        for line in self.lines:
            room -= bool(line.data)
            if room < 0:
                break
            taken.append(line)
        return Chunk(self.first, taken[-1].number + 1 if taken else self.first, tuple(taken))


def encode_line(line: InputLine | LineFault) -> SubmitLine:
    """Return a line in its stored form; a bad one without data. Raises UsageError for a job that cannot be stored."""
    if isinstance(line, LineFault):
        key = line.key if isinstance(line, UnusableLine) else f"line-{line.line}"
        return SubmitLine(line.line, key, b"", fault=str(line))
    try:
        return SubmitLine(line.number, line.key, line.job.encode(proven=line.proven), line.job.cost())
    except EncodingError as error:
        raise UsageError(f"line {line.number}: {error}") from error


async def encode_lines(lines: Iterable[InputLine | LineFault], first: int) -> AsyncGenerator[SubmitLine, None]:
    """Iterate over the lines from number `first` on in their stored form, letting others run in between."""
    for count, line in enumerate(lines):
        if count % SLICE == 0:
            await asyncio.sleep(0)
        number = line.line if isinstance(line, LineFault) else line.number
        if number >= first:
            yield encode_line(line)


async def cut_chunks(lines: AsyncIterable[SubmitLine], first: int) -> AsyncGenerator[Chunk, None]:
    """Group lines into chunks of bounded size, the first of which begins at line `first`."""
    taken: list[SubmitLine] = []
    size = 0
    async for line in lines:
        line_size = len(line.data) + len(line.key) + len(line.fault) + LINE_OVERHEAD
        if taken and (len(taken) == MAX_CHUNK_LINES or size + line_size > MAX_CHUNK_BYTES):
            yield Chunk(first, taken[-1].number + 1, tuple(taken))
            first, taken, size = taken[-1].number + 1, [], 0
        taken.append(line)
        size += line_size
    if taken:
        yield Chunk(first, taken[-1].number + 1, tuple(taken))


class Feeder:
    """Feeds one batch, once; `record` says from which line on.

    `wait` False means: no room, no waiting (QueueFull, RedisFull). `on_progress` is told after every chunk and before
    every wait. `resume` says how to go on after an error, where it is not `submit-batch --resume`.
    """

    def __init__(
        self,
        redis: Redis,
        keys: QueueKeys,
        record: BatchRecord,
        *,
        wait: bool = True,
        on_progress: Callable[[FeedProgress], None] | None = None,
        patience_s: float = PATIENCE_S,
        resume: str = "",
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._batch_id = record.id
        self._lane = record.lane
        self._wait = wait
        self._on_progress = on_progress
        self._expected = record.next_line
        self._lines = record.lines
        self._closed = record.sealed
        self._resume = resume or f"continue with: llmq submit-batch FILE --resume {record.id}"
        self._outage = Outage(
            f"what was queued is safe; when it is back, {self._resume}",
            patience_s=patience_s,
            on_wait=lambda: self._tell(FeedState.WAITING_FOR_REDIS),
        )

    async def feed(self, lines: AsyncIterable[SubmitLine]) -> int:
        """Queue all lines, then seal the batch; return how many lines it has.

        `lines` begin at the line that the batch expects. Raises LLMQError when somebody cancelled the batch or its
        window is over, RedisUnavailable when Redis stays away: both leave what was queued as it is.
        """
        async with contextlib.aclosing(cut_chunks(lines, self._expected)) as chunks:
            chunk = None if self._closed else await anext(chunks, None)
            while chunk is not None and not self._closed:
                sending = asyncio.create_task(self._send(chunk))
                try:
                    chunk = await anext(chunks, None)
                    await sending
                finally:
                    await _give_up(sending)
        return await self._seal()

    async def _send(self, chunk: Chunk) -> None:
        """Send a chunk until all of it was taken, by us or by another producer of the same file."""
        pause = Pause()
        part = chunk = self._skip(chunk, self._expected)
        while chunk.lines and not self._closed:
            verdict = await self._call(self._submission(part))
            match verdict.word:
                case "ok":
                    self._lines += len(part.lines)
                    self._expected = part.after
                    part = chunk = chunk.past(part.after)
                    pause.reset()
                    self._tell(FeedState.QUEUEING)
                case "skip":
                    part = chunk = self._skip(chunk, verdict.number)
                case "full":
                    part = chunk.within(verdict.number)
                    if not part.lines or not self._wait:
                        await self._wait_for_room(pause)
                        part = chunk
                case _:
                    self._close(verdict.value)

    def _submission(self, part: Chunk) -> Call[Verdict]:
        return submit_lines(
            self._keys, self._batch_id, lane=self._lane, first=part.first, after=part.after, lines=part.lines
        )

    def _skip(self, chunk: Chunk, expected: int) -> Chunk:
        """Leave out the lines that the batch has already."""
        if expected < chunk.first:
            raise self._set_back(expected)
        left = chunk.past(expected)
        self._lines += len(chunk.lines) - len(left.lines)
        self._expected = max(self._expected, expected)
        return left

    async def _wait_for_room(self, pause: Pause) -> None:
        if not self._wait:
            config = await cast(Any, self._redis).hgetall(self._keys.config)
            raise QueueFull("batch", LiveSettings.from_hash(config).cap_batch)
        self._tell(FeedState.WAITING_FOR_ROOM)
        await pause()

    async def _seal(self) -> int:
        verdict = await self._call(seal_batch(self._keys, self._batch_id, lane=self._lane, next_line=self._expected))
        match verdict.word:
            case "ok":
                self._lines = verdict.number
                self._tell(FeedState.SEALED)
                return verdict.number
            case "open":
                raise self._set_back(verdict.number)
            case _:
                raise self._ended(verdict.value)

    async def _call(self, call: Call[Verdict]) -> Verdict:
        """Make a call that may be repeated, and repeat it while Redis is away or full."""
        pause = Pause()
        while True:
            try:
                return await self._outage.ride_out(lambda: run(self._redis, call))
            except REDIS_ERRORS as error:
                if not is_full(error):
                    raise
                if not self._wait:
                    raise RedisFull(f"Redis uses all its maxmemory and takes no more lines ({error})") from error
            self._tell(FeedState.WAITING_FOR_MEMORY)
            await pause()

    def _close(self, status: str) -> None:
        """Stop feeding: the batch takes no more lines. That is well where another producer has sealed it."""
        if status not in (BatchStatus.IN_PROGRESS, BatchStatus.COMPLETED):
            raise self._ended(status)
        self._closed = True

    def _ended(self, status: str) -> LLMQError:
        match status:
            case "lost":
                what = "Redis no longer knows it (it was deleted, or Redis lost its data); submit the file again"
            case BatchStatus.EXPIRING | BatchStatus.EXPIRED:
                what = "its window was over; submit the rest as a batch with a longer one: --window"
            case _:
                what = f"somebody cancelled it; see what is done: llmq batch show {self._batch_id}"
        return LLMQError(f"batch {self._batch_id} takes no more lines after line {self._expected - 1}: {what}")

    def _set_back(self, expected: int) -> LLMQError:
        """Return the error for a batch that expects lines again which it had taken: they cannot be read again here."""
        return RedisUnavailable(
            f"batch {self._batch_id} expects line {expected} again, though lines up to {self._expected - 1} were "
            f"queued: Redis lost its last writes; {self._resume}"
        )

    def _tell(self, state: FeedState) -> None:
        if self._on_progress is not None:
            self._on_progress(FeedProgress(self._lines, self._expected, state))


async def _give_up(task: asyncio.Task[None]) -> None:
    """End a task that nobody waits for any more; its result, if it has one, was taken before."""
    if not task.done():
        task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.exception()  # taken already, or of less interest than the error that led here
