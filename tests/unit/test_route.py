"""Where a command goes: its key, the maps of who is primary, and what follows an answer of "not here"."""

from __future__ import annotations

from typing import Any

import pytest
from redis import exceptions
from redis.crc import key_slot
from redis.sentinel import MasterNotFoundError

from llmq.scheduler.cluster_map import LOOK_AGAIN_S as CLUSTER_LOOK_AGAIN_S
from llmq.scheduler.cluster_map import ClusterMap
from llmq.scheduler.route import MOST_REDIRECTIONS, TRY_AGAIN_S, Address, Attempt, key_of, told_apart
from llmq.scheduler.sentinel_map import LOOK_AGAIN_S, SentinelMap

A, B, C = ("10.0.0.1", 1), ("10.0.0.2", 2), ("10.0.0.3", 3)
HALF = 8192
Q = key_slot(b"{q}")


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (("GET", "k"), b"k"),
        (("XINFO STREAM", b"k"), b"k"),
        (("BLPOP", "a", "b", 1), b"a"),
        (("EVALSHA", "sha", 2, "a", "b", "x"), b"a"),
        (("EVAL_RO", "text", "0", "x"), None),
        (("XREAD", b"BLOCK", 1, b"STREAMS", "a", "b", "0", "0"), b"a"),
        (("XREADGROUP", "GROUP", "g", "c", "STREAMS", "a", ">"), b"a"),
        (("CONFIG GET", "save"), None),
        (("PING",), None),
        ((b"ping",), None),
    ],
)
def test_the_key_of_a_command(command: tuple[Any, ...], key: bytes | None) -> None:
    """As redis-py hands commands over: two words may be one."""
    assert key == key_of(command)


def test_what_nodes_say_has_a_class() -> None:
    """Also in redis-py 5, whose plain connections do not tell these errors apart."""
    moved = told_apart(exceptions.ResponseError("MOVED 7 10.0.0.1:6379"))
    assert isinstance(moved, exceptions.MovedError)
    assert (7, "10.0.0.1", 6379) == (moved.slot_id, moved.host, moved.port)
    assert isinstance(told_apart(exceptions.ResponseError("TRYAGAIN Multiple keys")), exceptions.TryAgainError)
    other = exceptions.ResponseError("WRONGTYPE no")
    assert told_apart(other) is other


def told(*rows: tuple[int, int, Address]) -> list[Any]:
    """Return what CLUSTER SLOTS answers."""
    return [[first, last, [host.encode(), port, b"id"]] for first, last, (host, port) in rows]


@pytest.fixture
def known() -> ClusterMap:
    """A map of two primaries."""
    cluster = ClusterMap([A])
    cluster.read(told((0, HALF - 1, A), (HALF, 16_383, B)), A)
    return cluster


class TestClusterMap:
    """Which primary holds which slot."""

    def test_it_begins_in_doubt_and_asks_the_nodes_of_the_url(self) -> None:
        """It knows nobody else."""
        cluster = ClusterMap([A, B])
        assert (True, [A, B]) == (cluster.doubtful, cluster.guides())

    def test_a_key_has_the_owner_of_its_slot(self, known: ClusterMap) -> None:
        """A command without a key goes to any primary."""
        assert (A if Q < HALF else B) == known.owner(b"{q}x")
        assert (known.owner(None), known.primaries) == (A, [A, B])

    def test_a_node_that_failed_is_asked_last(self, known: ClusterMap) -> None:
        """It may not answer for seconds; once it has answered it is as good as the others."""
        known.doubt(A)
        assert (True, [B, A]) == (known.doubtful, known.guides())
        known.read(told((0, 16_383, B)), A)
        assert [B, A] == known.guides()
        assert not known.doubtful

    def test_who_named_a_node_that_failed_is_asked_late_too(self) -> None:
        """F-087: a node that was cut off from the others names their former primaries, whoever asks it."""
        cluster = ClusterMap([A, B, C])
        cluster.read(told((0, HALF - 1, A), (HALF, 16_383, B)), A)
        cluster.doubt(B)
        assert [C, A, B] == cluster.guides()

    def test_it_grows_old_and_is_asked_for_anew(self) -> None:
        """F-087: nodes that came since are known before those that are known are gone; one asks for all."""
        now = [100.0]
        cluster = ClusterMap([A], clock=lambda: now[0])
        cluster.read(told((0, 16_383, A)), A)
        assert not cluster.due
        now[0] += CLUSTER_LOOK_AGAIN_S
        assert [True, False] == [cluster.due, cluster.due]

    def test_a_slot_that_has_moved_is_a_reason_to_ask(self, known: ClusterMap) -> None:
        """Who has it now may be new, and so may its replicas."""
        assert not known.due
        known.moved(exceptions.MovedError(f"{Q} {C[0]}:{C[1]}"), A)
        assert (False, True) == (known.doubtful, known.due)

    def test_a_slot_that_nobody_holds_is_an_error_and_a_doubt(self, known: ClusterMap) -> None:
        """A cluster that lost a primary and has no replica of it."""
        known.read([], A)
        with pytest.raises(exceptions.SlotNotCoveredError):
            known.owner(b"x")
        assert known.doubtful

    def test_a_node_without_a_host_is_at_the_host_that_was_asked(self) -> None:
        """Redis 7 says so of nodes whose host it does not know."""
        cluster = ClusterMap([A])
        cluster.read([[0, 16_383, [None, 7, b"id"]]], A)
        assert (A[0], 7) == cluster.owner(b"x")


