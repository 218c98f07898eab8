"""The queue: single jobs go in here, are looked at and cancelled here, and its live settings are changed here.

It stands between whoever has a job (client, gateway, command line) and the scripts. Batches are `batches.py`, waiting
for an answer is `waiting.py`, claiming is the worker's. Errors of redis-py pass through: the caller knows the URL, and
stands within `redis_errors`.
"""

from __future__ import annotations

import hashlib
import secrets
from enum import StrEnum
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from llmq.scheduler import scripts
from llmq.scheduler.bucket import plain_limit
from llmq.scheduler.calling import ScriptCalls
from llmq.scheduler.cipher import Cipher, job_owner, request_of
from llmq.scheduler.errors import LLMQError, NotFoundError, QueueFull, UsageError
from llmq.scheduler.job import Job, TrafficClass
from llmq.scheduler.job_record import JobRecord, Whereabouts, record_of
from llmq.scheduler.keyring import NO_KEYS, Keyring
from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.lease import ErrorCode, lane_of_tenant
from llmq.scheduler.limit import Limit
from llmq.scheduler.live import LiveValue, live_values, stored_value
from llmq.scheduler.settings import check_queue, check_tenant
from llmq.scheduler.stored_number import whole
from llmq.scheduler.units import Rate, format_size
from llmq.scheduler.windows import expand, parse_windows

#: The newest format of a queue's data that this version can work with.
FORMAT = 1

#: A job as it is stored may have this many bytes; a larger one would hold up Redis and everybody's memory (F-096).
MAX_BODY_BYTES = 16 * 2**20

#: How long a command to a worker waits to be read: a worker reads at once, one that is gone never will.
CONTROL_TTL_MS = 60_000

#: Field of the config hash: the id of the key that encrypts (a hash, which tells nothing of the key).
KEY_ID = "key_id"

#: Redis' time by the same key as everything else: in a cluster TIME alone would go to any node.
_TIME = "return redis.call('TIME')"


class CancelResult(StrEnum):
    """What cancelling found: ended before its start, its worker was told, or it had ended already (F-124)."""

    CANCELLED = "cancelled"
    SIGNALLED = "signalled"
    ENDED = "ended"


