"""Facts about the server that the design rests on, each proven on every kind of server at hand.

llmq keeps a job's whole life in a stream's pending list: what is pending runs, its delivery count is the fence, and a
job that waits again keeps its entry. None of that is common use of Redis, so each assumption is written down here as
a test, in the server's own words. When a new server breaks one, this file says which, before the tests of llmq fail
for reasons hard to see.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis.exceptions import NoScriptError, OutOfMemoryError, ResponseError

from tests.conftest import OwnServer
from tests.servers import VOLATILE, client_of

pytestmark = pytest.mark.leaves("fact:*")

#: Sends one command; returns the server's reply as it came, with text for bytes.
Ask = Callable[..., Any]

LANE = "fact:lane"
GROUP = "workers"

#: A lease of this age has run out in these tests; a fresh one is far from it.
OLD_MS = 60_000


@pytest.fixture
def ask(redis_url: str) -> Iterator[Ask]:
    """Ask an empty server."""
    with asking(redis_url) as ask:
        yield ask


@contextlib.contextmanager
def asking(url: str) -> Iterator[Ask]:
    """Connect to a server; its replies are not interpreted by the client."""
    with client_of(url, decode_responses=True, encoding="latin-1") as client:
        client.response_callbacks.clear()
        yield client.execute_command


def make_lane(ask: Ask, *entries: str) -> None:
    """Make a lane with its group at 0, and these entries."""
    for entry in entries:
        ask("XADD", LANE, entry, "job", entry)
    ask("XGROUP", "CREATE", LANE, GROUP, 0, "MKSTREAM")


def claim_new(ask: Ask, consumer: str, count: int = 1) -> list[str]:
    """Claim entries that were never claimed; return their ids."""
    reply = ask("XREADGROUP", "GROUP", GROUP, consumer, "COUNT", count, "STREAMS", LANE, ">")
    return [entry for _, entries in reply or [] for entry, _ in entries]


def claim_again(ask: Ask, consumer: str, entry: str, delivery: int) -> Any:
    """Claim an entry that waits in `back`: it is in the stream and not pending."""
    return ask("XCLAIM", LANE, GROUP, consumer, 0, entry, "FORCE", "RETRYCOUNT", delivery)


def pending(ask: Ask) -> list[tuple[str, str, int]]:
    """Return (entry, consumer, delivery) of all that is pending."""
    return [(entry, owner, count) for entry, owner, _, count in ask("XPENDING", LANE, GROUP, "-", "+", 100)]


def idle_ms(ask: Ask, entry: str) -> int:
    """Return the milliseconds since this pending entry was claimed or renewed."""
    ((_, _, idle, _),) = ask("XPENDING", LANE, GROUP, entry, entry, 1)
    return int(idle)


def make_old(ask: Ask, consumer: str, entry: str) -> None:
    """Let a lease run out without waiting: set the idle time of its entry."""
    ask("XCLAIM", LANE, GROUP, consumer, 0, entry, "IDLE", OLD_MS, "JUSTID")


class TestFence:
    """Law G3: the entry is pending for this consumer and this delivery."""

    def test_a_new_claim_is_delivery_one(self, ask: Ask) -> None:
        """XREADGROUP gives the delivery count 1 (G3)."""
        make_lane(ask, "1-0")
        claim_new(ask, "a")
        assert [("1-0", "a", 1)] == pending(ask)

    def test_pending_of_one_entry_and_consumer_is_the_fence(self, ask: Ask) -> None:
        """XPENDING of one entry and one consumer gives the owner a row with the delivery, and others nothing (G3)."""
        make_lane(ask, "1-0", "2-0")
        claim_new(ask, "a", count=2)
        ((entry, owner, _, delivery),) = ask("XPENDING", LANE, GROUP, "2-0", "2-0", 1, "a")
        assert ("2-0", "a", 1) == (entry, owner, delivery)
        assert [] == ask("XPENDING", LANE, GROUP, "2-0", "2-0", 1, "b")

    def test_a_claim_from_back_has_exactly_the_delivery_it_names(self, ask: Ask) -> None:
        """XCLAIM FORCE RETRYCOUNT takes an entry that was acknowledged and not deleted, with that very count (G3)."""
        make_lane(ask, "1-0")
        claim_new(ask, "a")
        ask("XACK", LANE, GROUP, "1-0")
        assert [["1-0", ["job", "1-0"]]] == claim_again(ask, "b", "1-0", 7)
        assert [("1-0", "b", 7)] == pending(ask)

    def test_a_forced_claim_steals(self, ask: Ask) -> None:
        """XCLAIM FORCE takes a running entry too: a claim from `back` must first see that it is not pending (G4)."""
        make_lane(ask, "1-0")
        claim_new(ask, "a")
        claim_again(ask, "b", "1-0", 2)
        assert [("1-0", "b", 2)] == pending(ask)

    def test_a_forced_claim_of_a_deleted_entry_is_empty(self, ask: Ask) -> None:
        """What was finished or cancelled cannot be claimed again, and does not become pending (G14, F-068)."""
        make_lane(ask, "1-0")
        ask("XDEL", LANE, "1-0")
        assert [] == claim_again(ask, "a", "1-0", 1)
        assert [] == pending(ask)

    def test_acknowledging_checks_no_owner(self, ask: Ask) -> None:
        """XACK names no consumer: without the fence a zombie could end another's attempt (F-013)."""
        make_lane(ask, "1-0")
        claim_new(ask, "a")
        assert 1 == ask("XACK", LANE, GROUP, "1-0")
        assert [] == pending(ask)


