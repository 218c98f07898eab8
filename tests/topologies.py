"""Several real servers that belong together: a primary with replicas and sentinels, and a cluster.

Built of `Server`s, so every one of them can be killed and frozen; what a set adds is how it is put together, who is
primary now, and how a hash slot moves. Nothing here knows of llmq.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import redis
from redis import exceptions
from redis.crc import key_slot

from tests.servers import Sentinel, Server, Servers, client_of, free_port

#: A server that does not answer for this long counts as dead; what is usual is 5 to 30 s.
DOWN_AFTER_MS = 2000

#: What any change of a set may take.
CHANGE_TIMEOUT = 60.0

#: What a server that is dead or stands still answers.
AWAY = (exceptions.ConnectionError, exceptions.TimeoutError)

_QUICK_REPLICATION = ("--repl-diskless-sync-delay", "0")
_SENTINEL_SETTINGS = f"""
sentinel down-after-milliseconds {Sentinel.SERVICE} {DOWN_AFTER_MS}
sentinel failover-timeout {Sentinel.SERVICE} 5000
sentinel parallel-syncs {Sentinel.SERVICE} 2
"""


class Topology(Protocol):
    """A set of servers that is used by one URL."""

    @property
    def url(self) -> str:
        """The URL that clients connect to."""
        ...

    def primary_of(self, key: str) -> Server:
        """Return the server that takes writes to a key now."""
        ...

    def flush(self) -> None:
        """Delete all data."""
        ...

    def keys_without_ttl(self) -> list[str]:
        """Return all keys that would stay for ever."""
        ...

    def fail_over(self, key: str) -> None:
        """Tell the set to promote a replica though the primary lives: what is done before maintenance."""
        ...

    def await_promotion(self, dead: Server, key: str) -> Server:
        """Wait until another server than `dead` takes writes to a key; return it."""
        ...


class SentinelSet:
    """A primary, two replicas, three sentinels."""

    def __init__(self, servers: Servers, kind: str, options: tuple[str, ...] = ("--appendonly", "no")) -> None:
        options = (*options, *_QUICK_REPLICATION)
        first, *others = self.servers = [servers.private(kind, options) for _ in range(3)]
        for one in others:
            # Said now and not with its options: one that was promoted, died and starts again is nobody's replica.
            with one.client() as client:
                client.replicaof("127.0.0.1", first.port)
        self.sentinels = [servers.sentinel(first, _SENTINEL_SETTINGS) for _ in range(3)]
        until(lambda: all(map(_link_is_up, self.servers[1:])), "the replicas follow")
        until(lambda: all(map(self._knows_all, self.sentinels)), "the sentinels know each other and the replicas")

    @property
    def url(self) -> str:
        """The URL of the set; it names the sentinels."""
        return f"redis+sentinel://{','.join(f'127.0.0.1:{one.port}' for one in self.sentinels)}/{Sentinel.SERVICE}"

    def primary_of(self, key: str = "") -> Server:
        """Return the server that the sentinels name now, and that says of itself that it is the primary."""
        found: list[Server] = []

        def named() -> bool:
            with self.sentinels[-1].client() as asked:
                _, port = asked.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", Sentinel.SERVICE)
            found[:] = [one for one in self.servers if one.port == int(port) and role_of(one) == "master"]
            return bool(found)

        until(named, "the sentinels name a primary")
        return found[0]

    def fail_over(self, key: str = "") -> None:
        """Tell the sentinels to promote a replica though the primary lives."""
        with self.sentinels[0].client() as asked:
            until(lambda: asked.execute_command("SENTINEL FAILOVER", Sentinel.SERVICE), "the sentinels begin")

    def await_promotion(self, dead: Server, key: str = "") -> Server:
        """Wait until another server than `dead` is the primary; return it."""
        until(lambda: self.primary_of() is not dead, "a replica was promoted")
        return self.primary_of()

    def await_whole(self, key: str = "") -> None:
        """Wait until there is one primary, and all others follow it."""
        until(lambda: _is_whole(self.servers, self.primary_of()), "there is one primary, and all others follow it")

    def flush(self) -> None:
        """Delete all data."""
        with self.primary_of().client() as primary:
            primary.flushall()

    def keys_without_ttl(self) -> list[str]:
        """Return all keys that would stay for ever."""
        return _without_ttl(self.primary_of())

    def _knows_all(self, sentinel: Sentinel) -> bool:
        with sentinel.client() as asked:
            replicas = asked.execute_command("SENTINEL REPLICAS", Sentinel.SERVICE)
            others = asked.execute_command("SENTINEL SENTINELS", Sentinel.SERVICE)
        return len(replicas) == 2 and len(others) == 2


class ClusterSet:
    """Three primaries with a third of the hash slots each, and a replica of each."""

    def __init__(self, servers: Servers, kind: str, options: tuple[str, ...] = ("--appendonly", "no")) -> None:
        self.servers = [_start_node(servers, kind, options) for _ in range(6)]
        first, *others = self.servers
        self._bus = {one: int(_config(one, "cluster-port")) for one in self.servers}
        with first.client() as client:
            for one in others:
                client.execute_command("CLUSTER MEET", "127.0.0.1", one.port, self._bus[one])
        until(lambda: all(len(_nodes(one)) == 6 for one in self.servers), "all nodes know each other")
        for number, one in enumerate(self.servers[:3]):
            with one.client() as client:
                client.execute_command("CLUSTER ADDSLOTSRANGE", number * 16_384 // 3, (number + 1) * 16_384 // 3 - 1)
        for primary, replica in zip(self.servers[:3], self.servers[3:], strict=True):
            with replica.client() as client:
                until(lambda c=client, p=primary: _replicates(c, _id(p)), "a node became a replica")  # type: ignore[misc]
        until(lambda: all(map(_link_is_up, self.servers[3:])), "the replicas follow")
        until(lambda: all(map(_is_ok, self.servers)), "all nodes say that the cluster is fine")

    @property
    def url(self) -> str:
        """The URL of the set; it names the first three nodes."""
        return f"redis+cluster://{','.join(f'127.0.0.1:{one.port}' for one in self.servers[:3])}"

    def primary_of(self, key: str) -> Server:
        """Return the server that holds a key's hash slot, as most nodes see it."""
        slot = key_slot(key.encode())
        said = [port for one in self.servers if (port := _owner_port(one, slot))]
        return next(one for one in self.servers if one.port == max(set(said), key=said.count))

    def fail_over(self, key: str) -> None:
        """Have the replica of a key's primary take its place though that lives."""
        primary = _id(self.primary_of(key))
        replica = next(one for one in self.servers if _primary_id(one) == primary)
        with replica.client() as client:
            client.execute_command("CLUSTER FAILOVER")

    def await_promotion(self, dead: Server, key: str) -> Server:
        """Wait until another server than `dead` holds the key, and all that live agree."""
        slot, living = key_slot(key.encode()), [one for one in self.servers if one is not dead]
        until(lambda: all(_owner_port(one, slot) not in (0, dead.port) for one in living), "a replica was promoted")
        until(lambda: all(map(_is_ok, living)), "the nodes that are left say that the cluster is fine")
        return self.primary_of(key)

    def await_whole(self, key: str) -> None:
        """Wait until all nodes agree that the cluster is fine, and every replica follows its primary."""

        def whole() -> bool:
            replicas = [one for one in self.servers if role_of(one) == "slave"]
            return len(replicas) == 3 and all(map(_link_is_up, replicas)) and all(map(_is_ok, self.servers))

        until(whole, "the cluster is fine, and every replica follows its primary")

    def flush(self) -> None:
        """Delete all data."""
        for one in self._primaries():
            with one.client() as client:
                client.flushall()

    def keys_without_ttl(self) -> list[str]:
        """Return all keys that would stay for ever."""
        return [key for one in self._primaries() for key in _without_ttl(one)]

    def begin_move(self, key: str, target: Server) -> int:
        """Begin to move a key's hash slot: from now on it is half there, half here. Returns the slot."""
        slot, source = key_slot(key.encode()), self.primary_of(key)
        with source.client() as here, target.client() as there:
            there.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", _id(source))
            here.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", _id(target))
        return slot

    def move_keys(self, slot: int, source: Server, target: Server, count: int = 0) -> int:
        """Move keys of a slot (0: all that it has), as resharding tools do; return how many there were."""
        with source.client() as here:
            keys = here.execute_command("CLUSTER GETKEYSINSLOT", slot, count or 1_000_000)
            for key in keys:
                here.execute_command("MIGRATE", "127.0.0.1", target.port, key, 0, 5000)
        return len(keys)

    def end_move(self, slot: int, target: Server) -> None:
        """Give a slot to the node that has its keys by now, and tell every primary."""
        primaries = self._primaries()
        for one in [target, *(one for one in primaries if one is not target)]:
            with one.client() as client:
                client.execute_command("CLUSTER SETSLOT", slot, "NODE", _id(target))

    def _primaries(self) -> list[Server]:
        return [one for one in self.servers if role_of(one) == "master" and _slots(one)]


