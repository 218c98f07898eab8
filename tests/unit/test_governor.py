"""The governor: where the batch cap goes, given what chat sees. Pure values in and out."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from llmq.workers.chat_signal import Evidence
from llmq.workers.governor import (
    AIM,
    CLEARED_S,
    FIRST_SHARE,
    IDLE_S,
    NEAR,
    STREAK,
    WASTE_SHARE,
    Operating,
    Seen,
    State,
    is_broken,
    step,
)

MOST = 16


def seen(at: float, good: int = 0, slow: int = 0, **changes: float | Evidence | None) -> Seen:
    """Return a moment with chat, a full batch, and these requests since the last step."""
    fresh = Evidence(good + slow, slow)
    quiet = {"fresh": fresh, "recent": Evidence(), "batch": MOST, "most": MOST, "chat_idle_s": 0.0}
    return Seen(at=at, **{**quiet, **changes})  # type: ignore[arg-type]


def beside_chat(cap: float = 8.0) -> Operating:
    """Return an operating point that has been beside chat for a while."""
    return Operating(cap=cap, known=cap, at=0.0, since=0.0, most_batch=MOST, doubling=False, state=State.HOLDS)


EVIDENCE = st.builds(lambda good, slow: Evidence(good + slow, slow), st.integers(0, 30), st.integers(0, 30))
MOMENTS = st.lists(
    st.builds(
        Seen,
        at=st.just(0.0),
        fresh=EVIDENCE,
        recent=EVIDENCE,
        batch=st.integers(0, MOST),
        most=st.integers(0, MOST),
        chat_idle_s=st.none() | st.floats(0, 60),
        wasted=st.floats(0, 1),
    ),
    max_size=60,
)


@given(MOMENTS)
def test_the_cap_stays_between_nothing_and_what_the_reserve_leaves(moments: list[Seen]) -> None:
    """Whatever is seen: never below 0, never into the slots that are kept for chat."""
    now = Operating.start(0.0, MOST)
    for number, moment in enumerate(moments):
        now = step(now, replace(moment, at=number / 10))
        assert 0 <= now.batch_cap <= moment.most


def test_nothing_known_begins_low_and_doubles_until_the_first_slow_request() -> None:
    """The first chat is not met with a full engine; a streak doubles the cap, a slow request ends that."""
    now = step(Operating.start(0.0, MOST), seen(0.1))
    assert MOST * FIRST_SHARE == now.cap
    caps = []
    for number in range(4):
        now = step(now, seen(0.2 + number, good=STREAK))
        caps.append(now.batch_cap)
    assert [4, 8, 16, 16] == caps
    now = step(now, seen(9.0, slow=1))
    assert not now.doubling


def test_a_slow_request_weighs_as_much_as_many_good_ones() -> None:
    """So the cap rests where the share of slow ones is AIM, a little under what a p95 allows."""
    down = step(beside_chat(), seen(0.1, slow=1)).cap
    up = step(replace(beside_chat(), cap=down), seen(0.2, good=round(1 / AIM) - 1)).cap
    assert down < 8 * 0.95
    assert abs(up - 8) < 0.2


def test_it_converges_to_the_cap_at_which_as_many_are_slow_as_it_aims_at() -> None:
    """A world in which the share of slow requests grows with the cap: what it aims at is reached at a cap of 6."""
    now, debt, caps = beside_chat(cap=MOST), 0.0, []
    for number in range(6000):
        debt += AIM * now.cap / 6
        slow = int(debt >= 1)
        debt -= slow
        now = step(now, seen(number / 10, good=1 - slow, slow=slow, batch=now.batch_cap))
        caps.append(now.cap)
    settled = caps[2000:]
    assert 5 < sum(settled) / len(settled) < 7
    assert max(settled) - min(settled) < 3  # the band: no swing between nothing and all


def test_a_burst_of_slow_requests_halves_the_cap_at_once() -> None:
    """Three slow of three is not luck; what batch really used is halved, not what it might have."""
    now = step(beside_chat(), seen(0.1, recent=Evidence(3, 3)))
    assert (4, State.CUT) == (now.batch_cap, now.state)
    assert 2 == step(replace(beside_chat(), most_batch=4), seen(0.1, recent=Evidence(3, 3), batch=4)).batch_cap


def test_a_cut_is_not_repeated_for_what_came_before_it() -> None:
    """While more batch runs than the cap allows, what chat sees moves nothing, and evidence begins anew."""
    cut = step(beside_chat(), seen(0.1, recent=Evidence(3, 3)))
    later = step(cut, seen(0.5, slow=2, batch=8))
    assert (cut.cap, 0.5) == (later.cap, later.since)
    assert step(later, seen(0.6, slow=2, batch=4)).cap < cut.cap


def test_what_was_known_to_hold_comes_back_after_a_streak() -> None:
    """The burst was chat's own: after some good requests the cap is near its old mean again, but only once."""
    now = step(beside_chat(), seen(0.1, recent=Evidence(3, 3)))
    now = step(now, seen(0.2, good=STREAK, batch=4))
    for number in range(30):
        now = step(now, seen(0.3 + number / 10, batch=now.batch_cap))
    assert 7 > now.cap >= NEAR * 8 * 0.95
    assert now.known < 8


