"""The map of a cluster: which node holds which key, and what to do where a node says that it does not.

Pure decisions for the clients of `cluster.py`. All keys of one queue have one hash tag, hence one hash slot and one
node; a client of several queues talks to several.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from redis import exceptions
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

#: Host and port of a node.
Address = tuple[str, int]

#: What a node answers to a command that it has not run: somewhere else, or later, it may be sent again.
NOT_RUN = (exceptions.AskError, exceptions.TryAgainError)  # MovedError is an AskError

#: After these another node may hold the keys: the map is asked for anew before the next command.
DOUBTFUL = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ClusterDownError)

#: A command is led on so often at most; a cluster that agrees with itself needs one or two.
MOST_REDIRECTIONS = 8

#: While keys move to another node, scripts over several keys are refused for a moment (for longer where many move).
TRY_AGAIN_S, TRY_AGAIN_PAUSE_S = 1.0, 0.05

_KEYLESS = frozenset((
    "ACL", "ASKING", "CLIENT", "CLUSTER", "COMMAND", "CONFIG", "ECHO", "INFO", "LASTSAVE", "LATENCY", "PING", "ROLE",
    "SCRIPT", "SLOWLOG", "TIME", "WAIT", "WAITAOF",
))  # fmt: skip
_NUMBERED = frozenset(("EVAL", "EVALSHA", "EVAL_RO", "EVALSHA_RO", "FCALL", "FCALL_RO"))
_NAMED = frozenset(("XREAD", "XREADGROUP"))


def key_of(command: Sequence[Any]) -> bytes | None:
    """Return the first key of a command as redis-py gives it (`XINFO STREAM` is one word); None where it has none."""
    word = command[0] if isinstance(command[0], str) else bytes(command[0]).decode()
    name = word.partition(" ")[0].upper()
    if name in _KEYLESS:
        return None
    place = 1
    if name in _NUMBERED:
        if not int(command[2]):
            return None
        place = 3
    elif name in _NAMED:
        place = next(at for at, part in enumerate(command) if part in (b"STREAMS", "STREAMS")) + 1
    key = command[place]
    return key.encode() if isinstance(key, str) else bytes(key)


class ClusterMap:
    """Which primary holds each hash slot, as far as is known; `doubtful` until `read` has been told anew."""

    def __init__(self, seeds: Iterable[Address]) -> None:
        self._seeds = list(seeds)
        self._primaries: list[Address] = []
        self._others: list[Address] = []
        self._owners: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._failed: Address | None = None
        self.doubtful = True

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

    def to_ask(self) -> list[Address]:
        """Return the nodes to ask for the map, one after the other: the one that failed comes last."""
        known = dict.fromkeys([*self._primaries, *self._others, *self._seeds])
        return sorted(known, key=lambda address: address == self._failed)

    def read(self, reply: Sequence[Any], asked: Address) -> None:
        """Take over what the node `asked` answered to CLUSTER SLOTS."""
        owners: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        others: list[Address] = []
        for first, last, primary, *replicas in reply:
            owners[first : last + 1] = [_address(primary, asked)] * (last + 1 - first)
            others += [_address(replica, asked) for replica in replicas]
        self._owners = owners
        self._primaries = [address for address in dict.fromkeys(owners) if address is not None]
        self._others = list(dict.fromkeys(others))
        self.doubtful = False

    def doubt(self, failed: Address) -> None:
        """Note that a node cannot be used: another may have taken its place."""
        self._failed = failed
        self.doubtful = True

    def moved(self, error: exceptions.MovedError, asked: Address) -> None:
        """Note where a slot has moved."""
        owner = _target(error, asked)
        self._owners[error.slot_id] = owner
        if owner not in self._primaries:
            self._primaries.append(owner)


class Attempt:
    """One command on its way: where it goes next, `asking` or not, and for how long it is worth trying."""

    def __init__(self, known: ClusterMap, key: bytes | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._map = known
        self._key = key
        self._clock = clock
        self._until = 0.0
        self._left = MOST_REDIRECTIONS
        self._elsewhere: Address | None = None

    @property
    def asking(self) -> bool:
        """Whether the node has to be told that the keys are on their way to it."""
        return self._elsewhere is not None

    @property
    def address(self) -> Address:
        """The node to send it to now. Raises SlotNotCoveredError."""
        return self._elsewhere or self._map.owner(self._key)

    def refused(self, error: Exception, asked: Address) -> float:
        """Take in what a node answered that has not run it; return the seconds to wait. Raises `error` in the end."""
        self._elsewhere = None
        if isinstance(error, exceptions.TryAgainError):
            now = self._clock()
            self._until = self._until or now + TRY_AGAIN_S
            if now >= self._until:
                raise error
            return TRY_AGAIN_PAUSE_S
        self._left -= 1
        if not self._left:
            raise error
        if isinstance(error, exceptions.MovedError):
            self._map.moved(error, asked)
        elif isinstance(error, exceptions.AskError):
            self._elsewhere = _target(error, asked)
        return 0.0


def _address(node: Sequence[Any], asked: Address) -> Address:
    """Return the address of a node of CLUSTER SLOTS; one without a host is at the host that was asked."""
    host = node[0].decode() if isinstance(node[0], bytes) else node[0]
    return (asked[0] if host in (None, "", "?") else host, int(node[1]))


def _target(error: exceptions.AskError, asked: Address) -> Address:
    return (error.host or asked[0], int(error.port))
