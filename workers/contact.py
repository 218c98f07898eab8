"""Contact: for how long this worker has seen Redis without a gap.

A lease that was not renewed says nothing while Redis was away, so nobody reclaims before one full lease of unbroken
contact with the same server, whose clock has not leapt (G4). Whoever talks to Redis notes the contact; the sweeper asks
whether it is enough.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from llmq.scheduler.logs import Event, note

#: Even a short lease wants this much contact, twice the longest time between two heartbeats: by then every worker has
#: heard of a lease that was made shorter, and renews in time for it.
LEAST_CONTACT_S = 5.0


class Contact:
    """Unbroken contact with one server. More than half a lease between two signs of life breaks it.

    An answer proves that Redis lived after its question was sent, and no more: it may have waited on its way, and come
    in the middle of an outage. So a sign of life has the time of the question.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._lock = threading.Lock()
        self._since: float | None = None
        self._last = 0.0
        self._away = False
        self._run_id = ""
        self._ahead = math.inf

    def seen(self, asked_at: float) -> None:
        """Redis answered what it was asked at that time of the clock."""
        with self._lock:
            now = self._clock()
            back, away_s, self._away = self._away, now - self._last, False
            if self._since is None or self._broken(now):
                self._since = now
            self._last = max(self._last, asked_at)
        if back:
            note(Event.REDIS_BACK, away_s=away_s)

    def lost(self) -> None:
        """Redis did not answer, or did not answer in time."""
        with self._lock:
            was_there, self._away = not self._away, True
            self._since = None
        if was_there:
            note(Event.REDIS_LOST)

    def server(self, run_id: str) -> None:
        """The server named itself: another `run_id` is another server, or the same one started again."""
        with self._lock:
            if self._run_id and run_id != self._run_id:
                self._since = None
            self._run_id = run_id

    def redis_time(self, seconds: float, asked_at: float) -> None:
        """Redis told its time when it was asked at that time of the clock.

        Where its clock was set on, or its host slept, all leases look older than they are: nobody was there to renew
        them in the time that never was.
        """
        with self._lock:
            # It told it between the question and now: both bounds are on the side of "nothing happened".
            if seconds - self._clock() - self._ahead > self._lease_s / 4:
                self._since = None
            self._ahead = seconds - asked_at

    def lease_is(self, seconds: float) -> None:
        """Take over the live setting. Made shorter, it counts from now on: others have yet to hear of it."""
        with self._lock:
            if seconds < self._lease_s:
                self._since = None
            self._lease_s = seconds

    def unbroken(self) -> float:
        """Return the seconds of unbroken contact until now."""
        with self._lock:
            now = self._clock()
            return 0.0 if self._since is None or self._broken(now) else now - self._since

    def wanting(self) -> float:
        """Return the seconds of contact that are missing before anybody may be reclaimed from; 0: none."""
        return max(0.0, max(self._lease_s, LEAST_CONTACT_S) - self.unbroken())

    def long_enough(self) -> bool:
        """Whether a lease that looks as if it had run out has."""
        return self.wanting() == 0

    def _broken(self, now: float) -> bool:
        return now - self._last > self._lease_s / 2
