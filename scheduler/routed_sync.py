"""`routed.py` for what blocks its thread: single commands, which are the scripts of the lease keeper and of submits.

The decisions are the same (`route.py` and the maps); what differs is that a thread waits where a task would yield.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import redis
from redis import exceptions

from llmq.scheduler.route import DOUBTFUL, NOT_RUN, Address, Attempt, Map, key_of


class SyncRouted(redis.Redis):
    """A client of several servers, for several threads; arguments as for `Routed`."""

    def __init__(
        self,
        primaries: Map,
        open_node: Callable[[Address], redis.Redis],
        open_guide: Callable[[Address], redis.Redis] | None = None,
    ) -> None:
        self._map = primaries
        self._open_node = open_node
        self._nodes: dict[Address, redis.Redis] = {}
        self._guides = {address: open_guide(address) for address in primaries.guides()} if open_guide else {}
        self._lock = threading.RLock()
        self._asked = 0
        self._failure: Exception | None = None
        super().__init__(connection_pool=open_node(primaries.guides()[0]).connection_pool)

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Run one command on the node that holds its key; one without a key on any primary."""
        attempt = Attempt(self._map, key_of(args))
        while True:
            self._refresh()
            address = attempt.address
            node = self._node(address)
            try:
                if not attempt.asking:
                    return node.execute_command(*args, **options)  # type: ignore[no-untyped-call]
                pipe = node.pipeline(transaction=False)
                pipe.execute_command("ASKING")  # type: ignore[no-untyped-call]
                pipe.execute_command(*args, **options)  # type: ignore[no-untyped-call]
                return pipe.execute()[1]
            except NOT_RUN as error:
                pause = attempt.refused(error, address)
            except DOUBTFUL:
                self._map.doubt(address)
                raise
            time.sleep(pause)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Any:
        """Refuse: nothing of llmq that blocks its thread sends more than one command at once."""
        raise RuntimeError("a client of several servers that blocks has no pipelines; use connect()")

    def close(self) -> None:
        """Close all connections to all servers."""
        with self._lock:
            nodes, self._nodes = self._nodes, {}
        for node in (*nodes.values(), *self._guides.values()):
            node.close()

    def _refresh(self) -> None:
        """Ask for the map where that is needed; raises what the last guide answered where none tells."""
        before = self._asked
        with self._lock:
            if self._asked != before and self._map.doubtful and self._failure is not None:
                raise self._failure  # another thread has asked meanwhile, which may have taken its whole timeout
            if not (self._map.doubtful or self._map.due):
                return
            self._failure = self._read_map()
            self._asked += 1
            if self._failure is not None and self._map.doubtful:
                raise self._failure

    def _read_map(self) -> Exception | None:
        """Ask for the map; return why nobody told it, None where somebody has."""
        failure: Exception = exceptions.ConnectionError("nobody is there to ask which server is the primary")
        told: dict[Address, Any] = {}
        for guide in self._map.guides():
            asked = self._guides.get(guide) or self._node(guide)
            try:
                reply = asked.execute_command(*self._map.question)  # type: ignore[no-untyped-call]
                self._map.read(reply, guide)
                if (named := self._map.named) is not None:
                    if named not in told:
                        told[named] = self._role_of(named)
                    self._map.proved(told[named])
            except DOUBTFUL as error:
                self._map.doubt(guide)
                failure = error
                continue
            return None  # other threads may be using what is no primary any more: that ends its connections itself
        return failure

    def _role_of(self, named: Address) -> Any:
        """Return what a server says of its role; the error of one that does not answer, None where it may not say."""
        try:
            return self._node(named).execute_command(*self._map.proof)  # type: ignore[no-untyped-call]
        except DOUBTFUL as error:
            self._map.doubt(named)
            return error
        except exceptions.ResponseError:
            return None

    def _node(self, address: Address) -> redis.Redis:
        with self._lock:
            if (node := self._nodes.get(address)) is None:
                node = self._nodes[address] = self._open_node(address)
            return node
