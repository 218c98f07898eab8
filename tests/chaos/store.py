"""The store: the Redis of a chaos run, of whatever topology, as something that can be killed and started again.

A topology is one entry of `TOPOLOGIES`: how to start it. The driver asks it for no more than `Store` says. One that
keeps no append-only history from start to end says None, and `told.py` judges what can be judged without one; one whose
servers name each other by address gives no `port`, and its clients get no bad network in between.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import redis

from tests.chaos import sets
from tests.chaos.history import OPTIONS, Step, read_history
from tests.servers import Guardian, Server, process_kinds

#: Acknowledged is on disk: killing the server loses nothing, so nothing may be missing afterwards.
CERTAIN = ("--appendfsync", "always")


class Store(Protocol):
    """What the driver does with a Redis."""

    @property
    def url(self) -> str:
        """The URL that clients connect to; the same after a restart."""
        ...

    @property
    def port(self) -> int | None:
        """The port that a proxy may stand in front of; None where clients must connect by themselves."""
        ...

    def start(self) -> Any:
        """Start it, or what was killed of it, and return when it serves."""
        ...

    def kill(self) -> None:
        """SIGKILL the server that takes writes."""
        ...

    def freeze(self) -> None:
        """SIGSTOP that server."""
        ...

    def thaw(self) -> None:
        """SIGCONT it."""
        ...

    def fail_over(self) -> None:
        """Promote a replica though the primary lives; a set of servers only."""
        ...

    def client(self, **options: Any) -> redis.Redis:
        """Return a plain client, for what an operator types."""
        ...

    def history(self) -> list[Step] | None:
        """Return what the server wrote, once it has ended; None where there is no whole history."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class Single(Server):
    """One server, with its whole history in its append-only file."""

    def fail_over(self) -> None:
        """Refuse: there is nobody to take over."""
        raise RuntimeError("a single server has no replica")

    def history(self) -> list[Step] | None:
        """Return every step from its first start on."""
        return read_history(self.folder)


def single(kind: str, folder: Path, guardian: Guardian) -> Store:
    """Start one server of a kind (`redis`, `valkey`)."""
    server = Single(process_kinds()[kind], folder, guardian, (*OPTIONS, *CERTAIN))
    server.start()
    return server


#: How each topology is started: kind of server, folder, guardian.
TOPOLOGIES: dict[str, Callable[[str, Path, Guardian], Store]] = {
    "single": single,
    "sentinel": sets.sentinel,
    "cluster": sets.cluster,
}
