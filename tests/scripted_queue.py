"""A queue as tests of the scripts handle it: every script a short call, and its whole state as one flat mapping.

Its clock is virtual (`config.virtual`), so a test moves time instead of waiting; only leases go by the server's own
clock, and `lapse` ages them. Nothing here chooses or checks anything: tests do.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from redis.asyncio import Redis

from llmq.scheduler import scripts
from llmq.scheduler.job import Job, TrafficClass
from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.lease import (
    Answered,
    Ended,
    ErrorCode,
    HandedBack,
    Lease,
    Reason,
    Retry,
    Usage,
    lane_of_batch,
    lane_of_tenant,
)

#: Where virtual time starts: a round number of 13 digits, as real times in ms have.
T0 = 1_000_000_000_000

LEASE_MS = 10_000

DATA = Job("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}).encode()

Change = tuple[object, object]

T = TypeVar("T")


class ScriptedQueue:
    """One queue, worked by calls of scripts; workers are no more than names here."""

    def __init__(self, redis: Redis, name: str = "q") -> None:
        self.redis: Any = redis
        self.keys = QueueKeys(name)
        self.now = T0
        self.trips = 0
        self._names: dict[str, str] = {}
        self._candidates: dict[str, list[str]] = {}

    async def call(self, call: scripts.Call[T]) -> T:
        """Make one call."""
        return await scripts.run(self.redis, call)

    async def set_clock(self, now: int) -> None:
        """Let it be this moment, in ms."""
        self.now = now
        await self.redis.hset(self.keys.config, "virtual", now)

    async def pass_time(self, ms: int) -> None:
        """Let time pass, or go back."""
        await self.set_clock(self.now + ms)

    async def configure(self, **changes: str | int | float) -> None:
        """Change live settings; an empty value is the default again."""
        await self.call(scripts.configure(self.keys, {name: str(value) for name, value in changes.items()}))

    # --- submit ---------------------------------------------------------------------------------------------------

    async def submit(
        self,
        job_id: str,
        *,
        cls: str = "i",
        tenant: str = "t",
        cost: int = 10,
        ttl_ms: int | None = None,
        digest: str = "",
    ) -> scripts.Verdict:
        """Submit a single job."""
        kind = TrafficClass.INTERACTIVE if cls == "i" else TrafficClass.BATCH
        call = scripts.submit_job(
            self.keys, job_id, lane=lane_of_tenant(kind, tenant), cls=kind, tenant=tenant, data=DATA, cost=cost,
            ttl_ms=ttl_ms, client="c", digest=digest,
        )  # fmt: skip
        verdict = await self.call(call)
        if verdict.word == "ok":
            self._names[verdict.value] = job_id
        return verdict

    async def open(self, batch: str, *, tenant: str = "t", window_ms: int = 0, need: int = 0) -> scripts.Verdict:
        """Open a batch."""
        call = scripts.open_batch(
            self.keys, batch, lane=lane_of_batch(batch), tenant=tenant, window_ms=window_ms, need=need, record={}
        )
        return await self.call(call)

    async def append(
        self, batch: str, first: int, count: int, *, cost: int = 10, bad: Sequence[int] = ()
    ) -> scripts.Verdict:
        """Append a chunk of lines, `bad` ones among them."""
        lines = [
            scripts.SubmitLine(n, f"k{n}", b"" if n in bad else DATA, cost, "messages: missing")
            for n in range(first, first + count)
        ]
        call = scripts.submit_lines(
            self.keys, batch, lane=lane_of_batch(batch), first=first, after=first + count, lines=lines
        )
        return await self.call(call)

    async def seal(self, batch: str, next_line: int) -> scripts.Verdict:
        """Seal a batch."""
        call = scripts.seal_batch(self.keys, batch, lane=lane_of_batch(batch), next_line=next_line)
        return await self.call(call)

    async def batch(self, batch: str, count: int, *, tenant: str = "t", window_ms: int = 0, cost: int = 10) -> None:
        """Submit a whole batch, in chunks of 500."""
        await self.open(batch, tenant=tenant, window_ms=window_ms)
        for first in range(1, count + 1, 500):
            await self.append(batch, first, min(500, count + 1 - first), cost=cost)
        await self.seal(batch, count + 1)

    # --- claim, and what ends a lease -----------------------------------------------------------------------------

    async def claim(
        self,
        room: int = 1,
        *,
        free: int | None = None,
        reserve: int | None = 0,
        suspects: int = 0,
        worker: str = "w",
        youngest: Lease | None = None,
    ) -> scripts.Claimed:
        """Claim as a worker does: again with other candidate lanes, and for the rest, as long as the script asks."""
        free = room if free is None else free
        whole = scripts.Claimed([], [], "", 0.0, None)
        self.trips = 0
        while True:
            self.trips += 1
            got = len(whole.leases)
            one: scripts.Claimed = await self.call(
                scripts.claim(
                    self.keys, worker, room=room - got - whole.protects, free=max(0, free - got), reserve=reserve,
                    suspects=suspects + sum(lease.suspect for lease in whole.leases),
                    candidates=self._candidates.get(worker, []),
                    youngest=youngest.fence if youngest and not whole.protects else None,
                )
            )  # fmt: skip
            whole = scripts.Claimed(
                whole.leases + one.leases,
                whole.doomed + one.doomed,
                one.reason,
                one.wait,
                None,
                whole.protects or one.protects,
            )
            if one.candidates is not None:
                self._candidates[worker] = one.candidates
            elif one.reason != "more":
                return whole

    async def finish(
        self, *leases: Lease, worker: str = "w", status: int = 200, body: bytes = b"{}", usage: Usage | None = None,
        dead: bool = False,
    ) -> int:  # fmt: skip
        """Finish jobs with an answer; return how many were accepted."""
        answer = Answered(status, body, "r", usage or Usage(), dead)
        refused = await self.call(
            scripts.finish(self.keys, worker, "h", [scripts.Finish(one, answer) for one in leases])
        )
        return len(leases) - len(refused)

    async def end(self, lease: Lease, code: ErrorCode, *, worker: str = "w", dead: bool = False) -> bool:
        """End a job without an answer; return whether that was accepted."""
        ending = scripts.Finish(lease, Ended(code, "because", dead))
        return not await self.call(scripts.finish(self.keys, worker, "h", [ending]))

    async def hand_back(
        self, *leases: Lease, worker: str = "w", reason: Reason = Reason.SHUTDOWN, delay: float = 0.0
    ) -> int:
        """Hand jobs back; return how many were accepted."""
        returned = [(lease.fence, HandedBack(reason, delay)) for lease in leases]
        refused = await self.call(scripts.hand_back(self.keys, worker, returned))
        return len(leases) - len(refused)

    async def retry(self, lease: Lease, delay: float = 0.0, *, worker: str = "w", crashed: bool = False) -> bool:
        """Let a job be tried again; return whether that was accepted."""
        outcome = Retry(delay, "went wrong", crashed)
        return await self.call(scripts.retry(self.keys, worker, lease.fence, outcome))

    async def renew(self, *leases: Lease, worker: str = "w") -> scripts.Renewed:
        """Renew leases."""
        return await self.call(scripts.renew(self.keys, worker, [lease.fence for lease in leases]))

    async def first_delta(self, lease: Lease, *, worker: str = "w") -> bool:
        """Send the first delta of an answer; return whether that was accepted."""
        call = scripts.first_delta(self.keys, worker, lease, inbox=self.keys.inbox("c"), data=b"delta")
        return await self.call(call)

    # --- what ends jobs from outside ------------------------------------------------------------------------------

    async def lapse(self, *leases: Lease) -> None:
        """Age leases, as if nobody had renewed them for a minute."""
        for lease in leases:
            stream, fence = self.keys.lane(lease.fence.lane), lease.fence
            (row,) = await self.redis.xpending_range(stream, "workers", fence.entry, fence.entry, 1)
            await self.redis.xclaim(stream, "workers", row["consumer"], 0, [fence.entry], idle=60_000, justid=True)

    async def sweep(self, lane: str, *, worker: str = "s", cursor: str = "0-0", count: int = 100) -> scripts.Swept:
        """Sweep a lane, one step."""
        call = scripts.sweep(self.keys, worker, lane=lane, lease_ms=LEASE_MS, cursor=cursor, count=count)
        return await self.call(call)

    async def crash(self, *leases: Lease, worker: str = "s") -> list[scripts.Doomed]:
        """Let the leases lapse and be swept; return the jobs for the sweeper to end."""
        await self.lapse(*leases)
        lanes = dict.fromkeys(lease.fence.lane for lease in leases)
        return [doomed for lane in lanes for doomed in (await self.sweep(lane, worker=worker)).doomed]

    async def reap(self, batch: str, count: int = 500) -> int:
        """Reap a batch to its end; return how many lines were ended."""
        cursor, reaped = "0-0", 0
        while True:
            call = scripts.reap(self.keys, batch, lane=lane_of_batch(batch), cursor=cursor, count=count)
            cursor, some = await self.call(call)
            reaped += some
            if cursor == "0-0":
                return reaped

    async def cancel(
        self, job_id: str, *, cls: str = "i", tenant: str = "t", state: str = "cancelled"
    ) -> scripts.Verdict:
        """Cancel a single job, or end one that waited too long."""
        code = ErrorCode.CANCELLED if state == "cancelled" else ErrorCode.TIMEOUT
        call = scripts.cancel_job(
            self.keys, job_id, lane=f"{cls}:{tenant}", client="c", state=state, code=code, message="because"
        )
        return await self.call(call)

    async def cancel_batch(self, batch: str) -> scripts.BatchCancel:
        """Cancel a batch."""
        return await self.call(scripts.cancel_batch(self.keys, batch, lane=lane_of_batch(batch)))

    async def pause_batch(self, batch: str, paused: bool = True) -> scripts.Verdict:
        """Pause a batch, or resume it."""
        call = scripts.pause_batch(self.keys, batch, lane=lane_of_batch(batch), paused=paused)
        return await self.call(call)

    async def drain(self, room: int = 100) -> list[str]:
        """Claim and finish until nothing can be claimed; return the names of the jobs in the order of their starts."""
        started: list[str] = []
        while (claimed := await self.claim(room, worker="drain")).leases or claimed.doomed:
            started += names(claimed)
            await self.finish(*claimed.leases, worker="drain")
            for doomed in claimed.doomed:
                await self.end(doomed.lease, ErrorCode.TIMEOUT, worker="drain")
        return started

    @asynccontextmanager
    async def at_maxmemory(self) -> AsyncIterator[None]:
        """Let the server be full."""
        await self.redis.config_set("maxmemory", 1)
        try:
            yield
        finally:
            await self.redis.config_set("maxmemory", 0)

    # --- what there is --------------------------------------------------------------------------------------------

    async def state(self) -> dict[str, object]:
        """Return everything that Redis holds of the queue, flat: `key`, or `key part`, to its value.

        Ids that are times are replaced: entries of single jobs by the job's id, those of results, inboxes and dead
        letters by their number. Bells and inboxes are lengths. A key with a TTL has a part `ttl`.
        """
        state: dict[str, object] = {}
        for key in sorted(await self.redis.keys(f"{self.keys.prefix}*")):
            name = key.decode().removeprefix(self.keys.prefix)
            match await self.redis.type(key):
                case b"hash":
                    state |= {f"{name} {_text(k)}": _text(v) for k, v in (await self.redis.hgetall(key)).items()}
                case b"zset":
                    members = await self.redis.zrange(key, 0, -1, withscores=True)
                    state |= {f"{name} {_text(member)}": score for member, score in members}
                case b"list":
                    state[name] = await self.redis.llen(key)
                case b"stream":
                    state |= await self._stream(key, name)
                case _:
                    state[name] = _text(await self.redis.get(key))
            if await self.redis.pttl(key) > 0:
                state[f"{name} ttl"] = True
        state.pop("config virtual", None)
        return {self._readable(path): value for path, value in state.items()}

    async def _stream(self, key: bytes, name: str) -> dict[str, object]:
        entries = await self.redis.xrange(key)
        if name.startswith("inbox:"):
            return {name: len(entries)}
        if not name.startswith("lane:"):
            texts = [{_text(k): _text(v) for k, v in fields.items() if v} for _, fields in entries]
            return {f"{name} #{number}": fields for number, fields in enumerate(texts, 1)}
        state: dict[str, object] = {name: len(entries)}
        groups = await self.redis.xinfo_groups(key)
        for row in await self.redis.xpending_range(key, "workers", "-", "+", 1000) if groups else []:
            holder = f"{_text(row['consumer'])} x{row['times_delivered']}"
            state[f"{name} running {_text(row['message_id'])}"] = holder
        return state

    def _readable(self, path: str) -> str:
        return re.sub(r"\d{13}-\d+", lambda found: self._names.get(found[0], found[0]), path)


def names(claimed: scripts.Claimed) -> list[str]:
    """Return the jobs that a claim started: single jobs by id, lines as `batch/line`."""
    return [name(lease) for lease in claimed.leases]


def name(lease: Lease) -> str:
    """Return a job's id, or `batch/line`."""
    return f"{lease.batch_id}/{lease.line}" if lease.batch_id else lease.key


def changes(before: dict[str, object], after: dict[str, object]) -> dict[str, Change]:
    """Return what differs between two states: path to (before, after), None where it is absent."""
    paths = sorted(before.keys() | after.keys())
    return {path: (before.get(path), after.get(path)) for path in paths if before.get(path) != after.get(path)}


def _text(value: bytes) -> str:
    return value.decode(errors="replace")
