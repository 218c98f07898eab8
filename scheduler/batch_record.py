"""The batch record: what is known of one batch, read from its hash in Redis.

The scripts write the hash (`b:<batch>`); here it becomes a value. A hash that the scripts cannot have written is
refused rather than guessed at. What a person sees of it is `to_json`, with OpenAI's names. Nothing here talks to Redis.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from llmq.scheduler.errors import LLMQError
from llmq.scheduler.lease import lane_of_batch

#: Fields of a record that belong to whoever opened the batch (endpoint, metadata, ...) begin with this.
EXTRA = "x:"

#: A field for each collector: how far it has written and synced.
COLLECTOR = "collector:"

#: Why a batch does not go on though it waits: nobody takes its results away.
RESULTS_NOT_COLLECTED = "results not collected"

#: More digits than any number of a record has.
_MOST_DIGITS = 18

#: Crockford's base 32: sorts as its numbers do, and has no letters that are mistaken for one another.
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"

#: 26 characters: 11 of the time (55 bits of microseconds), 15 at random (75 bits: no two are ever the same).
_TIME_CHARACTERS, _RANDOM_CHARACTERS = 11, 15


def new_batch_id(now: float | None = None) -> str:
    """Make an id: `batch_` and 26 characters that sort by the time at which they were made (`now`, Unix seconds)."""
    return "batch_" + sortable_name(time.time() if now is None else now)


def sortable_name(now: float, chance: int | None = None) -> str:
    """Return 26 characters that sort by `now` (Unix seconds); `chance` stands in for their random bits."""
    bits = 5 * _RANDOM_CHARACTERS
    number = int(now * 1e6) << bits | (secrets.randbits(bits) if chance is None else chance % (1 << bits))
    characters = _TIME_CHARACTERS + _RANDOM_CHARACTERS
    return "".join(_ALPHABET[number >> 5 * place & 31] for place in reversed(range(characters)))


class BatchStatus(StrEnum):
    """Where a batch stands.

    in_progress -> completed
    in_progress -> cancelling -> cancelled
    in_progress -> expiring   -> expired
    """

    IN_PROGRESS = "in_progress"
    CANCELLING = "cancelling"
    EXPIRING = "expiring"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"

    @property
    def ended(self) -> bool:
        """Whether every line has its result, and nothing changes any more."""
        return self in (BatchStatus.COMPLETED, BatchStatus.CANCELLED, BatchStatus.EXPIRED)


#: OpenAI has no word for a batch that is being ended because its window is over; this is the nearest.
_OPENAI_NAMES = {BatchStatus.EXPIRING: "finalizing"}


@dataclass(frozen=True, slots=True)
class Standing:
    """What is seen of a batch outside of its record: lines in the lane, those that run, whether the lane sleeps."""

    in_lane: int = 0
    running: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One batch at one moment.

    `lines` counts what was queued so far and `next_line` is the number of the line that it takes next; `total` is
    known once it is `sealed`. Times are Unix seconds. `collectors` says how far each has written its results;
    `trimmed` counts results that all of them have and that Redis holds no longer. `extra` is its opener's.
    """

    id: str
    tenant: str
    status: BatchStatus
    name: str
    digest: str
    created_at: float
    next_line: int
    lines: int
    completed: int
    failed: int
    sealed: bool
    total: int | None = None
    paused: bool = False
    expires_at: float | None = None
    cancelling_at: float | None = None
    ended_at: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    trimmed: int = 0
    retry_of: str = ""
    collectors: Mapping[str, str] | None = None
    extra: Mapping[str, str] | None = None
    waiting: int = 0
    running: int = 0
    reason: str = ""

    @property
    def lane(self) -> str:
        """The name of the batch's lane."""
        return lane_of_batch(self.id)

    @property
    def ended(self) -> bool:
        """Whether every line has its result."""
        return self.status.ended

    @property
    def done(self) -> int:
        """Lines that have their result, good or bad."""
        return self.completed + self.failed

    @property
    def progress(self) -> float:
        """The part of the lines known so far that have their result, from 0 to 1."""
        known = self.lines if self.total is None else self.total
        return self.done / known if known else float(self.ended)

    @property
    def seconds(self) -> float:
        """How long the batch took; for one that has not ended, how long it has been there."""
        return max(0.0, (time.time() if self.ended_at is None else self.ended_at) - self.created_at)

    def overdue(self, now: float) -> bool:
        """Whether its window is over, though nobody has ended it yet. Only a hint: Redis' own clock decides."""
        return not self.ended and self.expires_at is not None and self.expires_at <= now

    @classmethod
    def from_hash(cls, batch_id: str, fields: Mapping[bytes, bytes], standing: Standing = Standing()) -> BatchRecord:
        """Read the hash. Raises LLMQError where it is not one that the scripts write."""
        hash_ = _Hash(batch_id, fields)
        return cls(
            id=batch_id,
            tenant=hash_.text("tenant"),
            status=hash_.status(),
            name=hash_.text("name", ""),
            digest=hash_.text("digest", ""),
            created_at=hash_.number("created_at") / 1000,
            next_line=hash_.number("next"),
            lines=hash_.number("lines"),
            completed=hash_.number("completed"),
            failed=hash_.number("failed"),
            sealed=hash_.number("sealed") == 1,
            total=hash_.number("total") if b"total" in fields else None,
            paused=b"paused_at" in fields,
            expires_at=hash_.time("expires_at"),
            cancelling_at=hash_.time("cancelling_at"),
            ended_at=hash_.time("ended_at"),
            prompt_tokens=hash_.number("prompt_tokens", 0),
            completion_tokens=hash_.number("completion_tokens", 0),
            trimmed=hash_.number("trimmed", 0),
            retry_of=hash_.text("retry_of", ""),
            collectors=hash_.beginning_with(COLLECTOR),
            extra=hash_.beginning_with(EXTRA),
            waiting=max(0, standing.in_lane - standing.running),
            running=standing.running,
            reason=standing.reason,
        )

    def to_json(self) -> dict[str, object]:
        """Return what `--json` shows: OpenAI's names and, times being whole Unix seconds, OpenAI's types."""
        ended_as = {self.status: self.ended_at} if self.ended else {}
        return {
            "id": self.id,
            "status": _OPENAI_NAMES.get(self.status, self.status.value),
            "name": self.name,
            "tenant": self.tenant,
            "request_counts": {
                "total": self.lines if self.total is None else self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "progress": round(self.progress, 4),
            "lines": self.lines,
            "waiting": self.waiting,
            "running": self.running,
            "sealed": self.sealed,
            "paused": self.paused,
            "reason": self.reason or None,
            "tokens": {"prompt": self.prompt_tokens, "completion": self.completion_tokens},
            "created_at": int(self.created_at),
            "expires_at": _whole(self.expires_at),
            "cancelling_at": _whole(self.cancelling_at),
            "completed_at": _whole(ended_as.get(BatchStatus.COMPLETED)),
            "cancelled_at": _whole(ended_as.get(BatchStatus.CANCELLED)),
            "expired_at": _whole(ended_as.get(BatchStatus.EXPIRED)),
            "window": None if self.expires_at is None else round(self.expires_at - self.created_at, 3),
            "digest": self.digest,
            "retry_of": self.retry_of or None,
            "collectors": dict(self.collectors or {}),
            "trimmed": self.trimmed,
        }


def _whole(moment: float | None) -> int | None:
    return None if moment is None else int(moment)


class _Hash:
    """Typed access to the fields of a record, with the batch's name in every complaint."""

    def __init__(self, batch_id: str, fields: Mapping[bytes, bytes]) -> None:
        self._batch_id = batch_id
        self._fields = fields

    def text(self, name: str, default: str | None = None) -> str:
        value = self._fields.get(name.encode())
        if value is None:
            if default is None:
                raise self._broken(name, "is missing")
            return default
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise self._broken(name, "is not UTF-8 text") from None

    def number(self, name: str, default: int | None = None) -> int:
        value = self._fields.get(name.encode())
        if value is None and default is not None:
            return default
        if value is None or not value.isdigit() or len(value) > _MOST_DIGITS:
            raise self._broken(name, "is missing" if value is None else f"is {value[:20]!r}, not a number")
        return int(value)

    def time(self, name: str) -> float | None:
        return self.number(name) / 1000 if name.encode() in self._fields else None

    def status(self) -> BatchStatus:
        value = self.text("status")
        try:
            return BatchStatus(value)
        except ValueError:
            raise self._broken("status", f"is {value!r}, which this llmq does not know") from None

    def beginning_with(self, prefix: str) -> dict[str, str]:
        start = prefix.encode()
        names = sorted(name for name in self._fields if name.startswith(start))
        return {
            name[len(start) :].decode(errors="replace"): self._fields[name].decode(errors="replace") for name in names
        }

    def _broken(self, name: str, fault: str) -> LLMQError:
        return LLMQError(
            f"batch {self._batch_id}: {name} {fault}, so its record is not one of this llmq; "
            "use the newest llmq that works on this queue, or delete the batch"
        )