class TestLease:
    """Law G4: the idle time of a pending entry is the age of its lease."""

    def test_renewal_keeps_the_delivery_and_ends_the_idle_time(self, ask: Ask) -> None:
        """XCLAIM JUSTID starts the idle time again and leaves the delivery count alone (G3, G4)."""
        make_lane(ask, "1-0")
        claim_new(ask, "a")
        make_old(ask, "a", "1-0")
        assert idle_ms(ask, "1-0") >= OLD_MS
        ask("XCLAIM", LANE, GROUP, "a", 0, "1-0", "JUSTID")
        assert idle_ms(ask, "1-0") < OLD_MS
        assert [("1-0", "a", 1)] == pending(ask)

    def test_pending_can_be_asked_by_idle_time(self, ask: Ask) -> None:
        """XPENDING IDLE lists the leases that ran out, and no others (G4)."""
        make_lane(ask, "1-0", "2-0")
        claim_new(ask, "a", count=2)
        make_old(ask, "a", "2-0")
        rows = ask("XPENDING", LANE, GROUP, "IDLE", OLD_MS, "-", "+", 10)
        assert ["2-0"] == [entry for entry, *_ in rows]

    def test_a_sweep_with_justid_keeps_the_delivery(self, ask: Ask) -> None:
        """XAUTOCLAIM JUSTID moves what is idle for long enough, and does not raise the delivery count (G3, G5)."""
        make_lane(ask, "1-0", "2-0")
        claim_new(ask, "a", count=2)
        make_old(ask, "a", "1-0")
        assert ["0-0", ["1-0"], []] == ask("XAUTOCLAIM", LANE, GROUP, "sweeper", OLD_MS, "0-0", "JUSTID")
        assert [("1-0", "sweeper", 1), ("2-0", "a", 1)] == pending(ask)

    def test_a_sweep_looks_at_ten_times_its_count(self, ask: Ask) -> None:
        """XAUTOCLAIM gives up after 10 x COUNT entries and names the next one: a sweep goes on until 0-0 (G5)."""
        make_lane(ask, *(f"{line}-0" for line in range(1, 26)))
        claim_new(ask, "a", count=25)
        make_old(ask, "a", "25-0")

        def sweep(cursor: str) -> Any:
            return ask("XAUTOCLAIM", LANE, GROUP, "sweeper", OLD_MS, cursor, "COUNT", 1, "JUSTID")

        assert ["11-0", [], []] == sweep("0-0")
        assert ["21-0", [], []] == sweep("11-0")
        assert ["0-0", ["25-0"], []] == sweep("21-0")

    def test_a_sweep_names_the_pending_entries_that_were_deleted(self, ask: Ask) -> None:
        """XAUTOCLAIM drops deleted entries from the pending list, and says which (F-068)."""
        make_lane(ask, "1-0")
        claim_new(ask, "a")
        ask("XDEL", LANE, "1-0")
        assert ["0-0", [], ["1-0"]] == ask("XAUTOCLAIM", LANE, GROUP, "sweeper", 0, "0-0")
        assert [] == pending(ask)


