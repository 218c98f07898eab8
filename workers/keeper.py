"""The keeper: renews the leases of running jobs and writes the heartbeat, in a thread of its own.

A thread with its own connection, because a lease that depends on the event loop lapses whenever the loop is busy.
What it learns (leases that were lost, jobs that were cancelled, new live settings) it passes to the loop; it decides
nothing.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from redis import Redis

from llmq.scheduler import scripts
from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.lease import Fence
from llmq.workers.contact import Contact
from llmq.workers.reach import OUT_OF_REACH

#: However long the lease, a worker is heard of this often: settings, cancels and the list of workers go by it.
LONGEST_INTERVAL_S = 2.5

#: After a round that failed the next one comes sooner: the leases go on running out.
RETRY_S = 0.5

#: What the thread's calls may take. Well under a lease, so that a connection that died is given up in time.
TIMEOUT_S = 2.5

#: Leases renewed in one script call: about 4 ms of Redis' time.
RENEW_AT_ONCE = 200

#: A worker that cannot reach Redis keeps its jobs running for this long past their lease, then aborts them.
PATIENCE_S = 60.0

#: How long a heartbeat stays readable. Liveness is the age of the last one, not its presence.
HEARTBEAT_TTL_S = 60.0


class Listener(Protocol):
    """What the keeper tells the worker; every method is called in the event loop."""

    def lease_lost(self, fence: Fence) -> None:
        """The lease belongs to another delivery."""

    def lease_overdue(self, fence: Fence) -> None:
        """The lease could not be renewed for too long: whose it is by now, nobody here knows."""

    def job_cancelled(self, fence: Fence) -> None:
        """Somebody cancelled the job while it runs."""

    def beaten(self, beat: scripts.Beat) -> None:
        """A heartbeat was written; it brought Redis' time and the live settings."""

    def keeper_died(self, error: BaseException) -> None:
        """The thread ended by an error of its own: without it no lease is safe."""


@dataclass(slots=True)
class _Kept:
    renewed_at: float


class LeaseKeeper:
    """Keeps the leases that it is given until they are dropped.

    `lease_s` is the length of a lease; each is renewed at least four times in it. `heartbeat` returns the fields to
    write, `totals` what the worker has counted; both are called in the thread.
    """

    def __init__(
        self,
        redis: Redis,
        keys: QueueKeys,
        consumer: str,
        contact: Contact,
        listener: Listener,
        heartbeat: Callable[[], Mapping[str, str | int]],
        totals: Callable[[], Mapping[str, int]] = dict,
        *,
        lease_s: float,
    ) -> None:
        self._redis = redis
        self._keys = keys
        self._consumer = consumer
        self._contact = contact
        self._listener = listener
        self._heartbeat = heartbeat
        self._totals = totals
        self._told: Mapping[str, int] = {}
        self.lease_s = lease_s
        self._lock = threading.Lock()
        self._kept: dict[Fence, _Kept] = {}
        self._wake = threading.Event()
        self._stopping = False
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="llmq-leases", daemon=True)

    def first_beat(self) -> scripts.Beat:
        """Write the first heartbeat, before the first claim; raises what Redis raises."""
        began = time.monotonic()
        beat = self._beat()
        self._contact.seen(began)
        self._contact.redis_time(beat.now_ms / 1000, began)
        return beat

    def last_beat(self) -> None:
        """Report what was counted since the last heartbeat, after the thread has ended; raises what Redis raises."""
        self._beat()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def keep(self, fence: Fence) -> None:
        """Keep a lease that was just claimed."""
        with self._lock:
            self._kept[fence] = _Kept(time.monotonic())

    def drop(self, fence: Fence) -> None:
        """Keep a lease no longer: its job is settled, or it was lost."""
        with self._lock:
            self._kept.pop(fence, None)

    def holds(self, fence: Fence) -> bool:
        """Whether the lease is kept."""
        with self._lock:
            return fence in self._kept

    def beat_soon(self) -> None:
        """Write the heartbeat now, because something in it has changed."""
        self._wake.set()

    def stop(self) -> None:
        """End the thread."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def _run(self) -> None:
        try:
            kept = True
            while not self._stopping:
                interval = min(self.lease_s / 4, LONGEST_INTERVAL_S)
                self._wake.wait(interval if kept else min(interval, RETRY_S))
                self._wake.clear()
                if not self._stopping:
                    kept = self._round()
        except BaseException as error:  # whatever it is, the worker must not go on without its leases
            self._tell(self._listener.keeper_died, error)

    def _round(self) -> bool:
        """Renew all leases, then write the heartbeat; whether Redis took both."""
        began = time.monotonic()
        try:
            self._renew()
            asked_at = time.monotonic()
            beat = self._beat()
            self._contact.redis_time(beat.now_ms / 1000, asked_at)
            self._tell(self._listener.beaten, beat)
        except OUT_OF_REACH:
            self._contact.lost()
            self._give_up_overdue()
            return False
        self._contact.seen(began)
        return True

    def _beat(self) -> scripts.Beat:
        totals = self._totals()
        call = scripts.beat(
            self._keys,
            self._consumer,
            ttl_ms=round(HEARTBEAT_TTL_S * 1000),
            fields=self._heartbeat(),
            totals=totals,
            told=self._told,
        )
        beat = scripts.run_sync(self._redis, call)
        self._told = totals
        return beat

    def _renew(self) -> None:
        with self._lock:
            fences = list(self._kept)
        for first in range(0, len(fences), RENEW_AT_ONCE):
            some = fences[first : first + RENEW_AT_ONCE]
            renewed = scripts.run_sync(self._redis, scripts.renew(self._keys, self._consumer, some))
            now = time.monotonic()
            with self._lock:
                for fence in some:
                    if kept := self._kept.get(fence):
                        kept.renewed_at = now
                for fence in renewed.lost:
                    self._kept.pop(fence, None)
            for fence in renewed.lost:
                self._tell(self._listener.lease_lost, fence)
            for fence in renewed.cancelled:
                self._tell(self._listener.job_cancelled, fence)

    def _give_up_overdue(self) -> None:
        limit = time.monotonic() - self.lease_s - PATIENCE_S
        with self._lock:
            overdue = [fence for fence, kept in self._kept.items() if kept.renewed_at < limit]
            for fence in overdue:
                del self._kept[fence]
        for fence in overdue:
            self._tell(self._listener.lease_overdue, fence)

    def _tell(self, method: Callable[..., None], *values: object) -> None:
        try:
            self._loop.call_soon_threadsafe(method, *values)
        except RuntimeError:
            pass  # the loop is closed: the process is ending