@contextmanager
def under_way(key: str, cluster: ClusterSet) -> Iterator[tuple[int, Server, Server]]:
    """Yield (slot, source, target) while a slot is on its way; all of it has moved at the end of the block."""
    source = cluster.primary_of(key)
    target = next(one for one in cluster._primaries() if one is not source)
    slot = cluster.begin_move(key, target)
    yield slot, source, target
    while cluster.move_keys(slot, source, target):
        pass
    cluster.end_move(slot, target)


def until(holds: Callable[[], object], what: str, timeout: float = CHANGE_TIMEOUT) -> None:
    """Ask until it holds: these are states of servers that announce nothing."""
    deadline = time.monotonic() + timeout
    while not _now(holds):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout:g} s until {what}")
        time.sleep(0.02)


def role_of(server: Server) -> str:
    """Return `master` or `slave`; "" of a server that does not answer."""
    try:
        with server.client(socket_timeout=1, socket_connect_timeout=1) as client:
            return str(client.info("replication")["role"])
    except AWAY:
        return ""


def _now(holds: Callable[[], object]) -> bool:
    try:
        return bool(holds())
    except (exceptions.RedisError, RuntimeError):
        return False  # a server that is away, or changes its role


def _start_node(servers: Servers, kind: str, options: tuple[str, ...]) -> Server:
    cluster = ("--cluster-enabled", "yes", "--cluster-node-timeout", str(DOWN_AFTER_MS))
    # Without it the bus is on the port 10,000 further on, which there may not be.
    bus = ("--cluster-port", str(free_port()))
    lenient = ("--cluster-replica-validity-factor", "0", "--cluster-allow-replica-migration", "no")
    return servers.private(kind, (*options, *_QUICK_REPLICATION, *cluster, *bus, *lenient))