class TestLane:
    """Waiting and running jobs are told apart by the group; entries do not move."""

    def test_a_job_submitted_before_the_group_exists_is_delivered(self, ask: Ask) -> None:
        """A group made at 0 gets what was there before it (G1, F-060)."""
        make_lane(ask, "1-0")
        assert ["1-0"] == claim_new(ask, "a")

    def test_an_entry_takes_the_number_of_its_line(self, ask: Ask) -> None:
        """XADD takes the id 5-0, and refuses it a second time and any lower one: no line is added twice (G16)."""
        assert "5-0" == ask("XADD", LANE, "5-0", "job", "five")
        for entry in ("5-0", "4-0"):
            with pytest.raises(ResponseError, match="equal or smaller"):
                ask("XADD", LANE, entry, "job", "again")
        assert 1 == ask("XLEN", LANE)

    def test_waiting_is_length_less_pending(self, ask: Ask) -> None:
        """XLEN counts what waits, runs or was handed back; XPENDING counts what runs (G17)."""
        make_lane(ask, "1-0", "2-0", "3-0")
        claim_new(ask, "a", count=2)
        ask("XACK", LANE, GROUP, "1-0")  # handed back: waits again, with its entry
        assert (3, 1) == (ask("XLEN", LANE), ask("XPENDING", LANE, GROUP)[0])

    def test_removing_a_consumer_destroys_what_it_runs(self, ask: Ask) -> None:
        """XGROUP DELCONSUMER drops pending entries for good: it needs a guard (G1, F-048)."""
        make_lane(ask, "1-0")
        claim_new(ask, "a")
        assert 1 == ask("XGROUP", "DELCONSUMER", LANE, GROUP, "a")
        assert [] == pending(ask)
        assert [] == claim_new(ask, "b")

    def test_a_missing_group_is_a_nogroup_error(self, ask: Ask) -> None:
        """After FLUSHALL a claim fails with NOGROUP, which tells that the group must be made again (G12, F-056)."""
        with pytest.raises(ResponseError, match="NOGROUP"):
            claim_new(ask, "a")

    def test_order_is_by_due_time_within_a_tenant(self, ask: Ask) -> None:
        """ZRANGEBYLEX from `tenant|` to `tenant}` gives this tenant's lanes, earliest due first, and no other's."""
        for member in ("ann|200|b", "ann|100|z", "ann|999|a", "anna|001|c", "an|001|d", "ann}|001|e", "ann |001|f"):
            ask("ZADD", "fact:order", 0, member)
        assert ["ann|100|z", "ann|200|b", "ann|999|a"] == ask("ZRANGEBYLEX", "fact:order", "[ann|", "(ann}")


class TestScripts:
    """What Lua sees and may do."""

    READ = "redis.call('XREADGROUP', 'GROUP', 'workers', 'a', 'COUNT', 1, 'STREAMS', KEYS[1], '>')"

    def test_an_empty_read_is_false(self, ask: Ask) -> None:
        """An XREADGROUP that finds nothing is `false` inside a script; fakeredis gives a table (F-140)."""
        make_lane(ask)
        assert "false" == ask("EVAL", f"return tostring({self.READ})", 1, LANE)

    def test_an_error_can_be_caught_by_its_code(self, ask: Ask) -> None:
        """`pcall` gives a table whose `err` begins with the code, so that a script can make a missing group (G12)."""
        read = self.READ.replace("call", "pcall")
        assert "NOGROUP" == ask("EVAL", f"return string.sub({read}.err, 1, 7)", 1, LANE)

    def test_a_script_can_make_a_missing_group(self, ask: Ask) -> None:
        """XGROUP CREATE MKSTREAM is allowed in a script, and the read after it works (G12)."""
        script = f"redis.call('XGROUP', 'CREATE', KEYS[1], 'workers', '0', 'MKSTREAM') return tostring({self.READ})"
        assert "false" == ask("EVAL", script, 1, LANE)

    def test_msgpack_is_there(self, ask: Ask) -> None:
        """`cmsgpack` reads and writes msgpack inside a script."""
        script = "local job = cmsgpack.unpack(ARGV[1]) return cmsgpack.pack({job.u, job.n + 1})"
        assert "\x92\xa2/v\x02" == ask("EVAL", script, 0, b"\x82\xa1u\xa2/v\xa1n\x01")

    def test_time_may_be_asked_before_writes(self, ask: Ask) -> None:
        """A script may take the server's TIME and then write: only its effects are replicated (G8, F-097)."""
        script = "local t = redis.call('TIME') redis.call('SET', KEYS[1], t[1]) return t[1]"
        assert ask("EVAL", script, 1, "fact:time") == ask("GET", "fact:time")

    def test_a_flushed_script_is_a_noscript_error(self, ask: Ask) -> None:
        """After SCRIPT FLUSH a call by digest fails with NOSCRIPT and has done nothing (G12, F-089)."""
        digest = ask("SCRIPT", "LOAD", "return redis.call('INCR', KEYS[1])")
        ask("SCRIPT", "FLUSH")
        with pytest.raises(NoScriptError):
            ask("EVALSHA", digest, 1, "fact:count")
        assert 0 == ask("EXISTS", "fact:count")


