"""Bells: wake a worker when there may be something to claim, and carry commands to it.

One connection that blocks on the worker's control list and the bells of the classes that it has room for. A bell
carries no job: whoever hears it claims under the policy. A ring that cannot be used any more goes back, for others.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis

from llmq.scheduler.calling import KeptConnections
from llmq.scheduler.keys import QueueKeys
from llmq.workers.allowance import Allowance
from llmq.workers.contact import Contact
from llmq.workers.reach import OUT_OF_REACH

#: How long one wait lasts; the server is no finer than 100 ms.
LISTEN_S = 1.0

PAUSE_S = 0.5

#: A wait that does not hear what there is room for by now is ended, but not more often than this: slots of a worker
#: that drains a batch are free for moments all the time.
SETTLE_S = 0.02

#: The command that a worker sends itself to end a wait.
LISTEN_ANEW = "listen"


class Bells:
    """Listens for one worker; `on_ring` claims, `on_command` takes what was pushed to the control list."""

    def __init__(
        self,
        ear: Redis,
        redis: Redis,
        keys: QueueKeys,
        worker_id: str,
        contact: Contact,
        allowance: Callable[[], Allowance],
        on_ring: Callable[[], None],
        on_command: Callable[[str], None],
    ) -> None:
        self._ear = KeptConnections(ear)
        self._redis: Any = redis
        self._control = keys.control(worker_id)
        self._bells = {True: keys.bell("i"), False: keys.bell("b")}
        self._contact = contact
        self._allowance = allowance
        self._on_ring = on_ring
        self._on_command = on_command
        self._heard: set[str] | None = None
        self._reconsidering: asyncio.Task[None] | None = None

    async def listen(self) -> None:
        """Wait for rings and commands until cancelled."""
        while True:
            heard, began = self._wanted(), time.monotonic()
            try:
                self._heard = set(heard)
                (reply,) = await self._ear.run(("BLPOP", *heard, LISTEN_S * (1 + random.random() / 10)))
                self._heard = None
                self._contact.seen(began)
                if reply is not None:
                    await self._take(reply[0].decode(), reply[1].decode(errors="replace"))
            except OUT_OF_REACH:
                self._heard = None
                self._contact.lost()
                await asyncio.sleep(PAUSE_S)

    def reconsider(self) -> None:
        """Look soon whether the room has changed: no ring may have to wait for the end of a wait that is deaf to it."""
        if self._reconsidering is None and self._heard is not None:
            self._reconsidering = asyncio.create_task(self._listen_anew())

    async def _listen_anew(self) -> None:
        try:
            await asyncio.sleep(SETTLE_S)
            if self._heard is not None and not self._heard.issuperset(self._wanted()):
                await self._push(self._control, LISTEN_ANEW)
        except OUT_OF_REACH:
            pass  # the wait ends by itself
        finally:
            self._reconsidering = None

    def _wanted(self) -> list[str]:
        now = self._allowance()
        return [self._control, *(key for interactive, key in self._bells.items() if _usable(now, interactive))]

    async def _take(self, key: str, value: str) -> None:
        if key == self._control:
            if value != LISTEN_ANEW:
                self._on_command(value)
        elif _usable(self._allowance(), key == self._bells[True]):
            self._on_ring()
            await asyncio.sleep(0)  # the claim is sent before the next wait: somebody waits for it
        else:
            await self._push(key, value)

    async def _push(self, key: str, value: str) -> None:
        """Push, with the TTL in the same transaction: a list that is cut off before its TTL would stay for ever."""
        pipe: Any = self._redis.pipeline(transaction=True)
        pipe.lpush(key, value)
        pipe.pexpire(key, 60_000)
        await pipe.execute()


def _usable(now: Allowance, interactive: bool) -> bool:
    if interactive:
        return now.room > 0
    return now.reserve is not None and now.free > now.reserve
