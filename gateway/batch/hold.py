"""The hold: what lets one gateway of many work on a batch, as a lease lets one worker of many run a job.

A hold lasts ten seconds and is renewed every two and a half; a gateway that dies is followed by another within that
time. Whoever finds its hold lost stops at once: `keep` cancels the work. A process that only slept may still finish one
write, so everything that is written under a hold is such that writing it late does no harm (`parts.py`, `facts.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Coroutine
from typing import Any

from llmq.scheduler import scripts
from llmq.scheduler.errors import LLMQError
from llmq.scheduler.outage import REDIS_ERRORS
from llmq.scheduler.queue import Queue
from llmq.scheduler.tasks import end_tasks

TTL_S = 10.0
RENEW_S = 2.5

#: Seconds that letting go may take when everything ends.
_LET_GO_S = 2.0


class HoldLost(LLMQError):
    """The hold is another's by now; whatever was to be written under it must not be."""


class Hold:
    """One gateway's hold on one name."""

    def __init__(self, queue: Queue, name: str) -> None:
        self._queue = queue
        self._name = name
        self._token = secrets.token_hex(8)
        self._until = 0.0

    @property
    def token(self) -> str:
        """What no other hold is called."""
        return self._token

    @property
    def valid(self) -> bool:
        """Whether nobody else can hold this now; judged by the time before the last renewal was sent."""
        return time.monotonic() < self._until

    def check(self) -> None:
        """Raise HoldLost where somebody else may hold this: before a write that would do harm."""
        if not self.valid:
            raise HoldLost(f"{self._name} is led by another gateway from here, or by this one again")

    async def take(self) -> bool:
        """Take it, if nobody has it; return whether that succeeded. Errors of Redis pass through."""
        return await self._hold(renew=False)

    async def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work while the hold is kept. Raises HoldLost where it was lost, and the work cancelled."""
        task = asyncio.ensure_future(work)
        try:
            while self.valid:
                done, _ = await asyncio.wait([task], timeout=RENEW_S)
                if done:
                    task.result()
                    return
                with contextlib.suppress(*REDIS_ERRORS):  # it is valid for a while yet: the next try may succeed
                    await self._hold(renew=True)
            self.check()
        finally:
            await end_tasks(task)

    async def let_go(self) -> None:
        """Give it up, so that another need not wait; where Redis is away, its TTL does that."""
        self._until = 0.0
        with contextlib.suppress(*REDIS_ERRORS, TimeoutError):
            async with asyncio.timeout(_LET_GO_S):
                await scripts.run(self._queue.redis, scripts.let_go(self._queue.keys, self._name, token=self._token))

    async def _hold(self, *, renew: bool) -> bool:
        asked_at = time.monotonic()
        call = scripts.hold(self._queue.keys, self._name, token=self._token, ttl_ms=round(TTL_S * 1000), renew=renew)
        held = await scripts.run(self._queue.redis, call)
        self._until = asked_at + TTL_S if held else 0.0
        return held
