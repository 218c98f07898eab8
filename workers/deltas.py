"""Deltas: pieces of answers on their way to the clients that wait for them.

The first delta of an interactive job is a fenced script of its own, because from then on the job is never run again
(G18); what follows is gathered and sent as one inbox entry a client every 10 ms. Results do not pass here.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from llmq.scheduler import scripts
from llmq.scheduler.calling import ScriptCalls
from llmq.scheduler.cipher import PLAIN, Cipher, deltas_of
from llmq.scheduler.inbox import Delta, encode_deltas
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.keyring import key_id_of
from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.lease import Fence, Lease
from llmq.workers.reach import OUT_OF_REACH

#: How long deltas are gathered: below what a reader notices, and one Redis command for all streams of a client.
GATHER_S = 0.01

RETRY_S = 0.2

#: How long the end of an answer waits for its deltas when Redis does not take them.
PATIENCE_S = 5.0

#: Of deltas for one client, while Redis is away: some seconds of many streams.
MOST_KEPT_BYTES = 2**20


@dataclass(slots=True)
class _Outgoing:
    """The deltas of one attempt: those that wait for the first to be acknowledged, and how many were made.

    `addressee` is who waits for them, and the id of the key that they encrypted the job with ("": none).
    """

    lease: Lease
    addressee: tuple[str, str]
    held: list[Delta] = field(default_factory=list)
    made: int = 0
    begun: bool = False
    first: asyncio.Task[None] | None = None


class DeltaSender:
    """Sends deltas of running jobs; calls `on_lost` with the fence of an attempt that may not answer any more."""

    def __init__(
        self,
        redis: Redis,
        keys: QueueKeys,
        consumer: str,
        on_lost: Callable[[Fence], None],
        cipher: Cipher = PLAIN,
    ) -> None:
        self._calls = ScriptCalls(redis)
        self._keys = keys
        self._consumer = consumer
        self._on_lost = on_lost
        self._cipher = cipher
        self._outgoing: dict[Fence, _Outgoing] = {}
        # By client, and by the key that its requests are encrypted with.
        self._gathered: dict[tuple[str, str], list[Delta]] = defaultdict(list)
        self._flush: asyncio.Task[bool] | None = None
        self._go: asyncio.Future[None] | None = None
        self._closing = False

    def outlet(self, lease: Lease) -> Callable[[str, bytes], None] | None:
        """Return what takes the deltas of an attempt, and returns at once; None where nobody waits for them."""
        if not lease.reply_to:
            return None
        addressee = lease.reply_to, key_id_of(lease.data) or ""
        out = self._outgoing[lease.fence] = _Outgoing(lease, addressee, begun=lease.cls is not TrafficClass.INTERACTIVE)
        job, delivery = lease.key, lease.fence.delivery

        def send(text: str, chunk: bytes) -> None:
            delta = Delta(job, delivery, out.made, text, chunk)
            out.made += 1
            if out.begun:
                self._gather(addressee, delta)
                return
            out.held.append(delta)
            if (text or out.made > 1) and out.first is None:  # the first chunk names the role only
                out.first = asyncio.create_task(self._begin(out))

        return send

    async def flushed(self, fence: Fence) -> None:
        """Wait until all deltas of an attempt have been sent, or have been given up (after 5 s)."""
        out = self._outgoing.get(fence)
        if out is None or not out.made:
            return
        try:
            async with asyncio.timeout(PATIENCE_S):
                if not out.begun:
                    out.first = out.first or asyncio.create_task(self._begin(out))
                    await asyncio.wait([out.first])
                # The last delta is in the parcel that is under way or in the one after it; those that other attempts
                # fill meanwhile are no reason to wait. A parcel that Redis did not take is in the one after it, too.
                parcels = 2
                while parcels and (flush := self._flush) is not None:
                    self._hurry()
                    await asyncio.wait([flush])
                    parcels -= _is_over(flush)
        except TimeoutError:
            pass  # the job's record holds the whole answer

    def forget(self, fence: Fence) -> None:
        """The attempt is over."""
        out = self._outgoing.pop(fence, None)
        if out is not None and out.first is not None:
            out.first.cancel()

    async def close(self) -> None:
        """Send what is gathered, once."""
        self._closing = True
        while self._flush is not None:
            self._hurry()
            await asyncio.wait([self._flush])

    async def _begin(self, out: _Outgoing) -> None:
        lease = out.lease
        inbox = self._keys.inbox(lease.reply_to)
        sent, out.held = out.held, []
        data = self._encode(out.addressee, sent)
        call = scripts.first_delta(self._keys, self._consumer, lease, inbox=inbox, data=data)
        # Nothing of the answer may reach the client before Redis knows that it has begun, so this is not given up:
        # it ends with the attempt. A lost reply sends the same deltas again; the client knows them by their place.
        while True:
            try:
                if await self._calls.run(call):
                    break
                self._on_lost(lease.fence)
                return
            except OUT_OF_REACH:
                await asyncio.sleep(RETRY_S)
        out.begun = True
        for delta in out.held:
            self._gather(out.addressee, delta)
        out.held = []

    def _gather(self, addressee: tuple[str, str], delta: Delta) -> None:
        self._gathered[addressee].append(delta)
        if self._flush is None:
            self._begin_to_gather()

    def _begin_to_gather(self) -> None:
        loop = asyncio.get_running_loop()
        self._go = loop.create_future()
        self._flush = loop.create_task(self._send_gathered(self._go, loop.call_later(GATHER_S, self._hurry)))

    def _hurry(self) -> None:
        """Send now what is gathered."""
        if self._go is not None and not self._go.done():
            self._go.set_result(None)

    async def _send_gathered(self, go: asyncio.Future[None], timer: asyncio.TimerHandle) -> bool:
        """Send what is gathered with `go`; return whether Redis did not take it, so that it is to be sent again."""
        try:
            await go
        finally:
            timer.cancel()
        gathered, self._gathered = self._gathered, defaultdict(list)
        again = False
        try:
            calls = [
                scripts.tell(self._keys, inbox=self._keys.inbox(addressee[0]), data=self._encode(addressee, deltas))
                for addressee, deltas in gathered.items()
            ]
            await self._calls.run_all(calls)
        except ResponseError:
            pass  # Redis is full: the job's record will hold the whole answer
        except OUT_OF_REACH:
            # Whether they arrived is not known: the client knows each by its place, and takes none twice.
            again = True
            self._keep(gathered)
            if not self._closing:
                await asyncio.sleep(RETRY_S)
        finally:
            self._flush = None
        if self._gathered:
            self._begin_to_gather()
        return again

    def _keep(self, unsent: dict[tuple[str, str], list[Delta]]) -> None:
        """Put what Redis did not take before what came meanwhile; too much is given up, for the job's record has it."""
        for addressee, deltas in unsent.items():
            kept = deltas + self._gathered.pop(addressee, [])
            if not self._closing and sum(len(delta.chunk) for delta in kept) <= MOST_KEPT_BYTES:
                self._gathered[addressee] = kept

    def _encode(self, addressee: tuple[str, str], deltas: list[Delta]) -> bytes:
        client, key_id = addressee
        return self._cipher.encrypt(encode_deltas(deltas), deltas_of(client), key_id)


def _is_over(flush: asyncio.Task[bool]) -> bool:
    """Whether what was to be sent is not sent again: it was taken, or it cannot be sent."""
    return flush.cancelled() or flush.exception() is not None or not flush.result()
