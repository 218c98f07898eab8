"""The policy of claim.lua as a pure model: what the next claim must give, said a second time and without Redis.

The random walk (`tests/redis/test_random_walk.py`) tells it everything that happens to a queue, and compares each claim
of the real script with its answer. Time is a number that the caller passes in. The model starts one job at a time and
looks at everything again in between; that the script takes several at once must not show. It knows nothing of
leases, streams, candidate lanes or bounds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

NEVER = math.inf

#: A little less than what an ordinary job adds to its tenant's service.
ALMOST_A_TURN = {"i": 0.99, "b": 250}

#: Deaths of worker or engine with a job in flight after which it is not run again.
DEAD = 3


@dataclass(eq=False)
class Job:
    """A job that was accepted and has not ended."""

    lane: Lane
    entry: str
    cost: int
    expires: float = NEVER
    delivery: int = 0
    attempts: int = 0
    crashes: int = 0
    preemptions: int = 0
    cancelled: bool = False
    answering: bool = False

    @property
    def place(self) -> int:
        """Where it waits again: by line number; single jobs by their ids alone."""
        return int(self.entry.partition("-")[0]) if self.lane.name.startswith("batch:") else 0


@dataclass(eq=False)
class Lane:
    """A batch, or a tenant's single jobs of a class. `ready`: something can be claimed; `sleeps`: not until then."""

    name: str
    cls: str
    tenant: str
    due: int = 0
    state: str = "+"
    new: deque[Job] = field(default_factory=deque)
    back: list[tuple[float, str, Job]] = field(default_factory=list)
    ready: bool = False
    sleeps: float = NEVER

    def over(self, now: float) -> bool:
        """Whether its window is over."""
        return 0 < self.due <= now


@dataclass
class Answer:
    """What a claim gives: started jobs and why, jobs to end and why, the reason for no more, when to look again."""

    suspects: int
    started: list[tuple[Job, str]] = field(default_factory=list)
    ended: list[tuple[Job, str]] = field(default_factory=list)
    reason: str = "empty"
    moments: list[float] = field(default_factory=list)
    protects: bool = False


@dataclass(frozen=True)
class Terms:
    """What holds at a moment: the bucket's terms (no rate: unlimited), whether batch may run, since when again."""

    rate: float | None
    burst: float
    by_tokens: bool
    open: bool = True
    opened: float = 0