def _is_whole(servers: list[Server], primary: Server) -> bool:
    others = [one for one in servers if one is not primary]
    with primary.client() as client:
        following = client.info("replication")["connected_slaves"]
    return len(others) == following and all(map(_link_is_up, others))


def _link_is_up(server: Server) -> bool:
    with server.client() as client:
        return bool(client.info("replication").get("master_link_status") == "up")


def _config(server: Server, name: str) -> str:
    with server.client() as client:
        return str(client.config_get(name)[name])


def _id(server: Server) -> str:
    with server.client() as client:
        answer: bytes = client.execute_command("CLUSTER MYID")
        return answer.decode()


def _nodes(server: Server) -> dict[str, Any]:
    """Return the nodes that a node knows well: none whose handshake is under way."""
    with server.client() as client:
        known: dict[str, Any] = client.execute_command("CLUSTER NODES")
    return {place: node for place, node in known.items() if "handshake" not in node["flags"]}


def _primary_id(server: Server) -> str:
    """Return the id of the node that this one replicates; "-" of a primary."""
    return next(str(node["master_id"]) for node in _nodes(server).values() if "myself" in node["flags"])


def _replicates(client: redis.Redis, primary_id: str) -> bool:
    client.execute_command("CLUSTER REPLICATE", primary_id)  # type: ignore[no-untyped-call]
    return True


def _is_ok(server: Server) -> bool:
    with server.client() as client:
        told: dict[str, str] = client.execute_command("CLUSTER INFO")
    return told["cluster_state"] == "ok" and told["cluster_slots_assigned"] == "16384"


def _slots(server: Server) -> list[Any]:
    with server.client() as client:
        told: list[Any] = client.execute_command("CLUSTER SLOTS")
    return [row for row in told if row[2][1] == server.port]


def _owner_port(server: Server, slot: int) -> int:
    """Return the port of the primary of a slot as a node sees it; 0 where it does not answer."""
    try:
        with client_of(server.url, socket_timeout=1, socket_connect_timeout=1) as client:
            rows: list[Any] = client.execute_command("CLUSTER SLOTS")
    except AWAY:
        return 0
    return next((int(row[2][1]) for row in rows if row[0] <= slot <= row[1]), 0)


def _without_ttl(server: Server) -> list[str]:
    with server.client() as client:
        return sorted(key.decode() for key in client.scan_iter(count=1000) if client.ttl(key) == -1)
