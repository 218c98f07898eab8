"""Takes the snapshot of one line of a batch that `why.py` explains. It reads, and changes nothing.

A line is named by its number, or by its custom_id, which is searched for: no index leads from one to the other, nor
from a line to its result. A search looks at 10,000 entries at most, or some 80 MiB, which stay on the server, and holds
it up for a few milliseconds at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from llmq.scheduler.batch_lookup import read_batches
from llmq.scheduler.batch_record import BatchRecord
from llmq.scheduler.cipher import error_of, line_owner
from llmq.scheduler.errors import NotFoundError
from llmq.scheduler.queue import Queue
from llmq.scheduler.records import ResultRecord
from llmq.scheduler.state import JobState, derive_state
from llmq.scheduler.why_reader import read_before, read_lane, read_queue_view
from llmq.scheduler.why_view import LineView

#: Calls of one search; entries and bytes that the server looks at in each.
MOST_CALLS = 20
_ENTRIES = 500
_BYTES = 4 * 2**20

#: A number of that many digits is no line.
_MOST_DIGITS = 12

#: The first entry after a place whose field has a value, without what may be large; else the place that was reached.
_SEARCH = """
local after, wanted = ARGV[1], ARGV[3]
local found, bytes = 0, 0
while found < tonumber(ARGV[4]) and bytes < tonumber(ARGV[5]) do
  local entries = redis.call('XRANGE', KEYS[1], after, '+', 'COUNT', 4)
  for _, entry in ipairs(entries) do
    after = '(' .. entry[1]
    local small, match = {entry[1]}, false
    for i = 1, #entry[2], 2 do
      local field, value = entry[2][i], entry[2][i + 1]
      bytes = bytes + #value
      if field ~= 'd' and field ~= 'b' then small[#small + 1] = field small[#small + 1] = value end
      if field == ARGV[2] and value == wanted then match = true end
    end
    if match then return {'found', small} end
  end
  found = found + #entries
  if #entries < 4 then return {'end'} end
end
return {'more', after}
"""

#: The custom_id of one entry: its job stays on the server.
_KEY_OF = """
local entry = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1]
return entry and entry[2][2]
"""


@dataclass(frozen=True, slots=True)
class _Entry:
    """An entry of a stream, without what may be large in it."""

    id: str
    fields: dict[bytes, bytes]


async def read_why_line(queue: Queue, batch_id: str, name: str) -> LineView:
    """Return the snapshot of a line, named by its number or its custom_id. Raises NotFoundError."""
    (batch,) = await read_batches(queue.redis, queue.keys, [batch_id])
    if batch is None:
        raise NotFoundError(
            f"there is no batch {batch_id!r} in queue {queue.name!r}: it was never submitted there, or is kept no "
            "longer; see: llmq batch ls"
        )
    number = _number(name)
    if number is None:
        return await _by_custom_id(queue, batch, name)
    entry = await _entry_of(queue, batch.lane, f"{number}-0")
    return await _waiting_or_ended(queue, batch, number, entry)


async def _by_custom_id(queue: Queue, batch: BatchRecord, custom_id: str) -> LineView:
    keys = queue.keys
    if entry := await _search(queue, keys.lane(batch.lane), "k", custom_id):
        return await _waiting_or_ended(queue, batch, int(entry.id.partition("-")[0]), entry)
    if result := await _search(queue, keys.results(batch.id), "k", custom_id):
        number = int(result.fields.get(b"n", b"0"))
        return await _ended(queue, batch, number, result)
    raise NotFoundError(
        f"no line with the custom_id {custom_id!r} was found among those of batch {batch.id} that were looked at; "
        f"name it by its number in the file: llmq why {batch.id} NUMBER"
    )


async def _waiting_or_ended(queue: Queue, batch: BatchRecord, number: int, entry: _Entry | None) -> LineView:
    if entry is None:
        there = number < batch.next_line
        result = await _search(queue, queue.keys.results(batch.id), "n", str(number)) if there else None
        return await _ended(queue, batch, number, result)
    stream, back = queue.keys.of_lane(batch.lane)
    pipe = queue.redis.pipeline(transaction=False)
    pipe.xpending_range(stream, "workers", entry.id, entry.id, 1)
    pipe.zscore(back, entry.id)
    pipe.hget(queue.keys.tries, f"{batch.lane}|{entry.id}")
    pending, due_ms, past = await pipe.execute()
    view = await read_queue_view(queue)
    state = derive_state(ended_as="", stored=True, pending=bool(pending), due_ms=due_ms, now_ms=round(view.now * 1000))
    attempts, crashes, preemptions = (int(part) for part in past.split(b" ")[1:4]) if past else (0, 0, 0)
    waits = state is JobState.WAITING
    before, more = await read_before(queue, batch.lane, entry.id) if waits else (0, False)
    return LineView(
        queue=view,
        lane=await read_lane(queue, batch.lane, view.now),
        batch=batch,
        number=number,
        key=entry.fields.get(b"k", b"").decode(errors="replace"),
        state=state,
        consumer=pending[0]["consumer"].decode() if pending else None,
        due_at=due_ms / 1000 if due_ms is not None and state is JobState.DELAYED else None,
        attempts=attempts,
        crashes=crashes,
        preemptions=preemptions,
        before=before,
        more=more,
    )


async def _ended(queue: Queue, batch: BatchRecord, number: int, entry: _Entry | None) -> LineView:
    view = await read_queue_view(queue)
    lane = await read_lane(queue, batch.lane, view.now)
    if entry is None:
        return LineView(view, lane, batch, number)
    owner = line_owner(batch.id, number)
    fields = dict(entry.fields)
    message = queue.cipher.decrypt_text(fields.get(b"m", b"").decode(errors="replace"), error_of(owner))
    result = ResultRecord.from_fields(fields | {b"m": message.encode()})
    state = derive_state(ended_as=result.state, stored=False, pending=False, due_ms=None, now_ms=0)
    return LineView(view, lane, batch, number, key=result.key, state=state, result=result)


async def _entry_of(queue: Queue, lane: str, entry: str) -> _Entry | None:
    """Return an entry of a lane without its job."""
    key = await cast(Any, queue.redis).eval(_KEY_OF, 1, queue.keys.lane(lane), entry)
    return None if key is None else _Entry(entry, {b"k": key})


async def _search(queue: Queue, stream: str, field: str, wanted: str) -> _Entry | None:
    """Return the first entry whose field has this value; None where there is none among those looked at."""
    redis, after = cast(Any, queue.redis), "-"
    for _ in range(MOST_CALLS):
        word, *rest = await redis.eval(_SEARCH, 1, stream, after, field, wanted, _ENTRIES, _BYTES)
        if word != b"more":
            if not rest:
                return None
            entry, *flat = rest[0]
            return _Entry(entry.decode(), dict(zip(flat[::2], flat[1::2], strict=True)))
        after = rest[0]
    return None


def _number(name: str) -> int | None:
    digits = name.replace(",", "")
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= _MOST_DIGITS else None
