"""The Redis keys of one queue: one function a key, each with type, content and TTL.

All keys of a queue share one hash tag, `llmq:{<queue>}:`, so that a script may touch them together in a cluster. Key
names are made here and nowhere else; scripts get every key that they touch in KEYS.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from llmq.scheduler.lease import batch_of, lane_of_batch


@dataclass(frozen=True)
class QueueKeys:
    """Names the keys of the queue `queue`."""

    queue: str

    @cached_property
    def prefix(self) -> str:
        """What all keys of the queue begin with."""
        return f"llmq:{{{self.queue}}}:"

    @cached_property
    def shared(self) -> tuple[str, ...]:
        """The keys that every script begins with, in the order of `queue.lua`."""
        names = (
            "config", "bucket", "lanes", "ready:i", "ready:b", "order:i", "order:b", "asleep", "tries", "starts",
            "ending", "counts", "held", "dead", "batches", "workers", "bell:i", "bell:b",
        )  # fmt: skip
        return tuple(self.prefix + name for name in names)

    @property
    def config(self) -> str:
        """Hash, permanent: the live settings, and the format of the data."""
        return self.prefix + "config"

    @property
    def bucket(self) -> str:
        """Hash, a week from the last batch start or arrival: tokens, unit, last refill, last start left to finish.

        Also since when batch waits, and since when each tenant that has some waiting has had any.
        """
        return self.prefix + "bucket"

    @property
    def lanes(self) -> str:
        """Hash lane -> state, class, tenant, due; a field goes with its lane."""
        return self.prefix + "lanes"

    def ready(self, letter: str) -> str:
        """Zset tenant -> service: the tenants of a class (`i`, `b`) with something to claim."""
        return f"{self.prefix}ready:{letter}"

    def order(self, letter: str) -> str:
        """Zset, all scores 0, of `tenant|due|lane`: the lanes with something to claim, not those that are paused."""
        return f"{self.prefix}order:{letter}"

    @property
    def asleep(self) -> str:
        """Zset lane -> ms: lanes whose next entry is due later, or whose results wait for a collector (9e15)."""
        return self.prefix + "asleep"

    @property
    def tries(self) -> str:
        """Hash `lane|entry` -> last delivery, attempts, crashes, preemptions, flags: of entries that came back."""
        return self.prefix + "tries"

    @property
    def starts(self) -> str:
        """Zset `lane|entry` -> ms: when each running batch job was started; negative while it may be preempted."""
        return self.prefix + "starts"

    @property
    def ending(self) -> str:
        """Zset lane -> ms: batches that were cancelled or are over their window, until all lines have ended."""
        return self.prefix + "ending"

    @property
    def counts(self) -> str:
        """Hash class letter -> jobs that wait or run (the caps compare with it); a field goes at 0."""
        return self.prefix + "counts"

    @property
    def held(self) -> str:
        """String: bytes of results held, all batches; TTL as results have."""
        return self.prefix + "held"

    @property
    def dead(self) -> str:
        """Stream of dead letters, each kept 30 days."""
        return self.prefix + "dead"

    @property
    def batches(self) -> str:
        """Zset batch -> when it was made, in ms; TTL from the end of the last batch."""
        return self.prefix + "batches"

    @property
    def workers(self) -> str:
        """Zset worker -> last heartbeat in ms; a week from the last heartbeat."""
        return self.prefix + "workers"

    def bell(self, letter: str) -> str:
        """List of at most 64 wake-ups of a class; a minute from the last ring."""
        return f"{self.prefix}bell:{letter}"

    @property
    def totals(self) -> str:
        """Hash of what workers have counted (`totals.py`); a week from the last heartbeat."""
        return self.prefix + "totals"

    @property
    def api_keys(self) -> str:
        """Hash key id -> record (tenant, digest, limits), permanent; the field `stamp` changes with every write."""
        return self.prefix + "keys"

    def limit(self, key_id: str) -> str:
        """Hash: what an API key has left of requests and LLM tokens; TTL until it is full again, and a minute more."""
        return f"{self.prefix}limit:{key_id}"

    def passes(self, key_id: str) -> str:
        """Zset call -> ms when its lease ends: an API key's calls that run or wait; TTL of two leases."""
        return f"{self.prefix}passes:{key_id}"

    @property
    def sweeper(self) -> str:
        """String: who sweeps now; TTL of one sweep interval."""
        return self.prefix + "sweeper"

    @property
    def decisions(self) -> str:
        """Stream of at most 100: when batch yielded to chat all over the fleet, and why; a week from the last one."""
        return self.prefix + "decisions"

    @property
    def probe(self) -> str:
        """String: what a health check writes to see that Redis takes writes; TTL of ten seconds."""
        return self.prefix + "probe"

    def hold(self, name: str) -> str:
        """String: which process does what only one may do at a time (a gateway, for a batch); TTL of ten seconds."""
        return f"{self.prefix}hold:{name}"

    def lane(self, lane: str) -> str:
        """Stream with the group `workers`: waiting and running jobs of a lane; gone with its last job."""
        return f"{self.prefix}lane:{lane}"

    def back(self, lane: str) -> str:
        """Zset entry -> line number (0 for single jobs), or due time in ms: entries of a lane that wait again."""
        return f"{self.prefix}lane:{lane}:back"

    def job(self, job_id: str) -> str:
        """Hash: a single job's lane, entry, client, expiry, and its result or error; TTL from its end."""
        return f"{self.prefix}job:{job_id}"

    def batch(self, batch_id: str) -> str:
        """Hash: a batch's record (counts, status, times, collectors); TTL from its end."""
        return f"{self.prefix}b:{batch_id}"

    def results(self, batch_id: str) -> str:
        """Stream: the results of a batch in the order of completion; TTL from the batch's end."""
        return f"{self.prefix}b:{batch_id}:results"

    def worker(self, worker_id: str) -> str:
        """Hash: a worker's heartbeat; gone when the worker is."""
        return f"{self.prefix}worker:{worker_id}"

    def control(self, worker_id: str) -> str:
        """List of commands to a worker (cancel, drain); a minute from the last one."""
        return f"{self.prefix}ctl:{worker_id}"

    def inbox(self, client_id: str) -> str:
        """Stream, bounded: deltas and ends for one client; ten minutes from the last entry."""
        return f"{self.prefix}inbox:{client_id}"

    def of_lane(self, lane: str) -> tuple[str, str]:
        """Return a lane's stream and its `back`."""
        return self.lane(lane), self.back(lane)

    def of_batch(self, batch_id: str) -> tuple[str, str, str, str]:
        """Return a batch's stream, `back`, record and results."""
        return *self.of_lane(lane_of_batch(batch_id)), self.batch(batch_id), self.results(batch_id)

    def of_ending(self, lane: str, key: str, reply_to: str) -> tuple[str, str, str, str]:
        """Return what the end of a job touches: stream, `back`, record, and where the end is told."""
        if batch_id := batch_of(lane):
            return self.of_batch(batch_id)
        return *self.of_lane(lane), self.job(key), self.inbox(reply_to)
