"""A long random life of a queue, each claim of it compared with the oracle's answer.

A seed decides everything; a failure shows the seed and the last steps. What the walk does at one moment (submit,
claim, finish, crash, cancel, change a setting, let time pass or go back, ...) it does to the real queue and tells the
oracle. Leases that were lost go on trying to write, and must be refused.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from llmq.scheduler.lease import ErrorCode, Lease, Reason, Usage
from llmq.scheduler.scripts import Doomed
from tests.oracle import Job, Lane, Oracle, Terms
from tests.scripted_queue import ScriptedQueue, name

STEPS = 1500

CODES = {
    "expired": ErrorCode.TIMEOUT,
    "cancelled": ErrorCode.CANCELLED,
    "interrupted": ErrorCode.INTERRUPTED,
    "dead": ErrorCode.WORKER_LOST,
}

TENANTS = ("anna", "ben", "cleo")


@dataclass(eq=False)
class Running:
    """A lease in a worker's hands, and the job as the oracle knows it."""

    lease: Lease
    job: Job
    worker: str


@dataclass(eq=False)
class Batch:
    """A batch as its producer knows it."""

    name: str
    lane: Lane
    next: int = 1
    lines: int = 0
    ended: int = 0
    sealed: bool = False
    paused: bool = False


@dataclass
class Walk:
    """One walk: the queue, the oracle, and what is in whose hands."""

    queue: ScriptedQueue
    seed: int
    oracle: Oracle = field(default_factory=Oracle)
    jobs: dict[tuple[str, str], Job] = field(default_factory=dict)
    ids: dict[Job, str] = field(default_factory=dict)
    running: list[Running] = field(default_factory=list)
    lost: list[Running] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    steps: deque[str] = field(default_factory=lambda: deque(maxlen=25))
    count: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    @property
    def now(self) -> int:
        return self.queue.now

    def note(self, step: str) -> None:
        self.steps.append(step)

    # --- submit ---------------------------------------------------------------------------------------------------

    async def submit(self) -> None:
        cls, tenant, cost = self.random.choice("iib"), self.random.choice(TENANTS), self.random.choice((1, 10, 40))
        self.count += 1
        job_id = f"j{self.count}"
        ttl = self.random.choice((0, 5_000, 60_000))
        self.note(f"submit {job_id} {cls}:{tenant} cost {cost} ttl {ttl}")
        verdict = await self.queue.submit(job_id, cls=cls, tenant=tenant, cost=cost, ttl_ms=ttl)
        assert "ok" == verdict.word
        lane = self.oracle.lanes.get(f"{cls}:{tenant}") or Lane(f"{cls}:{tenant}", cls, tenant)
        job = Job(lane, verdict.value, cost, self.now + ttl if ttl else 9e15)
        self._accept([job], [job_id])

    async def open_batch(self) -> None:
        if len(self.batches) >= 6:
            return
        self.count += 1
        batch, tenant = f"B{self.count}", self.random.choice(TENANTS)
        window = self.random.choice((0, 0, 20_000, 90_000))
        self.note(f"open {batch} {tenant} window {window}")
        await self.queue.open(batch, tenant=tenant, window_ms=window)
        due = self.now + window if window else self.now + 520 * 7 * 24 * 3600 * 1000
        lane = self.oracle.lanes[f"batch:{batch}"] = Lane(f"batch:{batch}", "b", tenant, due)
        self.batches.append(Batch(batch, lane))
        self.opened.append(batch)

    async def append_lines(self) -> None:
        if not (batch := self._any(batch for batch in self.batches if not batch.sealed)):
            return
        first, lines, cost = batch.next, self.random.randint(1, 12), self.random.choice((1, 10, 40))
        bad = [first + lines - 1] if self.random.random() < 0.2 else []
        self.note(f"append {batch.name} {first}+{lines} cost {cost} bad {bad}")
        assert "ok" == (await self.queue.append(batch.name, first, lines, cost=cost, bad=bad)).word
        batch.next += lines
        batch.lines += lines
        numbers = [n for n in range(first, first + lines) if n not in bad]
        for n in bad:
            self._end(batch, f"{batch.name}/{n}")
        if numbers:
            self._accept([Job(batch.lane, f"{n}-0", cost) for n in numbers], [f"{batch.name}/{n}" for n in numbers])

    async def seal(self) -> None:
        if batch := self._any(batch for batch in self.batches if not batch.sealed):
            self.note(f"seal {batch.name}")
            assert "ok" == (await self.queue.seal(batch.name, batch.next)).word
            batch.sealed = True
            self._leave_when_over(batch)

    def _accept(self, jobs: list[Job], names: list[str]) -> None:
        for job, job_name in zip(jobs, names, strict=True):
            self.jobs[job.lane.name, job.entry] = job
            self.ids[job] = job_name
        self.oracle.submit(jobs[0].lane, jobs, self.now)

    # --- claim ----------------------------------------------------------------------------------------------------

    async def claim(self) -> None:
        room = self.random.choice((1, 1, 2, 4, 9))
        free, reserve = self.random.randint(0, room), self.random.choice((0, 0, 1))
        suspects, worker = self.random.choice((0, 0, 0, 1)), self.random.choice(("w1", "w2", "w3"))
        youngest = self._youngest(worker) if self.random.random() < 0.7 else None
        self.note(f"claim {worker} room {room} free {free} reserve {reserve} suspects {suspects}")
        self.note(f"  youngest {name(youngest.lease) if youngest else '-'}")
        claimed = await self.queue.claim(
            room, free=free, reserve=reserve, suspects=suspects, worker=worker,
            youngest=youngest.lease if youngest else None,
        )  # fmt: skip
        answer = self.oracle.claim(
            self.now, room=room, free=free, reserve=reserve, suspects=suspects,
            youngest=youngest.job if youngest else None,
        )  # fmt: skip
        assert answer.protects == claimed.protects
        self.note(f"  gave {[(name(one), str(one.why)) for one in claimed.leases]} {claimed.reason} {claimed.wait}")
        assert [(self.ids[job], why, _counts(job)) for job, why in answer.started] == [
            (name(one), one.why, (one.fence.delivery, one.attempts, one.crashes, one.preemptions))
            for one in claimed.leases
        ]
        assert [(self.ids[job], verdict) for job, verdict in answer.ended] == [
            (name(one.lease), one.verdict) for one in claimed.doomed
        ]
        if self.queue.trips == 1:  # of several trips, each has a reason of its own
            assert answer.reason == claimed.reason
            soonest = min(moment for moment in (*answer.moments, self.now + 1000) if moment > self.now)
            assert int(soonest - self.now) == round(claimed.wait * 1000)
        for lease, (job, _) in zip(claimed.leases, answer.started, strict=True):
            self.running.append(Running(lease, job, worker))
        await self._bury(claimed.doomed, worker)

    def _youngest(self, worker: str) -> Running | None:
        """Return the batch line that a worker would preempt first."""
        since, protected = self.oracle.running_since, self.oracle.protected
        mine = [one for one in self.running if one.worker == worker and one.job in since and one.job not in protected]
        return max(mine, key=lambda one: since[one.job], default=None)

    async def _bury(self, doomed: list[Doomed], worker: str) -> None:
        for one in doomed:
            dead = one.verdict == "dead"
            assert await self.queue.end(one.lease, CODES[one.verdict], worker=worker, dead=dead)
            self._ended(self.jobs[one.lease.fence.lane, one.lease.fence.entry])

    # --- what ends a lease ----------------------------------------------------------------------------------------

    async def finish(self) -> None:
        some = self.random.sample(self.running, min(len(self.running), self.random.choice((1, 1, 3))))
        for one in [one for one in some if one.worker == some[0].worker]:
            self.running.remove(one)
            used = self.random.choice((0, 5, 50))
            self.note(f"finish {name(one.lease)} by {one.worker} used {used}")
            if one.job.cancelled:
                assert await self.queue.end(one.lease, ErrorCode.CANCELLED, worker=one.worker)
                self.oracle.end(one.job, self.now, kept=False)
            else:
                status = self.random.choice((200, 200, 400))
                assert 1 == await self.queue.finish(one.lease, worker=one.worker, status=status, usage=Usage(used, 0))
                self.oracle.end(one.job, self.now, used)
            self.lost.append(one)
            self._ended(one.job)

    async def hand_back(self) -> None:
        if one := self._take():
            reason = self.random.choice((Reason.SHUTDOWN, Reason.PREEMPTED, Reason.OVERLOAD))
            delay = self.random.choice((0, 2)) if reason is Reason.OVERLOAD else 0
            self.note(f"hand back {name(one.lease)} {reason} delay {delay}")
            assert 1 == await self.queue.hand_back(one.lease, worker=one.worker, reason=reason, delay=delay)
            one.job.preemptions += reason is Reason.PREEMPTED
            self.oracle.hand_back(one.job, self.now, delay * 1000, preempted=reason is Reason.PREEMPTED)

    async def retry(self) -> None:
        if one := self._take():
            delay, crashed = self.random.choice((0, 0.5, 30)), self.random.random() < 0.3
            self.note(f"retry {name(one.lease)} delay {delay} crashed {crashed}")
            assert await self.queue.retry(one.lease, delay, worker=one.worker, crashed=crashed)
            one.job.crashes += crashed
            one.job.attempts += not crashed
            self.oracle.wait_again(one.job, self.now, delay * 1000, kept=True)

    async def crash(self) -> None:
        if one := self._take():
            self.note(f"crash {name(one.lease)}")
            job = one.job
            verdict = (
                "cancelled" if job.cancelled or job.lane.state == "x"
                else "interrupted" if job.answering
                else "dead" if job.crashes >= 2
                else None
            )  # fmt: skip
            doomed = await self.queue.crash(one.lease)
            job.crashes += 1
            assert [verdict] * (verdict is not None) == [each.verdict for each in doomed]
            if verdict is None:
                self.oracle.wait_again(job, self.now)
            else:
                self.oracle.end(job, self.now, kept=False)
            await self._bury(doomed, "s")

    async def first_delta(self) -> None:
        if one := self._any(one for one in self.running if one.job.lane.cls == "i"):
            self.note(f"first delta {name(one.lease)}")
            assert await self.queue.first_delta(one.lease, worker=one.worker)
            one.job.answering = one.job.answering or not one.job.cancelled

    async def renew(self) -> None:
        if self.running:
            worker = self.random.choice(self.running).worker
            mine = [one for one in self.running if one.worker == worker]
            renewed = await self.queue.renew(*(one.lease for one in mine), worker=worker)
            assert [] == renewed.lost
            marked = [one.lease.fence for one in mine if one.job.cancelled or one.job.lane.state == "x"]
            assert marked == renewed.cancelled

    async def write_by_the_lost(self) -> None:
        """Whatever an attempt writes that no longer holds its lease is refused (G3)."""
        if one := self._any(self.lost):
            self.note(f"lost {name(one.lease)} writes")
            assert 0 == await self.queue.finish(one.lease, worker=one.worker)
            assert 0 == await self.queue.hand_back(one.lease, worker=one.worker)
            assert not await self.queue.retry(one.lease, worker=one.worker)
            assert [one.lease.fence] == (await self.queue.renew(one.lease, worker=one.worker)).lost

    def _take(self) -> Running | None:
        if not self.running:
            return None
        one = self.running.pop(self.random.randrange(len(self.running)))
        self.lost.append(one)
        return one

    # --- cancel, pause, settings, time ----------------------------------------------------------------------------

    async def cancel_job(self) -> None:
        if not (job := self._any(job for job in self.jobs.values() if not job.lane.name.startswith("batch:"))):
            return
        state = self.random.choice(("cancelled", "cancelled", "expired"))
        self.note(f"cancel {self.ids[job]} as {state}")
        runs = any(one.job is job for one in self.running)
        expected = "cancelled"
        if state == "expired" and (runs or job.expires > self.now):
            expected = "running"
        elif runs:
            expected = "signalled"
            job.cancelled = True
        verdict = await self.queue.cancel(self.ids[job], cls=job.lane.cls, tenant=job.lane.tenant, state=state)
        assert expected == verdict.word
        if expected == "cancelled":
            self.oracle.drop([job], self.now)
            self._ended(job)

    async def cancel_batch(self) -> None:
        if (batch := self._any(self.batches)) and self.random.random() < 0.3:
            self.note(f"cancel {batch.name}")
            await self.queue.cancel_batch(batch.name)
            self.oracle.leave(batch.lane)
            batch.lane.state, batch.sealed = "x", True
            self._leave_when_over(batch)

    async def reap(self) -> None:
        if not (batch := self._any(self.batches)):
            return
        lane = batch.lane
        if lane.over(self.now) and lane.state in "+-":
            self.oracle.leave(lane)
            lane.state = "!"
        batch.sealed = batch.sealed or lane.state in "x!"
        waiting = [*lane.new, *(job for _, _, job in lane.back)] if lane.state in "x!" else []
        self.note(f"reap {batch.name}: {len(waiting)}")
        assert len(waiting) == await self.queue.reap(batch.name, count=self.random.choice((2, 500)))
        self.oracle.drop(waiting, self.now)
        for job in waiting:
            self._ended(job)
        self._leave_when_over(batch)

    async def pause_batch(self) -> None:
        if not (batch := self._any(self.batches)):
            return
        batch.paused = not batch.paused
        self.note(f"{'pause' if batch.paused else 'resume'} {batch.name}")
        verdict = await self.queue.pause_batch(batch.name, batch.paused)
        assert ("ended" if batch.lane.state in "x!" else "ok") == verdict.word
        if verdict.word == "ok" and batch.paused:
            self.oracle.leave(batch.lane)
            batch.lane.state = "-"
        elif verdict.word == "ok":
            batch.lane.state = "+"
            self.oracle.arrive(batch.lane, self.now)

    async def change_settings(self) -> None:
        match self.random.randrange(5):
            case 0:
                rate, burst = self.random.choice(((None, 0), (0.5, 2), (4, 4), (50, 8)))
                unit = self.random.choice(("job", "tok"))
                self.note(f"rate {rate} burst {burst} {unit}")
                self.oracle.configure(self.now, Terms(rate, burst, unit == "tok" and rate is not None))
                await self.queue.configure(rate=rate or "", burst=burst if rate else "", unit=unit if rate else "")
            case 1:
                deadline = self.random.choice((3_000, 30_000))
                self.note(f"deadline {deadline}")
                self.oracle.configure(self.now, deadline=deadline)
                await self.queue.configure(deadline=deadline)
            case 2:
                cls = self.random.choice("iibb")
                paused = self.oracle.paused | {cls: self.random.random() < 0.2}
                self.note(f"paused {paused}")
                self.oracle.configure(self.now, paused=paused)
                await self.queue.configure(**{f"paused_{cls}": "1" if paused[cls] else ""})
            case 3:
                tenant, weight = self.random.choice(TENANTS), self.random.choice((1, 2, 4))
                self.note(f"weight {tenant} {weight}")
                self.oracle.configure(self.now, weights=self.oracle.weights | {tenant: weight})
                await self.queue.configure(**{f"weight.{tenant}": weight})
            case 4:
                words = (("closed", 0, "-"), ("-", 0, "-"), ("off", 0, "-"), ("2", 3, "job"), ("20", 30, "tok"))
                moments = sorted(
                    self.now + self.random.randint(-5_000, 60_000) for _ in range(self.random.randrange(4))
                )
                plan = [(moment, *self.random.choice(words)) for moment in moments]
                self.note(f"plan {plan}")
                self.oracle.configure(
                    self.now, plan=[(at, word, burst, unit == "tok") for at, word, burst, unit in plan]
                )
                await self.queue.configure(plan="".join(f"{at} {word} {b} {unit};" for at, word, b, unit in plan))

    async def pass_time(self) -> None:
        ms = self.random.choice((1, 40, 400, 1_000, 3_000, 15_000, -2_000))
        self.note(f"time {ms:+}")
        await self.queue.pass_time(ms)

    # --- ends -----------------------------------------------------------------------------------------------------

    def _ended(self, job: Job) -> None:
        del self.jobs[job.lane.name, job.entry]
        batch = next((batch for batch in self.batches if batch.lane is job.lane), None)
        self._end(batch, self.ids[job])
        if batch is None and not any(other.lane is job.lane for other in self.jobs.values()):
            self.oracle.remove(job.lane)

    def _end(self, batch: Batch | None, job_name: str) -> None:
        self.ends[job_name] += 1
        if batch:
            batch.ended += 1
            self._leave_when_over(batch)

    def _leave_when_over(self, batch: Batch) -> None:
        if batch.sealed and batch.ended == batch.lines and batch in self.batches:
            self.batches.remove(batch)
            self.oracle.remove(batch.lane)

    def _any(self, choices: Any) -> Any:
        listed = list(choices)
        return self.random.choice(listed) if listed else None

    # --- audits ---------------------------------------------------------------------------------------------------

    async def audit_counts(self) -> None:
        """The counts that the caps compare with are what there is."""
        there = Counter(job.lane.cls for job in self.jobs.values())
        counts = await self.queue.redis.hgetall(self.queue.keys.shared[11])
        assert there == {key.decode(): int(value) for key, value in counts.items()}

    async def audit(self) -> None:
        """Streams, `back`, order and service hold what the oracle holds; pending is exactly what runs."""
        redis, keys = self.queue.redis, self.queue.keys
        for lane in self.oracle.lanes.values():
            there = [entry.decode() for entry, _ in await redis.xrange(keys.lane(lane.name))]
            assert sorted(there) == sorted(entry for name_, entry in self.jobs if name_ == lane.name)
            if there:
                rows = await redis.xpending_range(keys.lane(lane.name), "workers", "-", "+", 1000)
                held = {(one.lease.fence.entry, one.worker) for one in self.running if one.job.lane is lane}
                assert held == {(row["message_id"].decode(), row["consumer"].decode()) for row in rows}
            back = await redis.zrange(keys.back(lane.name), 0, -1, withscores=True)
            assert [(entry, due) for due, entry, _ in lane.back] == [(entry.decode(), due) for entry, due in back]
        asleep = await redis.zrange(keys.shared[7], 0, -1, withscores=True)
        lanes = self.oracle.lanes.values()
        assert {lane.name: lane.sleeps for lane in lanes if lane.sleeps < 9e15} == {k.decode(): v for k, v in asleep}
        for cls in "ib":
            order = [member.decode().rpartition("|")[2] for member in await redis.zrange(keys.order(cls), 0, -1)]
            assert sorted(lane.name for lane in lanes if lane.ready and lane.cls == cls) == sorted(order)
            ready = await redis.zrange(keys.ready(cls), 0, -1, withscores=True)
            assert self.oracle.service[cls] == {tenant.decode(): service for tenant, service in ready}

    async def come_to_rest(self) -> None:
        """Lift everything that holds jobs up, and run what is left."""
        for cls in "ib":
            await self.queue.configure(**{f"paused_{cls}": ""})
        await self.queue.configure(rate="", burst="", unit="", plan="")
        for batch in list(self.batches):
            if batch.lane.state in "+-":
                await self.queue.pause_batch(batch.name, False)
                await self.queue.seal(batch.name, batch.next)
        for one in self.running:
            assert 1 == await self.queue.finish(one.lease, worker=one.worker)
            self.ends[name(one.lease)] += 1
        await self.queue.pass_time(100_000)
        for job_name in await self.queue.drain():
            self.ends[job_name] += 1
        for batch in self.batches:
            await self.queue.reap(batch.name)

    async def audit_ends(self) -> None:
        """Every job that was accepted has ended once, and what is left has a TTL (G2, G3, G11, G16)."""
        redis, keys = self.queue.redis, self.queue.keys
        assert [] == [job_name for job_name, times in self.ends.items() if times != 1]
        singles = [job_name for job_name in self.ids.values() if "/" not in job_name]
        states = [await redis.hget(keys.job(job_id), "state") for job_id in singles]
        assert [] == [job_id for job_id, state in zip(singles, states, strict=True) if state is None]
        for batch in self.opened:
            record = {k.decode(): v.decode() for k, v in (await redis.hgetall(keys.batch(batch))).items()}
            lines = [int(fields[b"n"]) for _, fields in await redis.xrange(keys.results(batch))]
            assert int(record["total"]) == len(lines) == len(set(lines))
            assert len(lines) == int(record["completed"]) + int(record["failed"])
            assert record["status"] in ("completed", "cancelled", "expired")
        permanent = [key.decode() for key in await redis.keys("*") if await redis.ttl(key) == -1]
        assert [] == [key for key in permanent if not key.endswith((":config", ":dead"))]


