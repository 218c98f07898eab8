"""Admission by API key: who calls is who holds the key, and all gateways together keep to its limits.

The limits of a key are kept in Redis, in one script a call (`enter.lua`), and only for keys that have any. A call's
place is a lease that this process renews while the call goes on: the places of a gateway that was killed are free
again after half a minute. Each key has limits of its own; keys of one tenant share the tenant's part of the queue, and
no limit.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping

from llmq.gateway.admission import Caller, Pass, free_pass
from llmq.gateway.contact import Contact
from llmq.gateway.errors import ApiError
from llmq.gateway.known_keys import KnownKeys
from llmq.gateway.rate_limits import headers_of, refusal
from llmq.gateway.translation import queue_away
from llmq.scheduler import scripts
from llmq.scheduler.api_key import KeyState, id_in
from llmq.scheduler.api_keys import ApiKeys
from llmq.scheduler.errors import RedisUnavailable
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.key_scripts import enter, leave, stay
from llmq.scheduler.outage import REDIS_ERRORS
from llmq.scheduler.queue import Queue

#: A place that nobody has renewed for this long belongs to a gateway that has died.
LEASE_S = 30.0
RENEW_S = 10.0

#: Places renewed in one script: some milliseconds of Redis' time.
RENEW_AT_ONCE = 1000

_log = logging.getLogger(__name__)


class KeyedAdmission:
    """Lets callers in by their API keys.

    While no key has ever been made, `open_without_keys` lets anybody in, as `tenant`. While Redis, which knows whether
    one has, was never seen, nobody is let in, unless `open_unseen` says so.
    """

    def __init__(
        self,
        queue: Queue,
        contact: Contact,
        *,
        tenant: str = "default",
        open_without_keys: bool = True,
        open_unseen: bool = False,
    ) -> None:
        self._queue = queue
        self._contact = contact
        self._known = KnownKeys(ApiKeys(queue), contact)
        self._anybody = Caller(tenant) if open_without_keys else None
        self._open_unseen = open_unseen
        self._inside: dict[str, _KeyedPass] = {}

    async def any_keys(self) -> bool:
        """Whether a key has ever been made for this queue: from then on callers need one. Raises RedisUnavailable."""
        return await self._known.required()

    @property
    def open_to_all(self) -> bool:
        """Whether anybody is let in now, as far as is known: no key has ever been made."""
        return self._anybody is not None and not self._known.seen

    async def identify(self, authorization: str | None) -> Caller:
        """Return who calls, by the Authorization header. Raises ApiError (401, 503)."""
        secret = _bearer(authorization)
        key_id = id_in(secret) if secret is not None else None
        try:
            if await self._known.required(key_id):
                return await self._holder(secret, key_id)
        except RedisUnavailable as error:
            if not (self._open_unseen and self._known.unseen):
                raise queue_away() from error
        if self._anybody is None:
            raise _unauthorized("this gateway needs API keys and none has been made: llmq keys create --tenant T")
        return self._anybody

    async def enter(self, caller: Caller, cls: TrafficClass, tokens: int) -> Pass:
        """Let one call of estimated `tokens` LLM tokens in. Raises ApiError (403: class not allowed, 429, 503)."""
        if cls not in caller.classes:
            allowed = ", ".join(sorted(caller.classes))
            raise ApiError(
                403, f"this API key may make {allowed} requests, and no {cls} ones", code="class_not_allowed"
            )
        if not caller.limits:
            return free_pass()
        call_id = uuid.uuid4().hex
        call = enter(
            self._queue.keys,
            caller.key_id,
            call_id=call_id,
            limits=caller.limits,
            cost=tokens,
            lease_ms=round(LEASE_S * 1000),
        )
        try:
            entry = await self._contact.within(scripts.run(self._queue.redis, call))
        except TimeoutError:
            raise queue_away() from None
        if entry.refused:
            raise refusal(caller.limits, entry, tokens)
        made = _KeyedPass(self, caller, call_id, tokens, headers_of(caller.limits, entry))
        self._inside[call_id] = made
        return made

    async def run(self) -> None:
        """Renew the places of the calls that go on, until cancelled; a gateway runs this beside its calls."""
        while True:
            await asyncio.sleep(RENEW_S)
            await self.renew()

    async def renew(self) -> None:
        """Renew the places of all calls that go on."""
        by_key: defaultdict[str, list[str]] = defaultdict(list)
        for call_id, made in self._inside.items():
            if made.caller.limits.concurrency is not None:
                by_key[made.caller.key_id].append(call_id)
        for key_id, call_ids in by_key.items():
            for first in range(0, len(call_ids), RENEW_AT_ONCE):
                some = call_ids[first : first + RENEW_AT_ONCE]
                await self._run(stay(self._queue.keys, key_id, call_ids=some, lease_ms=round(LEASE_S * 1000)))
                gone = [call_id for call_id in some if call_id not in self._inside]
                if gone:  # they left meanwhile, and may have left before they were renewed
                    await self._queue.redis.zrem(self._queue.keys.passes(key_id), *gone)

    async def _left(self, made: _KeyedPass, used_tokens: int | None) -> None:
        if self._inside.pop(made.call_id, None) is None:
            return
        more = 0 if used_tokens is None else used_tokens - made.tokens
        caller = made.caller
        await self._run(leave(self._queue.keys, caller.key_id, call_id=made.call_id, limits=caller.limits, more=more))

    async def _run(self, call: scripts.Call[bool]) -> None:
        """Make a call that nobody waits for; while Redis is away, leases and refills set right what it would have."""
        try:
            await scripts.run(self._queue.redis, call)
        except REDIS_ERRORS as error:
            _log.warning("a limit was not written (%s): %s", call.script.name, type(error).__name__)

    async def _holder(self, secret: str | None, key_id: str | None) -> Caller:
        if secret is None:
            raise _unauthorized("You didn't provide an API key. Send it as a header: Authorization: Bearer sk-llmq-...")
        key = await self._known.find(key_id) if key_id is not None else None
        if key is None or not key.opened_by(secret):
            raise _unauthorized("Incorrect API key provided.")
        match key.state(time.time()):
            case KeyState.REVOKED | KeyState.EXPIRED as state:
                raise _unauthorized(f"This API key ({key.id}) is {state}.")
            case KeyState.ACTIVE:
                return Caller(key.tenant, key.id, key.classes, key.limits)


class _KeyedPass:
    """A call that was let in by a key with limits."""

    def __init__(
        self, admission: KeyedAdmission, caller: Caller, call_id: str, tokens: int, headers: Mapping[str, str]
    ) -> None:
        self._admission = admission
        self.caller = caller
        self.call_id = call_id
        self.tokens = tokens
        self.headers = headers

    async def leave(self, used_tokens: int | None) -> None:
        """Give the place back, and set the LLM tokens right."""
        await self._admission._left(self, used_tokens)


def _bearer(authorization: str | None) -> str | None:
    scheme, _, secret = (authorization or "").strip().partition(" ")
    return secret.strip() or None if scheme.lower() == "bearer" else None


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})