class Queue:
    """One queue. `max_body_bytes` bounds a job as it is encoded; `keyring` encrypts what holds prompts or answers.

    `calls` is how a client that submits much submits, and how it looks at its jobs.
    """

    def __init__(
        self,
        redis: Redis,
        name: str = "default",
        *,
        max_body_bytes: int = MAX_BODY_BYTES,
        calls: ScriptCalls | None = None,
        keyring: Keyring = NO_KEYS,
    ) -> None:
        self.redis = redis
        self.calls = calls
        self.name = check_queue(name)
        self.keys = QueueKeys(name)
        self.cipher = Cipher(keyring, name)
        self._max_body_bytes = max_body_bytes
        self._agreed = False

    async def ensure_format(self) -> None:
        """Raise LLMQError where a newer llmq has written to the queue what this one cannot read."""
        found = await cast(Any, self.redis).hget(self.keys.config, "format")
        if whole(found) > FORMAT:
            raise LLMQError(
                f"queue {self.name!r} holds data of format {whole(found)}, and this llmq reads up to {FORMAT}; "
                "update it: pip install -U llmq-streams"
            )

    async def agree_on_key(self) -> None:
        """Before something is put in: say with which key the queue is encrypted, or find out. Asked once.

        The first who has a key says so, with the key's id; so does who has that key and a newer one (rotation). Who
        lacks it puts nothing in that others could read only by accident, or not at all. Raises KeyMissing.
        """
        if self._agreed:
            return
        keyring, redis = self.cipher.keyring, cast(Any, self.redis)
        if keyring.first is not None:
            await redis.hsetnx(self.keys.config, KEY_ID, keyring.first)
        found = await redis.hget(self.keys.config, KEY_ID)
        if found is not None and (known := found.decode(errors="replace")) != keyring.first:
            if not keyring.holds(known):
                raise keyring.missing(known, self.name)
            await redis.hset(self.keys.config, KEY_ID, keyring.first)
        self._agreed = True

    async def now_ms(self) -> int:
        """Return the time that the queue goes by: Redis', or a simulation's."""
        pipe = self.redis.pipeline(transaction=False)
        pipe.hget(self.keys.config, "virtual")
        pipe.eval_ro(_TIME, 1, self.keys.config)
        virtual, (seconds, micros) = await pipe.execute()
        return whole(virtual) or int(seconds) * 1000 + int(micros) // 1000

    # --- single jobs ------------------------------------------------------------------------------------------------

    async def submit(
        self,
        job: Job,
        *,
        cls: TrafficClass = TrafficClass.INTERACTIVE,
        tenant: str = "default",
        ttl: float | None = None,
        key: str | None = None,
        job_id: str | None = None,
        reply_to: str = "",
    ) -> str:
        """Queue one job and return its id; once it has returned, the job is not lost while Redis keeps its data.

        `ttl` is the longest time in seconds that it may wait for its start (None: the class's setting, 0: for ever).
        The same `key` of the same tenant is the same job, for as long as its record is kept; `job_id` is one that the
        caller has made with `new_job_id`; `reply_to` is the client whose inbox is told of deltas and the end. Raises
        QueueFull, EncodingError, and UsageError for a job that is too large.

        A reply that is late or lost is answered by sending the same id once more: the script takes an id only once,
        so that this cannot make two jobs (F-084).
        """
        job_id = job_id or new_job_id(check_tenant(tenant), key)
        call = self.submission(job, cls=cls, tenant=tenant, ttl=ttl, job_id=job_id, reply_to=reply_to)
        self.accept(await self.send(call), cls)
        return job_id

    async def send(self, call: scripts.Call[scripts.Verdict]) -> scripts.Verdict:
        """Make the call of a submission, and once more where its reply did not come."""
        await self.agree_on_key()
        try:
            return await (self.calls.run(call) if self.calls else scripts.run(self.redis, call))
        except (RedisConnectionError, RedisTimeoutError):
            return await scripts.run(self.redis, call)

    def submission(
        self,
        job: Job,
        *,
        cls: TrafficClass,
        tenant: str,
        ttl: float | None,
        job_id: str,
        reply_to: str,
        digest: str = "",
    ) -> scripts.Call[scripts.Verdict]:
        """Return the call that submits a job; it is made, and may be made once more, by whoever has a connection.

        With a `digest` of what is asked, an id that was taken with another one is answered by `differs`.
        """
        data = job.encode()
        if len(data) > self._max_body_bytes:
            raise UsageError(
                f"expected a job of at most {format_size(self._max_body_bytes)}, got {format_size(len(data))}; "
                "pass large inputs by reference, or raise LLMQ_MAX_BODY_BYTES"
            )
        return scripts.submit_job(
            self.keys,
            job_id,
            lane=lane_of_tenant(cls, tenant),
            cls=cls,
            tenant=tenant,
            data=self.cipher.encrypt(data, request_of(job_owner(job_id))),
            cost=job.cost(),
            ttl_ms=None if ttl is None else _ttl_ms(ttl),
            client=reply_to,
            digest=digest,
        )

    def accept(self, verdict: scripts.Verdict, cls: TrafficClass) -> None:
        """Raise QueueFull where that is what Redis says to a submission."""
        if verdict.word == "full":
            raise QueueFull(cls.value, verdict.number)

    async def job(self, job_id: str) -> JobRecord:
        """Return what is known of a single job. Raises NotFoundError."""
        fields: dict[bytes, bytes] = await cast(Any, self.redis).hgetall(self.keys.job(job_id))
        if not fields.get(b"entry"):
            raise NotFoundError(
                f"there is no job {job_id!r} in queue {self.name!r}: it was never submitted there, "
                "or it ended and its result is not kept any more; if it is in another queue: --queue NAME"
            )
        if fields.get(b"state"):
            return record_of(job_id, fields, cipher=self.cipher)
        where = await self._look_for(fields[b"lane"].decode(), fields[b"entry"].decode())
        record = record_of(job_id, fields, where, cipher=self.cipher)
        if record.state.ended:
            # Its entry is gone, so it has ended between the two looks; if not, it is lost indeed.
            fields = await cast(Any, self.redis).hgetall(self.keys.job(job_id))
            record = record_of(job_id, fields, where, cipher=self.cipher) if fields.get(b"entry") else record
        return record

    async def cancel_job(self, job_id: str) -> CancelResult:
        """Cancel a single job: it never starts, or its worker aborts it within a second. Raises NotFoundError."""
        verdict, lane, entry = await self._end(
            job_id, state="cancelled", code=ErrorCode.CANCELLED, message="the job was cancelled"
        )
        if verdict.word == "unknown":
            raise NotFoundError(
                f"there is no job {job_id!r} in queue {self.name!r}; if it is in another queue: --queue NAME"
            )
        if verdict.word == "signalled":
            await self.tell_worker(verdict.value, f"cancel {lane} {entry}")
        return CancelResult(verdict.word)

    async def delete_job(self, job_id: str) -> None:
        """Remove the record of a job that has ended, with its answer; a key that it was submitted with is free again.

        Raises NotFoundError, and UsageError while the job lives.
        """
        verdict = await scripts.run(self.redis, scripts.delete_job(self.keys, job_id))
        if verdict.word == "unknown":
            raise NotFoundError(f"there is no job {job_id!r} in queue {self.name!r}")
        if verdict.word == "open":
            raise UsageError(f"job {job_id} has not ended; cancel it first: llmq job cancel {job_id}")

    async def end_overdue(self, job_id: str) -> bool:
        """End a job that has waited longer than it may; return whether it has ended, now or before.

        Workers do this when they claim. Where none lives, or all are full, whoever waits for the job does.
        """
        verdict, _, _ = await self._end(
            job_id, state="expired", code=ErrorCode.TIMEOUT, message="no worker was free before its time was over"
        )
        return verdict.word in ("cancelled", "ended")

    async def end_lost(self, job_id: str) -> bool:
        """End a job whose entry somebody deleted, so that nobody can run it; return whether it has ended (F-068)."""
        try:
            if not (await self.job(job_id)).state.ended:
                return False
        except NotFoundError:
            return True
        verdict, _, _ = await self._end(
            job_id, state="lost", code=ErrorCode.LOST, message="the job was deleted from Redis before it ran"
        )
        return verdict.word != "running"

    async def tell_worker(self, worker_id: str, command: str) -> None:
        """Send a command (`cancel LANE ENTRY`, `cancel-lane LANE`, `drain`) to a worker."""
        control = self.keys.control(worker_id)
        pipe = self.redis.pipeline(transaction=True)
        pipe.rpush(control, command)
        pipe.pexpire(control, CONTROL_TTL_MS)
        await pipe.execute()

    async def _look_for(self, lane: str, entry: str) -> Whereabouts:
        stream, back = self.keys.of_lane(lane)
        pipe = self.redis.pipeline(transaction=False)
        pipe.xpending_range(stream, "workers", entry, entry, 1)
        pipe.zscore(back, entry)
        pipe.hget(self.keys.tries, f"{lane}|{entry}")
        pipe.xrange(stream, entry, entry)
        # A stream that is gone has no group to ask for what is pending.
        pending, due_ms, past, stored = await pipe.execute(raise_on_error=False)
        for reply in (due_ms, past, stored):
            if isinstance(reply, Exception):
                raise reply
        holder = pending[0]["consumer"].decode() if isinstance(pending, list) and pending else None
        return Whereabouts(bool(stored), holder, due_ms, past, await self.now_ms())

    async def _end(self, job_id: str, *, state: str, code: ErrorCode, message: str) -> tuple[scripts.Verdict, str, str]:
        known = await cast(Any, self.redis).hmget(self.keys.job(job_id), "lane", "entry", "client")
        if known[0] is None:
            return scripts.Verdict("unknown"), "", ""
        lane, entry, client = (value.decode() for value in known)
        call = scripts.cancel_job(self.keys, job_id, lane=lane, client=client, state=state, code=code, message=message)
        return await scripts.run(self.redis, call), lane, entry

    # --- live settings ----------------------------------------------------------------------------------------------

    async def settings(self) -> list[LiveValue]:
        """Return all live settings with their values, and where each is from."""
        return live_values(await self._config())

    async def set(self, name: str, value: str) -> None:
        """Change a live setting; `default` takes it back. The very next claim goes by it. Raises SettingsError."""
        changes = {name: stored_value(name, value)}
        if name == "windows":
            changes["plan"] = expand(parse_windows(changes[name]), await self.now_ms()) if changes[name] else ""
        await scripts.run(self.redis, scripts.configure(self.keys, changes))

    async def refresh_plan(self) -> bool:
        """Write the plan of the windows anew where the week ahead has moved on; return whether it was written.

        A sweeper calls this about once a minute: most times it reads two fields and is done.
        """
        written = False
        while True:
            windows, plan = await cast(Any, self.redis).hmget(self.keys.config, "windows", "plan")
            try:
                wanted = expand(parse_windows(windows.decode()), await self.now_ms()) if windows else ""
            except (UsageError, UnicodeDecodeError):
                return written  # of a newer llmq, or by hand: who can read it renews the plan
            if wanted.encode() == (plan or b""):
                return written
            # Somebody may set other windows at this moment; the next turn would see it and write theirs.
            await scripts.run(self.redis, scripts.configure(self.keys, {"plan": wanted}))
            written = True

    async def rate(self) -> Limit | None:
        """Return how fast batch may start by `llmq rate`; None is no limit. Windows may say otherwise for a time."""
        return plain_limit(await self._config())

    async def set_rate(self, rate: Rate | None, burst: float | None = None) -> None:
        """Limit how fast batch may start; None is no limit. A burst of None is one second's worth, at least 1."""
        if rate is None:
            if burst is not None:
                raise UsageError("a burst goes with a rate: there is nothing to save up where there is no limit")
            fields = {"rate": "", "burst": "", "unit": ""}
        else:
            fields = dict(Limit.of(rate, burst).fields())
        await scripts.run(self.redis, scripts.configure(self.keys, fields))

    async def pause(self, cls: TrafficClass) -> None:
        """Let no job of a class start; what runs goes on, and new jobs are still taken."""
        await scripts.run(self.redis, scripts.configure(self.keys, {f"paused_{cls.letter}": "1"}))

    async def resume(self, cls: TrafficClass) -> None:
        """Let the jobs of a class start again."""
        await scripts.run(self.redis, scripts.configure(self.keys, {f"paused_{cls.letter}": ""}))

    async def _config(self) -> dict[bytes, bytes]:
        config: dict[bytes, bytes] = await cast(Any, self.redis).hgetall(self.keys.config)
        return config


def new_job_id(tenant: str, key: str | None = None) -> str:
    """Return the id of a new job; with a key it is always the same one for this tenant."""
    if key is None:
        return secrets.token_hex(12)  # never two alike among a million million; short, since Redis holds it twice a job
    if not 1 <= len(key) <= 1000:
        raise UsageError(f"expected a key of 1 to 1000 characters, got {len(key)}")
    # Neither a tenant nor the length of a key can make two pairs read as one: a tenant holds no "|".
    return hashlib.sha256(f"{tenant}|{key}".encode(errors="surrogatepass")).hexdigest()[:32]


def _ttl_ms(ttl: float) -> int:
    if not 0 <= ttl <= 365 * 24 * 3600:  # also refuses NaN
        raise UsageError(f"expected a time in the queue from 0 (for ever) to a year, in seconds, got {ttl!r}")
    # 0 is for ever: a time that rounds to it is the shortest there is.
    return max(1, round(ttl * 1000)) if ttl else 0
