"""The map of a cluster: which primary holds which hash slot.

All keys of one queue have one hash tag, hence one hash slot and one node; a client of several queues talks to several.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from redis import exceptions
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from llmq.scheduler.route import Address, target

#: So many nodes that failed are remembered: more do not fail in a cluster that goes on.
MOST_FAILED = 8

#: How old a map may be. Nothing that is sent depends on it being young.
LOOK_AGAIN_S = 30.0


class ClusterMap:
    """Which primary holds each hash slot, as far as is known; `doubtful` until `read` has been told anew."""

    cluster = True
    question: tuple[str, ...] = ("CLUSTER SLOTS",)

    #: Nobody has to show a role: a node that does not hold a slot says so itself, to reads as well.
    proof: tuple[str, ...] = ()
    named: Address | None = None

    def __init__(self, seeds: Iterable[Address], clock: Callable[[], float] = time.monotonic) -> None:
        self._seeds = list(seeds)
        self._clock = clock
        self._asked_at = float("-inf")
        self._primaries: list[Address] = []
        self._others: list[Address] = []
        self._owners: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._failed: list[Address] = []
        self._told_by: Address | None = None
        self.doubtful = True

    @property
    def due(self) -> bool:
        """Whether the map is old. A node that has lost a slot says so itself, but none says who else has come or gone:
        whoever knew only nodes that were replaced since would have nobody left to ask."""
        if (now := self._clock()) - self._asked_at < LOOK_AGAIN_S:
            return False
        self._asked_at = now
        return True

    @property
    def primaries(self) -> list[Address]:
        """The primaries that hold slots."""
        return list(self._primaries)

    @property
    def known(self) -> set[Address]:
        """All nodes that may be needed: those of the cluster, and those that the URL names."""
        return {*self._primaries, *self._others, *self._seeds}

    def owner(self, key: bytes | None) -> Address:
        """Return the node to ask for a key; for None any primary. Raises SlotNotCoveredError."""
        owner = next(iter(self._primaries), None) if key is None else self._owners[key_slot(key)]
        if owner is None:
            self.doubtful = True
            raise exceptions.SlotNotCoveredError("no node of the cluster holds the hash slot of this key")
        return owner

    def guides(self) -> list[Address]:
        """Return the nodes to ask for the map, one after the other; those that failed of late come last."""
        known = dict.fromkeys([*self._primaries, *self._others, *self._seeds])
        return sorted(known, key=lambda address: address in self._failed)

    def read(self, reply: Sequence[Any], guide: Address) -> None:
        """Take over what a node answered to CLUSTER SLOTS."""
        owners: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        others: list[Address] = []
        for first, last, primary, *replicas in reply:
            owners[first : last + 1] = [_address(primary, guide)] * (last + 1 - first)
            others += [_address(replica, guide) for replica in replicas]
        self._owners = owners
        self._primaries = [address for address in dict.fromkeys(owners) if address is not None]
        self._others = list(dict.fromkeys(others))
        if guide in self._failed:
            self._failed.remove(guide)
        self._told_by = guide
        self._asked_at = self._clock()
        self.doubtful = False

    def proved(self, told: Any) -> None:
        """Nothing: no node is asked."""

    def doubt(self, failed: Address) -> None:
        """Note that a node cannot be used: another may have taken its place, and who named it may not have heard."""
        doubted = [one for one in dict.fromkeys((self._told_by, failed)) if one and one not in self._failed]
        self._failed = [*self._failed, *doubted][-MOST_FAILED:]
        self.doubtful = True

    def moved(self, error: exceptions.MovedError, asked: Address) -> None:
        """Note where a slot has moved; the rest of the map is asked for soon."""
        self._asked_at = float("-inf")
        owner = target(error, asked)
        self._owners[error.slot_id] = owner
        if owner not in self._primaries:
            self._primaries.append(owner)


def _address(node: Sequence[Any], asked: Address) -> Address:
    """Return the address of a node of CLUSTER SLOTS; one without a host is at the host that was asked."""
    host = node[0].decode() if isinstance(node[0], bytes) else node[0]
    return (asked[0] if host in (None, "", "?") else host, int(node[1]))
