"""The dead letters: jobs that used up their attempts or crashed three times, kept 30 days for a person to look at.

    letters = DeadLetters(queue)
    for letter in await letters.ls(20): ...
    again = await letters.retry(await letters.choose(["1764460000000-0"]))

The finish script writes them, the sweeper lets the old ones go; here they are looked at, queued again, and purged. A
letter holds its whole job, which may be megabytes and private: reading leaves it on the server unless it is asked for.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from llmq.scheduler.batch_lookup import read_batches
from llmq.scheduler.batch_record import BatchRecord
from llmq.scheduler.batches import Batches
from llmq.scheduler.cipher import error_of, job_owner, line_owner, request_of
from llmq.scheduler.encrypted_lines import encrypted_lines
from llmq.scheduler.errors import EncodingError, NotFoundError, TamperedError
from llmq.scheduler.feeding import Feeder
from llmq.scheduler.job import Job, TrafficClass
from llmq.scheduler.lease import batch_of
from llmq.scheduler.queue import Queue, new_job_id
from llmq.scheduler.retrying import cost_of
from llmq.scheduler.scripts import SubmitLine
from llmq.scheduler.stored_number import whole

#: Bytes of letters that the server looks at in one call: it answers nobody else meanwhile.
_PAGE_BYTES = 4 * 2**20

#: Letters of one page, and ids of one XDEL.
_PAGE = 500

#: Letters from one id backwards, each as its id, the bytes of its job, and all other fields.
_HEADS = """
local found, bytes, before, wanted = {}, 0, ARGV[1], tonumber(ARGV[2])
repeat
  local letters = redis.call('XREVRANGE', KEYS[1], before, ARGV[3], 'COUNT', math.min(4, wanted - #found))
  for _, letter in ipairs(letters) do
    before = '(' .. letter[1]
    local head = {letter[1], 0}
    for i = 1, #letter[2], 2 do
      local field, value = letter[2][i], letter[2][i + 1]
      bytes = bytes + #value
      if field == 'data' then head[2] = #value else head[#head + 1] = field head[#head + 1] = value end
    end
    found[#found + 1] = head
  end
until #letters == 0 or #found >= wanted or bytes > tonumber(ARGV[4])
return found
"""


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One dead letter, without its job.

    `key` is the job's id, or the custom_id of a line; `died_at` is in seconds since the epoch, by Redis' clock;
    `status_code` is the engine's last one (None: it gave none) and `code` says why there is no answer; `size` is the
    bytes of the stored job.
    """

    id: str
    died_at: float
    key: str
    lane: str
    entry: str
    cls: TrafficClass
    tenant: str
    code: str
    status_code: int | None
    error: str
    attempts: int
    crashes: int
    host: str
    size: int

    @property
    def batch_id(self) -> str | None:
        """The batch of which it is a line; None for a single job."""
        return batch_of(self.lane)

    @property
    def line(self) -> int | None:
        """The line's number in its file; None for a single job."""
        return _number(self.entry.partition("-")[0]) if self.batch_id else None

    def to_json(self) -> dict[str, Any]:
        """Return what `dead ls --json` prints of it."""
        return {
            "id": self.id,
            "died_at": self.died_at,
            "key": self.key,
            "batch": self.batch_id,
            "line": self.line,
            "class": self.cls.value,
            "tenant": self.tenant,
            "code": self.code or None,
            "status_code": self.status_code,
            "error": self.error,
            "attempts": self.attempts,
            "crashes": self.crashes,
            "host": self.host,
            "lane": self.lane,
            "entry": self.entry,
            "size": self.size,
        }


@dataclass(slots=True)
class Retried:
    """What came of a retry: new single jobs, new batches, and letters that hold no job which could be read."""

    jobs: list[str] = field(default_factory=list)
    batches: list[BatchRecord] = field(default_factory=list)
    unreadable: list[DeadLetter] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many dead letters were queued again."""
        return len(self.jobs) + sum(batch.lines for batch in self.batches)


class DeadLetters:
    """The dead letters of one queue."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._redis = cast(Any, queue.redis)
        self._key = queue.keys.dead

    async def count(self) -> int:
        """Return how many there are."""
        return int(await self._redis.xlen(self._key))

    async def ls(self, limit: int | None = None) -> list[DeadLetter]:
        """Return the newest ones, the newest first; None is all."""
        found: list[DeadLetter] = []
        before = "+"
        while limit is None or len(found) < limit:
            page = await self._page(before, _PAGE if limit is None else min(_PAGE, limit - len(found)))
            if not page:
                break
            found += page
            before = f"({page[-1].id}"
        return found

    async def show(self, letter_id: str) -> DeadLetter:
        """Return one. Raises NotFoundError."""
        if re.fullmatch(r"\d{1,19}-\d{1,19}", letter_id) and (page := await self._page(letter_id, 1, letter_id)):
            return page[0]
        raise NotFoundError(
            f"there is no dead letter {letter_id!r} in queue {self._queue.name!r}: "
            "it was retried or purged, or is older than 30 days; see: llmq dead ls"
        )

    async def job(self, letter: DeadLetter) -> Job:
        """Return the job of a letter. Raises EncodingError where it is none, NotFoundError where the letter is gone.

        Raises KeyMissing where it is encrypted with a key that is not here.
        """
        return Job.decode(self._queue.cipher.decrypt(await self._data(letter), request_of(_owner(letter))))

    async def choose(self, letter_ids: Sequence[str]) -> list[DeadLetter]:
        """Return the letters of these ids, each once, in their order. Raises NotFoundError."""
        return [await self.show(letter_id) for letter_id in dict.fromkeys(letter_ids)]

    async def retry(self, letters: Sequence[DeadLetter]) -> Retried:
        """Queue the jobs of letters again: single jobs as new ones, the lines of each batch as one new batch.

        Class, tenant and custom_ids stay, attempts are counted anew. A letter goes after its job was queued, so none
        is lost. What is cut off in between leaves letters whose jobs wait already: the same retry again finds the same
        jobs and batches, queues what is missing, and lets the letters go. (Only a retry of *other* letters together
        with those, or one when the record of the job is kept no longer, runs a job twice.)

        Raises QueueFull for single jobs; lines wait for room.
        """
        done = Retried()
        lines: dict[str, list[DeadLetter]] = {}
        for letter in letters:
            if not letter.size:
                done.unreadable.append(letter)
            elif letter.batch_id is not None:
                lines.setdefault(letter.batch_id, []).append(letter)
            elif job_id := await self._retry_job(letter):
                done.jobs.append(job_id)
            else:
                done.unreadable.append(letter)
        for batch_id, chosen in lines.items():
            done.batches.append(await self._retry_lines(batch_id, sorted(chosen, key=_age)))
        return done

    async def purge(self, letters: Sequence[DeadLetter]) -> int:
        """Delete letters; return how many were there."""
        deleted = 0
        for first in range(0, len(letters), _PAGE):
            ids = [letter.id for letter in letters[first : first + _PAGE]]
            deleted += int(await self._redis.xdel(self._key, *ids))
        return deleted

    async def _retry_job(self, letter: DeadLetter) -> str | None:
        """Submit the job of a letter, and let the letter go; None where the job cannot be read."""
        try:
            job = await self.job(letter)
        except EncodingError:
            return None
        # The id follows from the letter's, and an id is taken only once. Nobody may be there to wait for it, and the
        # letter goes: it waits for a worker for as long as that takes.
        job_id = new_job_id(letter.tenant, f"dead letter {letter.id}")
        await self._queue.submit(job, cls=letter.cls, tenant=letter.tenant, ttl=0, job_id=job_id)
        await self.purge([letter])
        return job_id

    async def _retry_lines(self, old_id: str, letters: Sequence[DeadLetter]) -> BatchRecord:
        batches = Batches(self._queue)
        (old,) = await read_batches(self._queue.redis, self._queue.keys, [old_id])  # letters are kept longer
        new_id, digest = _name_of_retry(old_id, letters)
        record = await batches.open(
            name=old.name if old else f"dead letters of {old_id}",
            digest=digest,
            tenant=letters[0].tenant,
            batch_id=new_id,
            retry_of=old_id,
            extra=old.extra if old else None,
        )
        if not record.sealed:
            feeder = Feeder(self._queue.redis, self._queue.keys, record, resume="give the same command again")
            lines = self._lines(letters, record.next_line)
            await feeder.feed(encrypted_lines(lines, new_id, self._queue.cipher))
        await self.purge(letters)
        return await batches.show(new_id)

    async def _lines(self, letters: Sequence[DeadLetter], first: int) -> AsyncGenerator[SubmitLine, None]:
        """Iterate over the jobs of letters as lines of a new batch, from number `first` on."""
        for number, letter in enumerate(letters, 1):
            if number >= first:
                data = await self._data(letter)
                try:
                    data = self._queue.cipher.decrypt(data, request_of(_owner(letter)))
                except TamperedError:
                    pass  # as it is, it is refused by its worker, and is a dead letter again
                yield SubmitLine(number, letter.key, data, cost_of(data))

    async def _data(self, letter: DeadLetter) -> bytes:
        entries = await self._redis.xrange(self._key, letter.id, letter.id)
        if not entries:
            raise NotFoundError(f"dead letter {letter.id} was retried or purged a moment ago; see: llmq dead ls")
        data: bytes = entries[0][1].get(b"data", b"")
        return data

    async def _page(self, before: str, count: int, after: str = "-") -> list[DeadLetter]:
        rows = await self._redis.eval_ro(_HEADS, 1, self._key, before, count, after, _PAGE_BYTES)
        letters = [_letter(row) for row in rows]
        decrypt = self._queue.cipher.decrypt_text
        return [replace(letter, error=decrypt(letter.error, error_of(_owner(letter)))) for letter in letters]


def _owner(letter: DeadLetter) -> str:
    """Name the job of a letter, as it was named when it was encrypted."""
    return line_owner(letter.batch_id, letter.line or 0) if letter.batch_id else job_owner(letter.key)


def _letter(row: list[Any]) -> DeadLetter:
    """Read a letter. What is missing (another version wrote it) is empty or 0."""
    identity, size, *flat = row
    fields = {
        name.decode(errors="replace"): value.decode(errors="replace")
        for name, value in zip(flat[::2], flat[1::2], strict=True)
    }
    letter_id = identity.decode()
    return DeadLetter(
        id=letter_id,
        died_at=_number(letter_id.partition("-")[0]) / 1000,
        key=fields.get("key", ""),
        lane=fields.get("lane", ""),
        entry=fields.get("entry", ""),
        cls=TrafficClass.INTERACTIVE if fields.get("class") == "i" else TrafficClass.BATCH,
        tenant=fields.get("tenant") or "default",
        code=fields.get("code", ""),
        status_code=_number(fields["status"]) if fields.get("status") else None,
        error=fields.get("error", ""),
        attempts=_number(fields.get("attempts", "")),
        crashes=_number(fields.get("crashes", "")),
        host=fields.get("host", ""),
        size=size,
    )


def _name_of_retry(old_id: str, letters: Sequence[DeadLetter]) -> tuple[str, str]:
    """Return id and digest of the batch that retries these letters: the same letters are the same batch."""
    digest = hashlib.sha256(" ".join(letter.id for letter in letters).encode()).hexdigest()
    # A retry of a retry hangs on the first batch too, so that names do not grow.
    first = re.split(r"-(?:r\d|dead-)", old_id)[0]
    return f"{first}-dead-{digest[:12]}", f"dead:{digest}"


def _age(letter: DeadLetter) -> tuple[int, int]:
    milliseconds, _, sequence = letter.id.partition("-")
    return int(milliseconds), int(sequence)


def _number(text: str) -> int:
    return whole(text) if text.isascii() and text.isdigit() else 0
