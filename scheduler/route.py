"""The route of a command: which server it goes to, and what to do where that one says that it is not the right one.

Pure decisions for the clients of `routed.py`. Who is primary stands in a map: `ClusterMap`, `SentinelMap`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from redis import exceptions

#: Host and port of a node.
Address = tuple[str, int]

#: What a node answers to a command that it has not run: somewhere else, or later, it may be sent again.
NOT_RUN = (exceptions.AskError, exceptions.TryAgainError)  # MovedError is an AskError

#: After these another server may be the primary: the map is asked for anew before the next command.
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


_CLASSES: dict[str, type[exceptions.ResponseError]] = {
    "MOVED": exceptions.MovedError,
    "ASK": exceptions.AskError,
    "TRYAGAIN": exceptions.TryAgainError,
    "CLUSTERDOWN": exceptions.ClusterDownError,
}


def told_apart(error: exceptions.ResponseError) -> exceptions.ResponseError:
    """Return an error of its own class for what nodes of a cluster say; redis-py 5 keeps these to its own client."""
    if type(error) is not exceptions.ResponseError:
        return error
    code, _, rest = str(error).partition(" ")
    return _CLASSES[code](rest) if code in _CLASSES else error


class Map(Protocol):
    """Who is primary, as far as is known. A client asks a guide the `question`, and has the map `read` the reply."""

    #: Whether keys are spread over several primaries.
    cluster: bool

    #: A command failed in a way that makes another primary likely; nothing is sent before the map was read anew.
    doubtful: bool

    @property
    def question(self) -> tuple[str, ...]:
        """The command that a guide answers with what the map says."""
        ...

    @property
    def proof(self) -> tuple[str, ...]:
        """The command by which the server that is `named` has to show its role before it is the primary."""
        ...

    @property
    def named(self) -> Address | None:
        """The server that the last reply named, where it has to show its role; None: nobody has to."""
        ...

    @property
    def due(self) -> bool:
        """Whether to ask again though nothing failed."""
        ...

    @property
    def primaries(self) -> list[Address]:
        """All primaries."""
        ...

    @property
    def known(self) -> set[Address]:
        """The servers to which connections may stay open."""
        ...

    def owner(self, key: bytes | None) -> Address:
        """Return the primary for a key; for None any of them. Raises SlotNotCoveredError where none has it."""
        ...

    def guides(self) -> list[Address]:
        """Return whom to ask, one after the other until one answers."""
        ...

    def read(self, reply: Any, guide: Address) -> None:
        """Take over what a guide has answered; raises ConnectionError where that is of no use."""
        ...

    def proved(self, told: Any) -> None:
        """Take over the reply to `proof`, an error or None where it was refused; raises where it is no primary's."""
        ...

    def doubt(self, failed: Address) -> None:
        """Note that a server, or a guide, failed."""
        ...

    def moved(self, error: exceptions.MovedError, asked: Address) -> None:
        """Note where a key has moved."""
        ...


class Attempt:
    """One command on its way: where it goes next, `asking` or not, and for how long it is worth trying."""

    def __init__(self, known: Map, key: bytes | None, clock: Callable[[], float] = time.monotonic) -> None:
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
            self._elsewhere = target(error, asked)
        return 0.0


def target(error: exceptions.AskError, asked: Address) -> Address:
    """Return the server that a redirection names; one without a host is at the host that was asked."""
    return (error.host or asked[0], int(error.port))
