"""The fleet watch: where chat is far too slow all over the fleet, batch yields to it until that is over.

Each worker's governor sees its own engine only. What it cannot see is a fleet in which chat waits for slots, or whose
engines share something. So the sweeper in charge sums up what all workers saw of late: where more than 5 % of chat's
first tokens came later than twice the objective, and that stands for five seconds, batch starts by the deadline only
(G10 goes on holding), until it stands no longer. Every such decision is kept, with its figures.

What a moment means is decided by `judge`, without I/O. The state is in the config hash: the next look may be another
worker's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from redis.asyncio import Redis

from llmq.scheduler import scripts
from llmq.scheduler.fleet import SILENT, read_workers
from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.queue import Queue
from llmq.scheduler.stored_number import whole
from llmq.workers.chat_signal import Evidence
from llmq.workers.governor import SLOW_SHARE

#: A breach has to stand for so long, and when it is over batch yields for as long again.
STANDS_MS = 5000

#: Fewer slow requests than this are stragglers.
LEAST_SLOW = 3

DECISIONS_KEPT = 100
DECISIONS_TTL_MS = 7 * 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class Standing:
    """What stands in the config hash: since when chat is far too slow, and until when batch yields (ms; 0: not)."""

    breach_since: int = 0
    yields_until: int = 0


def judge(now_ms: int, standing: Standing, seen: Evidence) -> Standing:
    """Return what stands after a look at what all workers saw in the last seconds."""
    # Where the clock was set back, neither is as far ahead as it seems.
    yields_until = min(standing.yields_until, now_ms + STANDS_MS)
    if seen.slow < LEAST_SLOW or seen.slow <= seen.seen * SLOW_SHARE:
        return Standing(0, yields_until)  # runs out by itself
    since = min(standing.breach_since or now_ms, now_ms)
    if now_ms - since < STANDS_MS:
        return Standing(since, yields_until)
    return Standing(since, now_ms + STANDS_MS)


class FleetWatch:
    """Looks at one queue's fleet; `look` is called by the sweeper in charge."""

    def __init__(self, redis: Redis, keys: QueueKeys) -> None:
        self._redis = redis
        self._keys = keys

    async def look(self, now_ms: int) -> None:
        """Read what the workers saw, and let batch yield or go on."""
        asked, *fields = await cast(Any, self._redis).hmget(self._keys.config, "ttft_p95", "breach_b", "yields_b")
        before = Standing(*(_number(field) for field in fields))
        if not asked and before == Standing():
            return
        workers = await read_workers(Queue(self._redis, self._keys.queue)) if asked else []
        alive = [worker for worker in workers if worker.state != SILENT]
        seen = Evidence(sum(worker.chat_seen for worker in alive), sum(worker.chat_far_over for worker in alive))
        after = judge(now_ms, before, seen)
        if now_ms > after.yields_until > 0:
            after = Standing(after.breach_since, 0)
        if after == before:
            return
        changes = {"breach_b": str(after.breach_since or ""), "yields_b": str(after.yields_until or "")}
        await scripts.run(self._redis, scripts.configure(self._keys, changes))
        if (after.yields_until > 0) != (before.yields_until > 0):
            await self._record("yields" if after.yields_until else "goes on", seen, len(alive))

    async def _record(self, what: str, seen: Evidence, workers: int) -> None:
        pipe: Any = self._redis.pipeline(transaction=True)
        facts = {"batch": what, "seen": seen.seen, "far_over": seen.slow, "workers": workers}
        pipe.xadd(self._keys.decisions, facts, maxlen=DECISIONS_KEPT, approximate=False)
        pipe.pexpire(self._keys.decisions, DECISIONS_TTL_MS)
        await pipe.execute()


def _number(field: bytes | None) -> int:
    return whole(field)
