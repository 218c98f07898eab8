"""A worker for tests of the client: it claims single jobs, streams and ends them by the scripts, without an engine.

It does what a worker does as far as Redis can see, one step at a time, so that a test says when; `serve` does all steps
for every job that comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import orjson
from redis.asyncio import Redis

from llmq.scheduler import scripts
from llmq.scheduler.inbox import Delta, encode_deltas
from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.lease import Answered, Ended, Lease, Usage
from llmq.scheduler.tasks import end_tasks

HELLO = ("Hel", "lo", " world")


def chat(text: str) -> bytes:
    """Return an engine's whole answer."""
    message = {"role": "assistant", "content": text, "tool_calls": None}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    return orjson.dumps({"id": "chat-1", "object": "chat.completion", "choices": [choice], "usage": usage})


def chunk(text: str) -> bytes:
    """Return one chunk of a stream."""
    return orjson.dumps({"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": text}}]})


class ChatWorker:
    """Claims, streams and ends single jobs of one queue."""

    def __init__(self, redis: Redis, queue: str = "default", name: str = "worker-1") -> None:
        self.redis = redis
        self.keys = QueueKeys(queue)
        self.name = name
        self._candidates: list[str] = []

    async def claim(self, count: int = 1) -> list[Lease]:
        """Claim up to `count` jobs, waiting until there is one."""
        while True:
            claimed = await scripts.run(
                self.redis,
                scripts.claim(
                    self.keys,
                    self.name,
                    room=count,
                    free=count,
                    reserve=0,
                    suspects=0,
                    candidates=self._candidates,
                ),
            )
            if claimed.leases:
                return claimed.leases
            if claimed.candidates is not None:
                self._candidates = claimed.candidates
            else:
                await asyncio.sleep(0.005)

    async def claim_one(self) -> Lease:
        """Claim one job, waiting until there is one."""
        (lease,) = await self.claim()
        return lease

    async def begin(self, lease: Lease, *texts: str) -> None:
        """Send the first deltas of an answer."""
        deltas = [Delta(lease.key, lease.fence.delivery, seq, text, chunk(text)) for seq, text in enumerate(texts)]
        inbox = self.keys.inbox(lease.reply_to)
        call = scripts.first_delta(self.keys, self.name, lease, inbox=inbox, data=encode_deltas(deltas))
        assert await scripts.run(self.redis, call)

    async def go_on(self, lease: Lease, first: int, *texts: str) -> None:
        """Send further deltas, the first of which has this place."""
        deltas = [
            Delta(lease.key, lease.fence.delivery, seq, text, chunk(text)) for seq, text in enumerate(texts, first)
        ]
        await self.redis.xadd(self.keys.inbox(lease.reply_to), {"t": "d", "d": encode_deltas(deltas)})

    async def end(self, *leases: Lease, outcome: Answered | Ended | None = None) -> None:
        """End jobs: with a whole answer, or with the outcome given."""
        answer = outcome or Answered(200, chat("".join(HELLO)), "req-1", Usage(3, 2))
        endings = [scripts.Finish(lease, answer) for lease in leases]
        assert not await scripts.run(self.redis, scripts.finish(self.keys, self.name, "host", endings))

    async def answer(self, texts: Sequence[str] = HELLO) -> None:
        """Take one job from claim to end, streaming its answer."""
        lease = await self.claim_one()
        await self.begin(lease, texts[0])
        await self.go_on(lease, 1, *texts[1:])
        await self.end(lease)

    async def serve(self) -> None:
        """Answer every job that comes, until cancelled."""
        while True:
            await self.end(*await self.claim(100))

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Serve as long as the context lasts."""
        task = asyncio.create_task(self.serve())
        try:
            yield
        finally:
            await end_tasks(task)
            if not task.cancelled():
                task.result()  # a worker that died of a fault of its own says so here
