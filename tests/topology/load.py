"""Load for the tests in which servers change places: chat that is submitted all the time, and what became of it.

    async with Load(url) as load:
        ...                              a primary dies
    tally = await load.account()

Every job that was acknowledged is accounted for: ended with a result, or lost, with the time of its acknowledgement.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

from llmq import AsyncClient, AsyncJobHandle, JobEnded
from llmq.scheduler.errors import JobLost, RedisUnavailable
from tests.redis.serving import until

#: Seconds between two submits of one load.
PAUSE_S = 0.03

#: What a job may take at the end: the waits behind it, and the retries.
ANSWER_S = 60.0


@dataclass(slots=True)
class Tally:
    """What became of the jobs of a load; times are of the monotonic clock."""

    answered: int = 0
    lost_at: list[float] = field(default_factory=list)
    ended: list[JobEnded] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


class Load:
    """Submits jobs from the beginning of the block to its end, whatever Redis says in between."""

    def __init__(self, url: str) -> None:
        self._client = AsyncClient(url)
        self._acknowledged: list[tuple[float, AsyncJobHandle]] = []
        self._refused: list[str] = []
        self._task: asyncio.Task[None]

    async def __aenter__(self) -> Load:
        await self._submit()
        self._task = asyncio.create_task(self._submit_all_the_time())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    @property
    def acknowledged(self) -> int:
        """How many submits were acknowledged so far."""
        return len(self._acknowledged)

    async def more(self, count: int = 20, within: float = 60.0) -> None:
        """Wait until so many more submits were acknowledged, and one of them is answered."""
        wanted = self.acknowledged + count
        async with asyncio.timeout(within):
            await until(lambda: self.acknowledged >= wanted, within=within)
            for _, job in reversed(self._acknowledged):
                with contextlib.suppress(JobLost):
                    await job.result()
                    return

    async def account(self) -> Tally:
        """Wait for all jobs; return what became of them, and close the client."""
        tally = Tally(refused=self._refused)
        for at, job in self._acknowledged:
            try:
                await job.result(ANSWER_S)
                tally.answered += 1
            except JobLost:
                tally.lost_at.append(at)
            except JobEnded as error:
                tally.ended.append(error)
        await self._client.aclose()
        return tally

    async def _submit_all_the_time(self) -> None:
        while True:
            await self._submit()
            await asyncio.sleep(PAUSE_S)

    async def _submit(self) -> None:
        prompt = f"job {self.acknowledged} {time.monotonic_ns()}"
        try:
            job = await self._client.submit({"messages": [{"role": "user", "content": prompt}]}, timeout=0)
        except RedisUnavailable as error:
            self._refused.append(str(error))
        else:
            self._acknowledged.append((time.monotonic(), job))
