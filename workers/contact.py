"""Contact: for how long this worker has seen Redis without a gap.

A lease that was not renewed says nothing while Redis was away, so nobody reclaims before one full lease of unbroken
contact with the same server (G4). The contact is noted by whoever talks to Redis, and asked by the sweeper.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Contact:
    """Unbroken contact with one server. `gap` is the longest time between two signs of life that counts as none."""

    def __init__(self, gap: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._gap = gap
        self._clock = clock
        self._lock = threading.Lock()
        self._since: float | None = None
        self._last = 0.0
        self._run_id = ""

    def seen(self) -> None:
        """Redis answered."""
        with self._lock:
            now = self._clock()
            if self._since is None or now - self._last > self._gap:
                self._since = now
            self._last = now

    def lost(self) -> None:
        """Redis did not answer, or did not answer in time."""
        with self._lock:
            self._since = None

    def server(self, run_id: str) -> None:
        """The server named itself: another `run_id` is another server, or the same one started again."""
        with self._lock:
            if self._run_id and run_id != self._run_id:
                self._since = None
            self._run_id = run_id

    def unbroken(self) -> float:
        """Return the seconds of unbroken contact until now."""
        with self._lock:
            now = self._clock()
            if self._since is None or now - self._last > self._gap:
                return 0.0
            return now - self._since