class TestFullMemory:
    """At `maxmemory` what was accepted must be able to end, and new work must be refused whole (G1, G15, F-095)."""

    #: Writes that need memory, as finish and hand back do them after their first command.
    WRITES = """
        redis.call('ZADD', KEYS[2], 1, '1-0')
        redis.call('HSET', KEYS[3], 'status', 200)
        redis.call('RPUSH', KEYS[4], 1)
    """
    KEYS = (4, LANE, "fact:back", "fact:job", "fact:bell")

    @pytest.fixture
    def full(self, own_server: OwnServer) -> Iterator[Ask]:
        """Ask a server with one running and one waiting job, which holds more than it may."""
        with asking(own_server(*VOLATILE).url) as ask:
            make_lane(ask, "1-0", "2-0")
            claim_new(ask, "a")
            ask("CONFIG", "SET", "maxmemory", 1)
            with pytest.raises(OutOfMemoryError):
                ask("SET", "fact:more", 1)
            yield ask

    @pytest.mark.parametrize(
        "first",
        [
            pytest.param("redis.call('XACK', KEYS[1], 'workers', '1-0')", id="acknowledges"),
            pytest.param("redis.call('XACK', KEYS[1], 'workers', '9-0')", id="acknowledges nothing"),
            pytest.param("redis.call('HDEL', KEYS[3], 'nothing')", id="deletes nothing"),
            pytest.param(TestScripts.READ, id="reads the group"),
            pytest.param(
                "redis.call('XPENDING', KEYS[1], 'workers', '1-0', '1-0', 1, 'a')"
                "redis.call('XACK', KEYS[1], 'workers', '1-0')",
                id="checks the fence, then acknowledges",
            ),
        ],
    )
    def test_a_script_that_begins_with_a_write_that_frees_may_write(self, full: Ask, first: str) -> None:
        """After XACK, XREADGROUP or HDEL a script may write anything: claim, finish and hand back go on (G15)."""
        full("EVAL", f"{first} {self.WRITES}", *self.KEYS)
        assert 3 == full("EXISTS", *self.KEYS[2:])

    def test_a_script_that_writes_first_is_refused(self, full: Ask) -> None:
        """Without that first command the same writes fail: the order of the writes in a script matters (G15)."""
        with pytest.raises(ResponseError, match="maxmemory"):
            full("EVAL", self.WRITES, *self.KEYS)
        assert 0 == full("EXISTS", *self.KEYS[2:])

    def test_a_submit_is_refused_before_any_effect(self, full: Ask) -> None:
        """A script that begins with XADD fails as a whole: nothing is half submitted (G1, G15)."""
        with pytest.raises(ResponseError, match="maxmemory"):
            full("EVAL", f"redis.call('XADD', KEYS[1], '3-0', 'job', 'x') {self.WRITES}", *self.KEYS)
        assert (2, 0) == (full("XLEN", LANE), full("EXISTS", *self.KEYS[2:]))

    def test_a_lease_can_be_renewed(self, full: Ask) -> None:
        """XCLAIM JUSTID is not refused: running jobs keep their leases (G4)."""
        assert ["1-0"] == full(
            "EVAL", "return redis.call('XCLAIM', KEYS[1], 'workers', 'a', 0, '1-0', 'JUSTID')", 1, LANE
        )


@pytest.mark.parametrize("rewritten", [False, True], ids=["log", "rewritten log"])
def test_the_pending_list_survives_kill_and_reload(own_server: OwnServer, rewritten: bool) -> None:
    """After SIGKILL and a reload of the append-only file the same jobs run, in the same deliveries (G1, G3, F-071)."""
    server = own_server()
    with asking(server.url) as ask:
        make_lane(ask, "1-0", "2-0", "3-0", "4-0")
        claim_new(ask, "a", count=3)
        ask("XACK", LANE, GROUP, "2-0", "3-0")  # both handed back
        claim_again(ask, "b", "3-0", 5)
        ask("XCLAIM", LANE, GROUP, "b", 0, "3-0", "JUSTID")  # renewed
        if rewritten:
            rewrite_log(ask)
        server.kill()
    server.restart()
    with asking(server.url) as ask:
        assert [("1-0", "a", 1), ("3-0", "b", 5)] == pending(ask)
        assert (4, ["4-0"]) == (ask("XLEN", LANE), claim_new(ask, "c", count=10))


def rewrite_log(ask: Ask) -> None:
    """Have the server write its append-only file anew, and wait for the end of it (it sends no event)."""
    ask("BGREWRITEAOF")
    while any(f"aof_rewrite_{word}:1" in ask("INFO", "persistence") for word in ("in_progress", "scheduled")):
        time.sleep(0.005)