def _counts(job: Job) -> tuple[int, int, int, int]:
    return job.delivery, job.attempts, job.crashes, job.preemptions


#: What the walk does, each with its weight.
ACTIONS = {
    Walk.submit: 14, Walk.open_batch: 2, Walk.append_lines: 5, Walk.seal: 1, Walk.claim: 20, Walk.finish: 16,
    Walk.hand_back: 4, Walk.retry: 3, Walk.crash: 5, Walk.first_delta: 1, Walk.renew: 2, Walk.write_by_the_lost: 2,
    Walk.cancel_job: 3, Walk.cancel_batch: 1, Walk.reap: 2, Walk.pause_batch: 2, Walk.change_settings: 2,
    Walk.pass_time: 12,
}  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2, 3, 4])
async def test_every_claim_is_the_oracles_and_nothing_is_lost(queue: ScriptedQueue, seed: int) -> None:
    """No job is lost, none ends twice, counts are true, each claim is exact (G2, G3, G7, G9, G11, G14, G16, G17)."""
    walk = Walk(queue, seed)
    actions, weights = list(ACTIONS), list(ACTIONS.values())
    try:
        for step in range(STEPS):
            await walk.random.choices(actions, weights)[0](walk)
            await walk.audit_counts()
            if step % 25 == 0:
                await walk.audit()
        await walk.come_to_rest()
        await walk.audit_ends()
    except BaseException:
        print(f"seed {seed}, step {step}; the last steps:", *walk.steps, sep="\n  ")
        raise
