"""What a worker holds: its leases, from their claim to their outcome, in that order, and how many there are of a kind.

The counts are kept, not made anew: several times with each trip it is asked what may be claimed, and to go through 150
leases each time took 1.6 ms of a worker's CPU for each short request beside them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from llmq.scheduler.job import TrafficClass
from llmq.scheduler.lease import Fence, Lease


class Held(Collection[Lease]):
    """The leases of one worker, by their fences."""

    def __init__(self) -> None:
        self._leases: dict[Fence, Lease] = {}
        self.interactive = 0
        self.suspects = 0
        self.in_last_attempt = 0

    @property
    def batch(self) -> int:
        """How many are of the class batch."""
        return len(self._leases) - self.interactive

    def add(self, lease: Lease) -> None:
        """Hold a lease, in place of one with the same fence."""
        if (old := self._leases.get(lease.fence)) is not None:
            self._count(old, -1)
        self._leases[lease.fence] = lease
        self._count(lease, 1)

    def drop(self, lease: Lease) -> None:
        """Hold this very lease no longer; nothing where it is not held."""
        if self._leases.get(lease.fence) is lease:
            del self._leases[lease.fence]
            self._count(lease, -1)

    def get(self, fence: Fence) -> Lease | None:
        """Return the lease of a fence."""
        return self._leases.get(fence)

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def __contains__(self, lease: object) -> bool:
        return isinstance(lease, Lease) and self._leases.get(lease.fence) is lease

    def _count(self, lease: Lease, by: int) -> None:
        self.interactive += by * (lease.cls is TrafficClass.INTERACTIVE)
        self.suspects += by * lease.suspect
        self.in_last_attempt += by * lease.in_last_attempt