class TestAttempt:
    """One command that is led on."""

    def test_moved_changes_the_map(self, known: ClusterMap) -> None:
        """The next command goes there at once."""
        attempt = Attempt(known, b"{q}")
        assert 0 == attempt.refused(exceptions.MovedError(f"{Q} {C[0]}:{C[1]}"), A)
        assert (C, False, C) == (attempt.address, attempt.asking, known.owner(b"{q}"))

    def test_ask_is_for_this_command_alone(self, known: ClusterMap) -> None:
        """The slot is not there yet."""
        attempt = Attempt(known, b"{q}")
        before = known.owner(b"{q}")
        attempt.refused(exceptions.AskError(f"{Q} {C[0]}:{C[1]}"), before)
        assert (C, True, before) == (attempt.address, attempt.asking, known.owner(b"{q}"))

    def test_try_again_is_tried_for_a_second(self, known: ClusterMap) -> None:
        """Then the caller decides: a slot with large keys may be on its way for minutes."""
        now = [0.0]
        attempt = Attempt(known, b"{q}", clock=lambda: now[0])
        assert attempt.refused(exceptions.TryAgainError("later"), A) > 0
        now[0] += TRY_AGAIN_S
        with pytest.raises(exceptions.TryAgainError):
            attempt.refused(exceptions.TryAgainError("later"), A)

    def test_a_cluster_that_leads_in_a_circle_is_left(self, known: ClusterMap) -> None:
        """Two nodes that each say that the other has the slot."""
        attempt = Attempt(known, b"{q}")
        error = exceptions.MovedError(f"{Q} {C[0]}:{C[1]}")
        for _ in range(MOST_REDIRECTIONS - 1):
            attempt.refused(error, A)
        with pytest.raises(exceptions.MovedError):
            attempt.refused(error, A)


class TestSentinelMap:
    """Whom the sentinels name."""

    def test_the_primary_is_whom_a_sentinel_names(self) -> None:
        """Whatever the key."""
        sentinel = SentinelMap([A, B], "main")
        _name(sentinel)
        assert {("10.0.0.9", 6379)} == {sentinel.owner(None), sentinel.owner(b"x"), *sentinel.known}

    def test_their_word_grows_old(self) -> None:
        """F-088: a primary that was replaced by hand takes writes for seconds; one asks for all."""
        now = [100.0]
        sentinel = SentinelMap([A], "main", clock=lambda: now[0])
        _name(sentinel)
        assert not sentinel.due
        now[0] += LOOK_AGAIN_S
        assert [True, False] == [sentinel.due, sentinel.due]

    def test_a_sentinel_that_failed_is_asked_last_and_the_primarys_failure_is_a_doubt(self) -> None:
        """What a sentinel that is away says of the primary is nothing."""
        sentinel = SentinelMap([A, B], "main")
        _name(sentinel)
        sentinel.doubt(A)
        assert (False, [B, A]) == (sentinel.doubtful, sentinel.guides())
        sentinel.doubt(("10.0.0.9", 6379))
        assert (True, [A, B]) == (sentinel.doubtful, sentinel.guides())

    def test_a_server_that_is_named_shows_that_it_is_a_primary(self) -> None:
        """F-087: one sentinel may not have heard of a promotion, and reads at a replica do not fail."""
        sentinel = SentinelMap([A, B], "main")
        _name(sentinel)
        sentinel.read([b"10.0.0.7", b"6379"], A)
        with pytest.raises(exceptions.ConnectionError, match="is a replica"):
            sentinel.proved({"role": "slave"})
        assert ("10.0.0.9", 6379) == sentinel.owner(None)

    @pytest.mark.parametrize("told", [{"role": "master"}, {}, None], ids=["says so", "says nothing", "may not say"])
    def test_a_server_that_does_not_say_is_believed(self, told: object) -> None:
        """A user without the right to INFO: what its writes are answered shows it."""
        sentinel = SentinelMap([A, B], "main")
        sentinel.read([b"10.0.0.7", b"6379"], A)
        assert sentinel.doubtful
        sentinel.proved(told)
        assert (False, ("10.0.0.7", 6379)) == (sentinel.doubtful, sentinel.owner(None))

    def test_a_service_that_is_unknown_is_an_error(self) -> None:
        """Another name in the URL than in the sentinels' configuration."""
        with pytest.raises(MasterNotFoundError, match="knows no service 'main'"):
            SentinelMap([A], "main").read(None, A)


def _name(sentinel: SentinelMap) -> None:
    """Have a sentinel name a server, and that one say that it is a primary."""
    sentinel.read([b"10.0.0.9", b"6379"], A)
    sentinel.proved({"role": "master"})