def test_luck_is_no_breach() -> None:
    """One slow request of any number, and a share of slow ones that a p95 allows, break nothing."""
    assert not is_broken(Evidence(1, 1))
    assert not is_broken(Evidence(100, 5))
    assert not is_broken(Evidence(20, 2))
    assert is_broken(Evidence(3, 3))
    assert is_broken(Evidence(40, 9))


@given(st.integers(0, 300), st.integers(0, 300))
def test_more_slow_requests_are_never_better_evidence_for_batch(total: int, slow: int) -> None:
    """What is broken with some slow requests is broken with one more of as many."""
    slow = min(slow, total)
    if is_broken(Evidence(total, slow)):
        assert is_broken(Evidence(max(total, slow + 1), slow + 1))


def test_without_chat_batch_has_all_slots_and_chat_gets_its_cap_back() -> None:
    """Nobody waits, so nothing is held back; the first chat request is met with what is known."""
    now = step(beside_chat(), seen(1.0, chat_idle_s=IDLE_S + 1))
    assert (MOST, State.IDLE) == (now.batch_cap, now.state)
    assert 8 == step(now, seen(1.1)).batch_cap
    assert MOST == step(beside_chat(), seen(1.0, chat_idle_s=None)).batch_cap


def test_sparse_traffic_neither_opens_nor_closes_the_cap() -> None:
    """A request every ten seconds is no absence: the cap waits for evidence."""
    now = beside_chat()
    for number in range(50):
        now = step(now, seen(number / 10, chat_idle_s=number / 10))
    assert 8 == now.batch_cap


def test_chat_that_is_slow_on_its_own_costs_batch_nothing() -> None:
    """Never at zero without cause: no batch ran, so none is to blame, and the state says whose load it is."""
    alone = replace(beside_chat(cap=3.0), most_batch=0)
    now = step(alone, seen(0.1, slow=3, recent=Evidence(3, 3), batch=0))
    assert (3.0, State.OWN_LOAD) == (now.cap, now.state)


def test_at_a_cap_of_nothing_chat_s_own_slowness_counts_for_nothing() -> None:
    """Long after the last batch request slow chat is chat's own; a run of good requests lets one in again."""
    now = replace(beside_chat(cap=0.4), known=0.4, batch_at=0.0)
    now = step(now, seen(CLEARED_S + 1, slow=5, recent=Evidence(5, 5), batch=0))
    assert (0.4, State.OWN_LOAD) == (now.cap, now.state)
    now = step(now, seen(CLEARED_S + 2, good=STREAK, batch=0))
    assert (1, State.HOLDS) == (now.batch_cap, now.state)


def test_a_cap_of_nothing_comes_up_again() -> None:
    """It does not stay at zero: good requests bring it back to one, and so to evidence."""
    now = replace(beside_chat(cap=0.0), known=0.0)
    for number in range(200):
        now = step(now, seen(number / 10, good=1, batch=now.batch_cap))
    assert now.batch_cap >= 1


def test_a_cap_that_batch_does_not_reach_is_not_raised() -> None:
    """What would be at a cap that nobody used is unknown."""
    now = beside_chat()
    for number in range(100):
        now = step(now, seen(number / 10, good=1, batch=2))
    assert 8 == now.batch_cap


def test_waste_leaves_chat_more_free_slots() -> None:
    """Chat that preempts again and again throws tokens away: the cap gives way, not more than once in a while."""
    now = step(beside_chat(), seen(5.0, wasted=WASTE_SHARE * 2))
    assert (7, State.WASTE) == (now.batch_cap, now.state)
    assert now.cap == step(now, seen(5.1, wasted=WASTE_SHARE * 2, batch=7)).cap
