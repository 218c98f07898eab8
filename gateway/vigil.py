"""The vigil: what ends the wait of a request before its job ends.

The client leaves; the gateway drains; Redis stays away; the worker that has begun the answer dies, and nobody is there
who would say so. Each open request has one `Vigil`; what they share is in `Watchtower`. A vigil decides nothing about
the job: whoever waits looks at `left` and `failure` when it is woken.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from llmq.gateway.body_guard import Receive
from llmq.gateway.errors import ApiError
from llmq.gateway.fleet import Fleet
from llmq.gateway.jobs import OpenJob
from llmq.scheduler.errors import LLMQError
from llmq.scheduler.fleet import SILENT
from llmq.scheduler.outage import REDIS_ERRORS
from llmq.scheduler.queue import Queue
from llmq.scheduler.state import JobState
from llmq.scheduler.waiting import Listener

#: Unbroken contact with Redis before a silent worker counts as dead: an outage silences all of them (G4).
STEADY_S = 15.0

#: A worker that is seen silent at so many looks is gone. One that has begun an answer cannot be replaced; another one
#: may still take over a job that has not begun.
LOOKS_BEGUN, LOOKS_NOT_BEGUN = 2, 12


@dataclass(frozen=True, slots=True)
class Patience:
    """How long requests wait for what does not come, in seconds.

    `tick` is between two looks, and between two signs of life in a stream that is silent. `outage` is how long Redis
    may be away: a worker stops its requests about 70 s after it has lost Redis (its lease, and 60 s).
    """

    tick: float = 5.0
    outage: float = 75.0


@dataclass
class Watchtower:
    """What all vigils of a gateway look at."""

    listener: Listener
    fleet: Fleet
    patience: Patience = field(default_factory=Patience)
    open: set[Vigil] = field(default_factory=set)

    def end_all(self, failure: ApiError) -> int:
        """End every request that is still open; return how many there were."""
        left = list(self.open)
        for vigil in left:
            vigil.end(failure)
        return len(left)

    @property
    def queue(self) -> Queue:
        """The queue that is served."""
        return self.listener.queue


class Vigil:
    """Watches over one request; `wake` is called with every tick, and when it has to end."""

    def __init__(self, tower: Watchtower, job: OpenJob, receive: Receive, wake: Callable[[], object]) -> None:
        self.left = False
        self.failure: ApiError | None = None
        self.pieces = 0
        """How many pieces of the answer have come: counted by who sends them on."""
        self._tower = tower
        self._job = job
        self._receive = receive
        self._wake = wake
        self._silent_looks = 0
        self._looking: asyncio.Task[None] | None = None

    def __enter__(self) -> Vigil:
        self._tower.open.add(self)
        self._leaving = asyncio.create_task(self._wait_for_leaving())
        self._timer = asyncio.get_running_loop().call_later(self._tower.patience.tick, self._tick)
        return self

    def __exit__(self, *error: object) -> None:
        self._tower.open.discard(self)
        self._leaving.cancel()
        self._timer.cancel()
        if self._looking is not None:
            self._looking.cancel()

    @property
    def over(self) -> bool:
        """Whether the request has to end."""
        return self.left or self.failure is not None

    def end(self, failure: ApiError) -> None:
        """Let the request end, with what its client is told."""
        self.failure = self.failure or failure
        self._wake()

    async def _wait_for_leaving(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.left = True
        self._wake()

    def _tick(self) -> None:
        patience = self._tower.patience
        self._timer = asyncio.get_running_loop().call_later(patience.tick, self._tick)
        deaf_since = self._tower.listener.deaf_since
        if deaf_since is not None and time.monotonic() - deaf_since > patience.outage:
            self.end(_interrupted("the queue was away for too long"))
        elif self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        self._wake()

    async def _look(self) -> None:
        """Count how often the worker that runs the job was found silent, with no other one to say that it is dead."""
        try:
            view = await self._tower.fleet.view()
            steady_since = self._tower.fleet.steady_since
            if view.alive or steady_since is None or time.monotonic() - steady_since < STEADY_S:
                self._silent_looks = 0
                return
            record = await self._tower.queue.job(self._job.id)
        except (LLMQError, *REDIS_ERRORS):
            return
        silent = {worker.id for worker in view.workers if worker.state == SILENT}
        known = {worker.id for worker in view.workers}
        dead = record.consumer in silent or record.consumer not in known
        self._silent_looks = self._silent_looks + 1 if record.state is JobState.RUNNING and dead else 0
        if self._silent_looks >= (LOOKS_BEGUN if self.pieces else LOOKS_NOT_BEGUN):
            self.end(_interrupted("its worker has died, and no other one is there"))


def _interrupted(why: str) -> ApiError:
    return ApiError(503, f"the answer broke off: {why}; send the request again", code="interrupted", retry_after=5)