class Oracle:
    """A queue as the policy sees it."""

    def __init__(self) -> None:
        self.lanes: dict[str, Lane] = {}
        self.service: dict[str, dict[str, float]] = {"i": {}, "b": {}}
        self.weights: dict[str, float] = {}
        self.paused = {"i": False, "b": False}
        self.terms = Terms(None, 0, False)
        self.plan: list[tuple[float, str, float, bool]] = []
        self.deadline = 30_000.0
        self.tokens: float | None = None
        self.refilled_at = 0.0
        self.running_since: dict[Job, float] = {}
        self.protected: set[Job] = set()
        self.kept_start = 0.0
        self.batch_waits_since = 0.0
        self.came: dict[str, float] = {}

    # --- the claim ------------------------------------------------------------------------------------------------

    def claim(
        self, now: float, *, room: int, free: int, reserve: int, suspects: int, youngest: Job | None = None
    ) -> Answer:
        """Give the next jobs to one worker; `youngest` is the batch line that it would preempt first."""
        answer = Answer(suspects)
        self._wake(now, answer)
        terms = self.terms_at(now)
        answer.moments += [moment for moment, *_ in self.plan if moment > now][:1]
        waits = bool(self.service["b"])
        may_batch = waits and not self.paused["b"] and terms.open
        tokens = self._tokens_at(now, terms)
        spent = False

        if may_batch and room > 0:
            kept = [self.running_since[job] for job in self.protected]
            last_start = max(self.kept_start, *kept, self.batch_waits_since, terms.opened)
            if last_start > now:  # the clock was set back
                last_start = now
                self.kept_start = min(self.kept_start, now)
                self.batch_waits_since = min(self.batch_waits_since, now)
                self.running_since |= {job: min(self.running_since[job], now) for job in self.protected}
            if last_start + self.deadline <= now:
                begun = min(self.running_since[youngest], now) if youngest else 0.0
                if youngest and begun > last_start:
                    self.protected.add(youngest)
                    last_start, room, answer.protects = begun, room - 1, True
                due = last_start + self.deadline <= now and room > 0
                if due and (job := self._start("b", "deadline", now, answer)):
                    tokens = max(min(tokens, -terms.burst), tokens - (job.cost if terms.by_tokens else 1))
                    spent = True
            answer.moments.append(last_start + self.deadline)
        while not self.paused["i"] and len(answer.started) < room and self._start("i", "chat", now, answer):
            pass
        while may_batch:
            if free - len(answer.started) <= reserve:
                answer.reason = "busy"
                break
            if terms.rate and tokens < 1:
                answer.reason = "bucket"
                answer.moments.append(now + math.ceil((1 - tokens) * 1000 / terms.rate))
                break
            if not (job := self._start("b", "bucket", now, answer)):
                break
            tokens -= job.cost if terms.by_tokens else 1
            spent = True
        if waits and not may_batch:
            answer.reason = "paused" if self.paused["b"] else "window"
        if spent and terms.rate:
            self.tokens, self.refilled_at = tokens, max(self.refilled_at, now)
        return answer

    def _start(self, cls: str, why: str, now: float, answer: Answer) -> Job | None:
        """Start one job of a class: of the tenant with the least service, of its lane that is due first."""
        for tenant in sorted(self.service[cls], key=lambda name: (self.service[cls][name], name)):
            lanes = [lane for lane in self.lanes.values() if lane.ready and (lane.cls, lane.tenant) == (cls, tenant)]
            for lane in sorted(lanes, key=lambda lane: (lane.due, lane.name)):
                if lane.over(now):
                    self.leave(lane)
                    lane.state = "!"
                elif job := self._take(lane, now, answer):
                    answer.started.append((job, why))
                    answer.suspects += job.crashes > 0
                    if cls == "b":
                        self.running_since[job] = now
                        if why == "deadline" or job.preemptions >= 3:
                            self.protected.add(job)
                    if tenant in self.service[cls]:
                        cost = job.cost if cls == "b" else 1
                        self.service[cls][tenant] += cost / self.weights.get(tenant, 1)
                    return job
        return None

    def _take(self, lane: Lane, now: float, answer: Answer) -> Job | None:
        """Take a lane's next job: those that wait again come before those that never started."""
        held_back = 0
        job: Job | None = None
        while not job:
            due = [waiting for waiting in lane.back if waiting[0] <= now]
            if len(due) > held_back:
                if due[held_back][2].crashes and answer.suspects:
                    held_back += 1
                    continue
                lane.back.remove(due[held_back])
                taken = due[held_back][2]
            elif lane.new:
                taken = lane.new.popleft()
            else:
                break
            taken.delivery += 1
            if taken.cancelled or taken.answering or taken.expires <= now or taken.crashes >= DEAD:
                verdict = (
                    "cancelled" if taken.cancelled
                    else "interrupted" if taken.answering
                    else "expired" if taken.expires <= now
                    else "dead"
                )  # fmt: skip
                answer.ended.append((taken, verdict))
            else:
                job = taken
        if (job or not held_back) and not lane.new and not (lane.back and lane.back[0][0] <= now):
            self.leave(lane)
            if lane.back:
                lane.sleeps = lane.back[0][0]
                answer.moments.append(lane.sleeps)
        return job

    def _wake(self, now: float, answer: Answer) -> None:
        asleep = sorted((lane.sleeps, lane.name, lane) for lane in self.lanes.values() if lane.sleeps < NEVER)
        for due, _, lane in asleep:
            if due > now:
                answer.moments.append(due)
                break
            self.arrive(lane, now)

    # --- the bucket and its plan ----------------------------------------------------------------------------------

    def terms_at(self, now: float) -> Terms:
        """Return what holds at a moment: the plan's last change that has begun, or the settings."""
        terms, opened = self.terms, 0.0
        for moment, word, burst, by_tokens in self.plan:
            if moment <= now:
                opened = moment if word != "closed" and not terms.open else opened
                rate = None if word in ("off", "-", "closed") else float(word)
                same = word in ("-", "closed")
                terms = Terms(
                    self.terms.rate if same else rate,
                    self.terms.burst if same else burst,
                    self.terms.by_tokens if same else by_tokens,
                    word != "closed",
                    opened,
                )
        return terms

    def _tokens_at(self, now: float, terms: Terms) -> float:
        if terms.rate is None:
            return math.inf
        if self.tokens is None:
            return terms.burst
        return min(terms.burst, self.tokens + max(0, now - self.refilled_at) * terms.rate / 1000)

    def configure(self, now: float, terms: Terms | None = None, **changes: object) -> None:
        """Change settings; the bucket is settled at the old terms first."""
        before = self.terms_at(now)
        if before.rate is not None and self.tokens is not None:
            self.tokens, self.refilled_at = self._tokens_at(now, before), max(now, self.refilled_at)
        was_paused = self.paused["b"]
        self.terms = terms or self.terms
        for name, value in changes.items():
            setattr(self, name, value)
        if was_paused and not self.paused["b"] and self.service["b"]:
            self.batch_waits_since = now

    # --- what happens to lanes and jobs ---------------------------------------------------------------------------

    def submit(self, lane: Lane, jobs: Iterable[Job], now: float) -> None:
        """Add jobs that are new."""
        self.lanes.setdefault(lane.name, lane).new.extend(jobs)
        self.arrive(lane, now)

    def arrive(self, lane: Lane, now: float) -> None:
        """Something can be claimed from a lane; a tenant that arrives is almost a turn behind."""
        if lane.state != "+":
            return
        lane.sleeps = NEVER
        lane.ready = True
        service = self.service[lane.cls]
        if lane.tenant not in service:
            if lane.cls == "b":
                self.came[lane.tenant] = now
                if not service:
                    self.batch_waits_since = now
            behind = ALMOST_A_TURN[lane.cls] / self.weights.get(lane.tenant, 1)
            service[lane.tenant] = min(service.values()) + behind if service else 0

    def leave(self, lane: Lane) -> None:
        """Nothing can be claimed from a lane."""
        lane.ready, lane.sleeps = False, NEVER
        if not any(
            other.ready and (other.cls, other.tenant) == (lane.cls, lane.tenant) for other in self.lanes.values()
        ):
            self.service[lane.cls].pop(lane.tenant, None)
            if lane.cls == "b":
                self.came.pop(lane.tenant, None)
        if not self.service["b"]:
            self.batch_waits_since = 0

    def remove(self, lane: Lane) -> None:
        """A lane's last job has ended."""
        self.leave(lane)
        del self.lanes[lane.name]

    def wait_again(self, job: Job, now: float, delay: float = 0, *, kept: bool = False) -> None:
        """A job that ran waits again; `kept` says whether its start counts for the deadline."""
        self._settle(job, kept)
        lane = job.lane
        due = now + delay if delay else job.place
        lane.back.append((due, job.entry, job))
        lane.back.sort(key=lambda waiting: waiting[:2])
        if not delay:
            self.arrive(lane, now)
        elif lane.state == "+" and not lane.ready:
            lane.sleeps = min(lane.sleeps, due)

    def hand_back(self, job: Job, now: float, delay: float = 0, *, preempted: bool) -> None:
        """A job that ran waits again; where it made way its tenant has its charge back."""
        if preempted:
            self._correct(job, now, -job.cost)
        self.wait_again(job, now, delay)

    def end(self, job: Job, now: float, used: int = 0, *, kept: bool = True) -> None:
        """A job that ran ends; its tenant's service, if it was charged to that, is corrected by what it used really."""
        if used:
            self._correct(job, now, used - job.cost)
        self._settle(job, kept)

    def drop(self, jobs: Iterable[Job], now: float) -> None:
        """Jobs that wait end without having run."""
        for job in jobs:
            lane = job.lane
            lane.back = [waiting for waiting in lane.back if waiting[2] is not job]
            if job in lane.new:
                lane.new.remove(job)
            if not lane.new and not (lane.back and lane.back[0][0] <= now):
                self.leave(lane)
                if lane.back and lane.state == "+":
                    lane.sleeps = lane.back[0][0]

    def _correct(self, job: Job, now: float, tokens: float) -> None:
        """Correct the service to which a running job was charged; there is none where its tenant was away since."""
        service, tenant = self.service["b"], job.lane.tenant
        came = self.came.get(tenant, 0.0)
        if job.lane.cls == "b" and tenant in service and (self.running_since.get(job, 0.0) >= came or came > now):
            service[tenant] += tokens / self.weights.get(tenant, 1)

    def _settle(self, job: Job, kept: bool) -> None:
        started = self.running_since.pop(job, None)
        self.protected.discard(job)
        if kept and started is not None:
            self.kept_start = max(self.kept_start, started)
