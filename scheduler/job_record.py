"""The job record: what is known of one single job, put together from its hash and from where its entry is.

Read by whoever asks for a job (`Queue.job`) and by whoever waits for one (`waiting.py`); written by the scripts
`submit_job`, `finish` and `cancel_job` alone. While a job waits the hash holds its lane, entry and client, and what
these do not tell; every byte of it is there once for each job that waits. Times are seconds since the epoch, by Redis'
clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmq.scheduler.cipher import PLAIN, Cipher, answer_of, error_of, job_owner
from llmq.scheduler.errors import LLMQError
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.lease import NO_USAGE, Usage, tenant_of_lane
from llmq.scheduler.state import JobState, derive_state
from llmq.scheduler.stored_number import finite, whole

#: Expiry of a job that may wait for ever, as scripts store it; no clock gets there.
NEVER_MS = 9e15


@dataclass(frozen=True, slots=True)
class JobRecord:
    """One single job.

    `attempts` counts attempts that went wrong, `crashes` deaths of a worker or engine with it in flight; both are
    known while the job lives, and afterwards only where its record holds them (None else). `consumer` is the worker
    that runs it, `due_at` when a delayed job may start. `status_code` and `body` are the engine's; `code` and
    `message` say why a job ended without an answer. `unreadable` says why its answer, which was stored encrypted,
    cannot be read here (`body` is then empty).
    """

    id: str
    cls: TrafficClass
    tenant: str
    lane: str
    entry: str
    client: str
    state: JobState
    submitted_at: float
    expires_at: float | None = None
    due_at: float | None = None
    ended_at: float | None = None
    attempts: int | None = None
    crashes: int | None = None
    preemptions: int | None = None
    consumer: str | None = None
    status_code: int | None = None
    request_id: str = ""
    body: bytes = b""
    code: str = ""
    message: str = ""
    usage: Usage = NO_USAGE
    unreadable: LLMQError | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what `job show --json` prints; the body of an answer is not in it."""
        error = {"code": self.code, "message": self.message} if self.code else None
        return {
            "id": self.id,
            "class": self.cls.value,
            "state": self.state.value,
            "tenant": self.tenant,
            "attempts": self.attempts,
            "crashes": self.crashes,
            "preemptions": self.preemptions,
            "worker": self.consumer,
            "submitted_at": self.submitted_at,
            "expires_at": self.expires_at,
            "due_at": self.due_at,
            "ended_at": self.ended_at,
            "status_code": self.status_code,
            "error": error,
            "usage": {"prompt_tokens": self.usage.prompt_tokens, "completion_tokens": self.usage.completion_tokens},
        }


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where the entry of a job that lives is: stored at all, in whose hands, due when, and what came before."""

    stored: bool
    consumer: str | None
    due_ms: float | None
    past: bytes | None
    now_ms: int


#: Of a job that has ended, or whose entry nobody has looked for.
NOWHERE = Whereabouts(False, None, None, None, 0)


def record_of(
    job_id: str, fields: Mapping[bytes, bytes], where: Whereabouts = NOWHERE, *, cipher: Cipher = PLAIN
) -> JobRecord:
    """Put a job's record together; `fields` is its hash, which must not be empty."""

    def text(name: bytes) -> str:
        return fields.get(name, b"").decode(errors="replace")

    entry, lane = fields.get(b"entry", b""), text(b"lane")
    cls, tenant = tenant_of_lane(lane)
    ended_ms = fields.get(b"ended_at")
    expires_ms = expires_at_ms(fields.get(b"expires_at"))
    state = derive_state(
        ended_as=text(b"state"),
        stored=where.stored,
        pending=where.consumer is not None,
        due_ms=where.due_ms,
        now_ms=where.now_ms,
    )
    body, unreadable = _body(job_id, fields, cipher)
    attempts, crashes, preemptions = _past(fields, where.past, ended=state.ended)
    return JobRecord(
        id=job_id,
        cls=cls,
        tenant=tenant,
        lane=lane,
        entry=entry.decode(errors="replace"),
        client=text(b"client"),
        state=state,
        submitted_at=submitted_at_ms(entry, fields.get(b"submitted_at")) / 1000,
        expires_at=None if expires_ms >= NEVER_MS else expires_ms / 1000,
        due_at=where.due_ms / 1000 if where.due_ms is not None and state is JobState.DELAYED else None,
        ended_at=finite(ended_ms, 0.0) / 1000 if ended_ms else None,
        attempts=attempts,
        crashes=crashes,
        preemptions=preemptions,
        consumer=where.consumer,
        status_code=whole(fields.get(b"status")) or None,
        request_id=text(b"request"),
        body=body,
        code=text(b"code"),
        message=cipher.decrypt_text(text(b"message"), error_of(job_owner(job_id))),
        usage=_usage(fields.get(b"usage", b"")),
        unreadable=unreadable,
    )


def submitted_at_ms(entry: bytes, noted: bytes | None) -> float:
    """Return when a job was submitted: as its record notes, or else as its entry's id says, which is a time."""
    return finite(noted or entry.partition(b"-")[0], 0.0)


def expires_at_ms(noted: bytes | None) -> float:
    """Return until when a job may wait for its start; a record notes it only where there is an end to that."""
    return finite(noted, NEVER_MS)


def _body(job_id: str, fields: Mapping[bytes, bytes], cipher: Cipher) -> tuple[bytes, LLMQError | None]:
    """Return a job's answer, and why it cannot be read where that is so: the rest of the record can."""
    try:
        return cipher.decrypt(fields.get(b"body", b""), answer_of(job_owner(job_id))), None
    except LLMQError as fault:
        return b"", fault


def _past(
    fields: Mapping[bytes, bytes], past: bytes | None, *, ended: bool
) -> tuple[int | None, int | None, int | None]:
    """Return attempts, crashes and preemptions: of a job that lives from `tries`, else as far as its record says."""
    if ended:
        found = [
            whole(fields[name]) if fields.get(name) else None for name in (b"attempts", b"crashes", b"preemptions")
        ]
        return found[0], found[1], found[2]
    if not past:
        return 0, 0, 0
    counts = [whole(part) for part in past.split(b" ", 4)[1:4]]
    attempts, crashes, preemptions = counts if len(counts) == 3 else (0, 0, 0)
    return attempts, crashes, preemptions


def _usage(value: bytes) -> Usage:
    prompt, _, completion = value.partition(b":")
    return Usage(whole(prompt), whole(completion)) if prompt.isdigit() and completion.isdigit() else NO_USAGE
