"""The gateway's jobs: how a call becomes a job of the queue, and how its end is waited for.

Everything that can hang on Redis is bounded here, so that a client is told within a second that the queue is away. A
call with an idempotency key is the same job for all who send it: who comes second joins it, and who leaves does not
take it from the others.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmq.gateway.call import KEY_HEADER, Call
from llmq.gateway.canceller import Canceller
from llmq.gateway.contact import Contact
from llmq.gateway.errors import ApiError
from llmq.gateway.fleet import Fleet
from llmq.gateway.translation import queue_away
from llmq.scheduler.connection import redis_errors
from llmq.scheduler.errors import NotFoundError, QueueFull, RedisFull, RedisUnavailable, UsageError
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.queue import new_job_id
from llmq.scheduler.state import JobState
from llmq.scheduler.waiting import Listener
from llmq.scheduler.watch import Watch

#: Ends that are no answer: a key that led to one is free again, or a retry would only be told of it.
_NO_ANSWER = frozenset({JobState.EXPIRED, JobState.INTERRUPTED, JobState.CANCELLED, JobState.LOST})


@dataclass(frozen=True, slots=True)
class OpenJob:
    """One job that a client waits for. `joined`: another request has made it, and its deltas go there."""

    id: str
    watch: Watch
    keyed: bool = False
    joined: bool = False


class Jobs:
    """Submits the calls of one gateway, and takes them back. `client_id` is whose inbox the listener hears."""

    def __init__(
        self,
        listener: Listener,
        client_id: str,
        url: str,
        *,
        contact: Contact,
        canceller: Canceller,
        fleet: Fleet,
        flex_timeout: float,
    ) -> None:
        self.listener = listener
        self._queue = listener.queue
        self._client_id = client_id
        self._url = url
        self._contact = contact
        self._canceller = canceller
        self._fleet = fleet
        self._flex_timeout = flex_timeout

    async def open(self, call: Call, tenant: str) -> OpenJob:
        """Submit a call, or join the job that its key names. Raises ApiError (409, 429, 503), UsageError."""
        job_id = _job_id(call, tenant)
        try:
            with redis_errors(self._url):
                return await self._contact.within(self._open(call, tenant, job_id), len(call.job.raw))
        except QueueFull as full:
            wait = await self._fleet.retry_after(call.cls)
            message = f"the queue holds its {full.cap:,} {full.cls} jobs; try again in {wait:.0f} s"
            raise ApiError(429, message, code="queue_full", retry_after=wait) from None
        except RedisFull:
            raise  # it is there, and has refused the job
        except (TimeoutError, RedisUnavailable):
            if call.key is None:
                self._canceller.cancel(job_id, unsure=True)
            raise queue_away() from None

    def drop(self, job: OpenJob) -> None:
        """Take a job back, because its client has left. One with a key stays: its client may ask for it again."""
        if not job.keyed and not job.watch.over:
            self._canceller.cancel(job.id)

    async def _open(self, call: Call, tenant: str, job_id: str) -> OpenJob:
        # It listens before the job is sent: no delta can come too early.
        keyed = call.key is not None
        watch = self.listener.watch(job_id, foreign=keyed, ttl=self._ttl(call))
        word = await self._submit(call, tenant, job_id)
        if word == "exists" and await self._free_key(job_id):
            watch = self.listener.watch(job_id, foreign=True, ttl=self._ttl(call), anew=True)
            word = await self._submit(call, tenant, job_id)
        if word == "differs":
            message = "Idempotency-Key: it was used for a request with another body; use a new key for a new request"
            raise ApiError(409, message, code="idempotency_key_reused", headers={"x-should-retry": "false"})
        return OpenJob(job_id, watch, keyed, joined=keyed and word == "exists")

    async def _submit(self, call: Call, tenant: str, job_id: str) -> str:
        submission = self._queue.submission(
            call.job,
            cls=call.cls,
            tenant=tenant,
            ttl=self._ttl(call),
            job_id=job_id,
            reply_to=self._client_id,
            digest=call.digest,
        )
        verdict = await self._queue.send(submission)
        self._queue.accept(verdict, call.cls)
        return verdict.word

    async def _free_key(self, job_id: str) -> bool:
        """Forget a keyed job that has ended without an answer; return whether there was one, a moment ago at least."""
        try:
            if (await self._queue.job(job_id)).state not in _NO_ANSWER:
                return False
            await self._queue.delete_job(job_id)
        except (NotFoundError, UsageError):
            pass  # it went meanwhile, or another request has begun it anew
        return True

    def _ttl(self, call: Call) -> float | None:
        return self._flex_timeout if call.cls is TrafficClass.BATCH else None


def _job_id(call: Call, tenant: str) -> str:
    """Return the id of a call's job; keys of HTTP are apart from those of the Python clients."""
    return new_job_id(tenant, None if call.key is None else f"{KEY_HEADER}: {call.key}")
