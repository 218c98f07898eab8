"""Sets of servers as the store of a chaos run: Sentinel with three servers, and a cluster of six nodes.

What is killed or frozen is the server that takes the queue's writes at that moment. The fault is over when the set is
whole again: one primary, all others replicas that follow it. Two faults at once on one set would lose what replicas
never had, and prove nothing about llmq.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import redis

from tests.redis.serving import KEYS
from tests.servers import Guardian, Server, Servers
from tests.topologies import ClusterSet, SentinelSet, until

#: A server that is killed and comes back before it was missed is the primary still, with all that it acknowledged.
OPTIONS = ("--appendonly", "yes", "--appendfsync", "always")

#: What docs/redis.md wants where there are replicas. In the cluster each primary has one alone, and none while that is
#: away: it would refuse all writes.
SAFE = ("--min-replicas-to-write", "1", "--min-replicas-max-lag", "5")

#: A failover that is asked for is done in seconds, or not at all: then it is asked for again.
FAIL_OVER_S, FAIL_OVER_TRIES = 10.0, 3


class SetStore:
    """A set as the driver uses a Redis; it has no history, and clients reach it without a proxy."""

    port = None

    def __init__(self, servers: Servers, members: SentinelSet | ClusterSet) -> None:
        self._servers = servers
        self._set = members
        self._struck: Server

    @property
    def url(self) -> str:
        """The URL that clients connect to."""
        return self._set.url

    def start(self) -> None:
        """Start what was killed, and return when the set is whole."""
        self._struck.restart()
        self._set.await_whole(KEYS.config)

    def kill(self) -> None:
        """SIGKILL the primary."""
        self._struck = self._set.primary_of(KEYS.config)
        self._struck.kill()

    def freeze(self) -> None:
        """SIGSTOP the primary."""
        self._struck = self._set.primary_of(KEYS.config)
        self._struck.freeze()

    def thaw(self) -> None:
        """SIGCONT it, and return when the set is whole: it may have to become a replica first."""
        self._struck.thaw()
        self._set.await_whole(KEYS.config)

    def fail_over(self) -> None:
        """Promote a replica though the primary lives, as before maintenance."""
        before = self._set.primary_of(KEYS.config)
        for _ in range(FAIL_OVER_TRIES):
            self._set.fail_over(KEYS.config)
            try:
                until(lambda: self._set.primary_of(KEYS.config) is not before, "a replica was promoted", FAIL_OVER_S)
            except TimeoutError:
                continue  # given up by the sentinels or nodes, who say so to nobody
            break
        self._set.await_whole(KEYS.config)

    def client(self, **options: Any) -> redis.Redis:
        """Return a plain client of the primary."""
        return self._set.primary_of(KEYS.config).client(**options)

    def history(self) -> None:
        """There is none: what a primary wrote after its replicas stopped listening never happened."""

    def close(self) -> None:
        """End all servers."""
        self._servers.close()


def sentinel(kind: str, folder: Path, guardian: Guardian) -> SetStore:
    """Start a primary, two replicas and three sentinels."""
    servers = Servers(folder)
    return SetStore(servers, SentinelSet(servers, kind, (*OPTIONS, *SAFE)))


def cluster(kind: str, folder: Path, guardian: Guardian) -> SetStore:
    """Start three primaries with a replica each."""
    servers = Servers(folder)
    return SetStore(servers, ClusterSet(servers, kind, OPTIONS))
