"""The governor: where the batch cap goes, given what chat sees. Pure values in and out."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from llmq.workers.chat_signal import Evidence
from llmq.workers.governor import (
    AIM,
    CLEARED_S,
    DROP,
    FIRST_SHARE,
    IDLE_S,
    LEAST,
    LOW_AIM,
    PROTECTED_S,
    RUN,
    WASTE_DROP,
    WASTE_SHARE,
    Operating,
    Search,
    Seen,
    State,
    is_broken,
    loosened,
    step,
)

MOST = 16


def seen(at: float, good: int = 0, slow: int = 0, **changes: float | Evidence | None) -> Seen:
    """Return a moment with chat, a full batch, and these requests since the last step."""
    fresh = Evidence(good + slow, slow)
    quiet = {"fresh": fresh, "recent": Evidence(), "batch": MOST, "chat": 0, "most": MOST, "chat_idle_s": 0.0}
    return Seen(at=at, **{**quiet, **changes})  # type: ignore[arg-type]


def beside_chat(limit: float = 8.0) -> Operating:
    """Return an operating point that has been beside chat for a while."""
    return Operating(limit=limit, at=0.0, since=0.0, most_load=MOST, batch_at=0.0, state=State.HOLDS)


def cap(now: Operating, chat: int = 0) -> int:
    """Return how much batch may run beside so much chat."""
    return now.batch_cap(chat, MOST)


EVIDENCE = st.builds(lambda good, slow: Evidence(good + slow, slow), st.integers(0, 30), st.integers(0, 30))
MOMENTS = st.lists(
    st.builds(
        Seen,
        at=st.just(0.0),
        fresh=EVIDENCE,
        recent=EVIDENCE,
        batch=st.integers(0, MOST),
        chat=st.integers(0, 2 * MOST),
        most=st.integers(0, MOST),
        chat_idle_s=st.none() | st.floats(0, 60),
        wasted=st.floats(0, 1),
        wasted_at=st.floats(-10, 10),
    ),
    max_size=60,
)


@given(MOMENTS)
def test_the_cap_stays_between_nothing_and_what_the_reserve_leaves(moments: list[Seen]) -> None:
    """Whatever is seen: never below 0, never into the slots that are kept for chat."""
    now = Operating.start(0.0, MOST)
    for number, moment in enumerate(moments):
        now = step(now, replace(moment, at=number / 10))
        assert 0 <= now.batch_cap(moment.chat, moment.most) <= moment.most
        assert now.limit >= LEAST


@given(st.floats(0, 40), st.integers(0, 30))
def test_batch_makes_room_for_each_chat_request_at_once(limit: float, chat: int) -> None:
    """Before anybody was slow: chat and batch together never exceed the limit, but for chat, and one of batch."""
    now = beside_chat(limit)
    assert chat + cap(now, chat) <= max(chat + 1, limit + 1e-6)
    assert cap(now, chat + 1) <= cap(now, chat)


def test_one_batch_request_stays_where_there_is_room_for_it_beside_average_chat() -> None:
    """A moment of more chat sends all others away; with no room for one beside the average, that one as well."""
    now = replace(beside_chat(limit=4.0), chat=3.0)
    assert [1, 1, 1] == [cap(now, chat) for chat in (3, 4, 12)]
    assert [2, 1, 0, 0] == [cap(replace(now, limit=3.9), chat) for chat in (1, 2, 3, 4)]
    assert 0 == now.batch_cap(12, 0)


def searching(chat: float = 4.0, most: int = MOST) -> Operating:
    """Return an operating point that knows nothing, with so much chat around for a while."""
    now = step(Operating.start(0.0, most), seen(0.1, most=most, chat=chat))
    for number in range(1, 200):
        now = step(now, seen(0.1 + number / 10, most=most, chat=chat, batch=now.batch_cap(int(chat), most)))
    return now


def test_nothing_known_leaves_batch_a_small_share_beside_what_chat_has() -> None:
    """The first chat is not met with a full engine, and much chat does not mean that batch gets nothing."""
    first = Operating.start(0.0, MOST)
    assert MOST * FIRST_SHARE == cap(replace(first, state=State.HOLDS), chat=1)
    assert MOST * FIRST_SHARE == cap(searching(chat=4), chat=4)
    assert MOST * FIRST_SHARE == cap(searching(chat=9), chat=9)
    assert 1 == cap(searching(chat=4), chat=9)  # more chat than there is on average still has its place at once
    assert MOST * FIRST_SHARE == cap(searching(chat=9), chat=0)  # nor does batch take what chat leaves for a moment
    assert 1 == cap(searching(chat=1, most=4), chat=1)


def test_the_search_gives_batch_half_as_much_again_after_each_run_until_the_second_slow_request() -> None:
    """One slow request in a run is chat's own as often as not; two of a run end the search, and both of them count."""
    now, caps = searching(), []
    for number in range(4):
        now = step(now, seen(21.0 + number, good=RUN - 1, slow=1, chat=4))
        now = step(now, seen(21.1 + number, chat=4))
        caps.append(cap(now, chat=4))
    assert [3, 4, 6, 10] == caps
    now = step(now, seen(30.0, slow=1, chat=4))
    assert now.search is not None
    after = step(now, seen(30.1, slow=1, chat=4))
    assert after.search is None
    assert abs(after.limit - now.limit * (1 - 2 * DROP)) < 0.01


def runs_of(now: Operating, batches: list[int], chat: float = 4.0) -> float:
    """Return what batch may have beside chat after one good run, with so much batch at the moments of the run."""
    for number, batch in enumerate(batches, 1):
        now = step(now, seen(21.0 + number / 10, good=RUN // len(batches), chat=chat, batch=batch))
    assert now.search is not None
    return now.search.beside


def test_a_search_that_batch_does_not_follow_goes_no_further() -> None:
    """One batch request where three may run says nothing about four, however much chat there is; three do."""
    begun = replace(searching(), search=Search(3.0))
    assert 3.0 == runs_of(begun, [1, 1, 2])
    assert 3.0 == runs_of(begun, [1, 1, 2], chat=12.0)
    assert 4.5 == runs_of(begun, [1, 3, 1])
    assert MOST == runs_of(replace(begun, search=Search(12.0)), [12])


def test_a_slow_request_in_a_search_is_news_too() -> None:
    """What is thrown away right after it moves nothing: the limit waits for what the one brings before the other."""
    slow = step(searching(), seen(21.0, slow=1, chat=4))
    assert slow.search is not None
    assert step(slow, seen(22.0, wasted=WASTE_SHARE * 2, wasted_at=22.0, chat=4)).state is State.SEARCH
    assert step(slow, seen(24.0, wasted=WASTE_SHARE * 2, wasted_at=22.0, chat=4)).state is State.WASTE


@given(st.lists(EVIDENCE, max_size=20))
def test_a_search_ends_with_a_breach_and_with_waste(runs: list[Evidence]) -> None:
    """What halves the limit, or lets it give way, is not undone by what the search believes."""
    waste = seen(50.0, wasted=WASTE_SHARE * 2, wasted_at=50.0, chat=4)
    for breach in (seen(50.0, recent=Evidence(3, 3), chat=4), waste):
        now = searching()
        for number, fresh in enumerate(runs):
            now = step(now, seen(21.0 + number, good=fresh.seen - fresh.slow, slow=fresh.slow, chat=4))
        beside = MOST if now.search is None else now.search.beside
        after = step(now, breach)
        assert after.search is None
        assert after.limit < after.chat + beside


def test_the_average_of_chat_is_known_from_the_first_second() -> None:
    """It is the average of what was seen so far: a search does not wait ten seconds for it to come up."""
    for first in (Operating.start(1000.0, MOST), Operating.start(1000.0, MOST, tuned=8.0)):
        now = first
        for number in range(10):
            now = step(now, seen(1000.1 + number / 10, chat=6))
        assert abs(now.chat - 6) < 0.1


def test_after_a_pause_the_average_begins_anew() -> None:
    """What chat had before it went away says nothing about how much comes back."""
    now = step(searching(chat=9), seen(100.0, chat_idle_s=IDLE_S + 1))
    for number in range(10):
        now = step(now, seen(100.1 + number / 10, chat=2))
    assert abs(now.chat - 2) < 0.1


def test_what_was_tuned_is_the_beginning() -> None:
    """And nothing is searched for from there: somebody has measured it."""
    now = step(Operating.start(0.0, MOST, tuned=9.5), seen(0.1, chat=2))
    assert (9.5, None, 7) == (now.limit, now.search, cap(now, chat=2))


def test_a_slow_request_weighs_as_much_as_many_good_ones() -> None:
    """So the limit rests where the share of slow ones is AIM, under what a p95 allows: bursts come on top."""
    down = step(beside_chat(), seen(0.1, slow=1)).limit
    up = step(replace(beside_chat(), limit=down), seen(0.2, good=round(1 / AIM) - 1)).limit
    assert down == 8 * (1 - DROP)
    assert abs(up - 8) < 0.2


def test_it_converges_to_the_limit_at_which_as_many_are_slow_as_it_aims_at() -> None:
    """A world in which the share of slow requests grows with the load: what it aims at is reached at a limit of 6."""
    now, debt, limits = beside_chat(limit=MOST), 0.0, []
    for number in range(6000):
        debt += AIM * now.limit / 6
        slow = int(debt >= 1)
        debt -= slow
        now = step(now, seen(number / 10, good=1 - slow, slow=slow, batch=cap(now)))
        limits.append(now.limit)
    settled = limits[2000:]
    assert 5 < sum(settled) / len(settled) < 7
    assert max(settled) - min(settled) < 3  # the band: no swing between nothing and all


def test_a_burst_of_slow_requests_halves_the_limit_at_once() -> None:
    """Three slow of three is not luck; what was really in flight is halved, not what might have been."""
    now = step(beside_chat(), seen(0.1, recent=Evidence(3, 3)))
    assert (4, State.CUT) == (cap(now), now.state)
    assert 2 == cap(step(replace(beside_chat(), most_load=4), seen(0.1, recent=Evidence(3, 3), batch=4)))


def test_a_limit_below_nothing_is_not_raised_by_a_breach() -> None:
    """What still runs then was left to end."""
    low = beside_chat(limit=LEAST)
    assert LEAST == step(low, seen(0.1, recent=Evidence(3, 3), batch=1)).limit
    assert LEAST == step(low, seen(1.0, wasted=WASTE_SHARE * 2, wasted_at=1.0, batch=1)).limit


def test_a_cut_is_not_repeated_for_what_came_before_it() -> None:
    """While more batch runs than the cut allows, what chat sees moves nothing, and evidence begins anew."""
    cut = step(beside_chat(), seen(0.1, recent=Evidence(3, 3)))
    later = step(cut, seen(0.5, slow=2, batch=8))
    assert (cut.limit, 0.5) == (later.limit, later.since)
    assert step(later, seen(0.6, slow=2, batch=4)).limit < cut.limit


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


def test_without_chat_batch_has_all_slots_and_the_limit_holds_again_from_the_first_request() -> None:
    """Nobody waits, so nothing is held back; the first chat request needs no step of the governor to be heeded."""
    now = step(beside_chat(), seen(1.0, chat_idle_s=IDLE_S + 1))
    assert (MOST, State.IDLE) == (cap(now), now.state)
    assert 7 == cap(now, chat=1)
    assert 8 == cap(step(now, seen(1.1)))
    assert MOST == cap(step(beside_chat(), seen(1.0, chat_idle_s=None)))


def test_sparse_traffic_neither_opens_nor_closes_the_limit() -> None:
    """A request every ten seconds is no absence: the limit waits for evidence."""
    now = beside_chat()
    for number in range(50):
        now = step(now, seen(number / 10, chat_idle_s=number / 10))
    assert 8 == now.limit


def without_batch(now: Operating, good: int = 0, slow: int = 0) -> Operating:
    """Return what follows where chat sees this, long after the last batch request."""
    return step(now, seen(now.at + CLEARED_S + 1, good=good, slow=slow, recent=Evidence(good + slow, slow), batch=0))


#: So many good requests bring back what one slow one takes, where there is room for one of batch.
KEEP = round(1 / LOW_AIM) - 1


def test_without_batch_chat_s_own_slowness_counts_for_nothing() -> None:
    """Where there is none to run, slow chat is chat's own, and so is fast chat; the state says so."""
    now = without_batch(beside_chat(limit=3.0), slow=5)
    assert (3.0, State.OWN_LOAD) == (now.limit, now.state)
    assert 3.0 == without_batch(now, good=1000).limit
    assert 3.0 == step(now, seen(now.at + 1, good=1000, batch=0, chat=5)).limit  # chat reaches the limit by itself


def test_one_slow_request_sends_the_last_of_batch_away_and_so_many_good_ones_bring_it_back() -> None:
    """So the share that is slow is kept to with batch coming and going, where a little of it would be too much."""
    now = step(beside_chat(limit=1.5), seen(0.1, slow=1, batch=1))
    assert 0 == cap(now)
    now = without_batch(now, good=KEEP // 3)
    assert 0 == cap(now)
    now = without_batch(now, good=KEEP - KEEP // 3)
    assert (1, 1.5) == (cap(now), round(now.limit, 1))
    assert now.limit == without_batch(now, good=1000).limit  # it may run, so chat without it says nothing


def test_where_one_fills_the_engine_batch_stays_as_long_as_a_p95_allows_it() -> None:
    """No more than one can come of it: 19 good requests are enough for one slow one, with batch and without."""
    now = step(beside_chat(limit=1.5), seen(0.1, slow=1, batch=1, enough=1))
    out = now.at + CLEARED_S + 1
    one, two = (step(now, seen(out, good=19, batch=0, enough=enough)) for enough in (1, 2))
    assert (1.5, 1.1) == (round(one.limit, 1), round(two.limit, 1))


def test_chat_s_own_slow_requests_do_not_put_batch_off() -> None:
    """Never at zero without cause: what is slow while batch is out is no reason to keep it there."""
    now = without_batch(beside_chat(limit=0.5), slow=100)
    assert (0.5, State.OWN_LOAD) == (now.limit, now.state)
    assert 1 == cap(without_batch(now, good=KEEP, slow=KEEP))


def test_slow_requests_that_come_together_keep_batch_out_no_longer_than_two() -> None:
    """However many saw the same batch request."""
    now = step(beside_chat(limit=1.5), seen(0.1, slow=9, batch=1))
    assert now.limit == LEAST
    assert 0 == cap(without_batch(now, good=2 * KEEP - 3))
    assert 1 == cap(without_batch(now, good=2 * KEEP + 3))


def test_batch_that_had_to_leave_comes_back_beside_the_chat_that_there_is_on_average() -> None:
    """Good requests let one in where chat fills the whole limit, and so lead to evidence; a moment of much chat does
    not let as much batch in.
    """
    full = replace(beside_chat(limit=5.5), chat=5.0, chat_from=-100.0)
    now = step(full, seen(CLEARED_S + 1, good=KEEP, batch=0, chat=5))
    assert (1, 1) == (cap(now, chat=5), cap(now, chat=9))
    calm = replace(beside_chat(limit=0.4), at=CLEARED_S + 0.9, chat=0.5, chat_from=-100.0)
    now = step(calm, seen(CLEARED_S + 1, good=KEEP, batch=0, chat=8))
    assert (1, 0) == (cap(now), cap(now, chat=1))


def test_where_tune_found_one_to_be_too_much_it_is_tried_late() -> None:
    """What was measured with care is not thrown over by a second of good luck."""
    now = replace(Operating.start(0.0, MOST, 0.0), state=State.HOLDS)
    assert 0 == cap(without_batch(now, good=2 * KEEP - 3))
    assert 1 == cap(without_batch(now, good=2 * KEEP + 3))


def test_a_limit_of_nothing_comes_up_again() -> None:
    """It does not stay at zero: good requests bring it back to one, and so to evidence."""
    now = beside_chat(limit=0.0)
    for number in range(200):
        now = step(now, seen(number / 10, good=1, batch=cap(now)))
    assert cap(now) >= 1


def test_a_limit_that_is_not_reached_is_not_raised() -> None:
    """What would be at a load that never was is unknown; a limit above all that could run is brought down to it."""
    now = beside_chat()
    for number in range(100):
        now = step(now, seen(number / 10, good=1, batch=2, chat=3))
    assert 8 == now.limit
    assert MOST == step(beside_chat(limit=3.0 * MOST), seen(0.1, good=1)).limit


def test_where_the_engine_is_full_the_limit_is_paid_back_though_nobody_reaches_it() -> None:
    """Else each slow request would count there and no good one, until batch had less than fills the engine."""
    now = beside_chat(6.0)
    for n in range(400):
        now = step(now, seen(n / 10, good=39, slow=1, batch=4, enough=4))
    assert 5.5 < now.limit
    for n in range(400):
        now = step(now, seen(40 + n / 10, good=39, slow=1, batch=3, enough=4))
    assert now.limit < 4.0


def test_a_search_that_finds_the_engine_full_is_over() -> None:
    """It would give batch more for ever, and say that nothing is known yet."""
    now = searching()
    now = step(now, seen(0.1, good=1, batch=2, enough=3))
    assert State.SEARCH is now.state
    now = step(now, seen(0.2, good=1, batch=3, enough=3))
    assert (State.HOLDS, None) == (now.state, now.search)


def waste(at: float, wasted_at: float, batch: int = MOST) -> Seen:
    """Return a moment at which too much was thrown away lately, the last of it at `wasted_at`."""
    return seen(at, wasted=WASTE_SHARE * 2, wasted_at=wasted_at, batch=batch)


def test_waste_leaves_chat_more_free_slots() -> None:
    """Chat that preempts again and again throws tokens away: the limit gives way, not more than once in a while."""
    now = step(beside_chat(), waste(5.0, 5.0))
    assert (7, State.WASTE) == (cap(now), now.state)
    assert now.limit == step(now, waste(5.1, 5.0, batch=7)).limit
    assert now.limit > step(now, waste(7.1, 5.0, batch=7)).limit


def after_a_pause(limit: float = 8.0) -> Operating:
    """Return an operating point a moment after chat came back, with twice as much batch as the limit allows."""
    return step(step(beside_chat(limit), seen(30.0, chat_idle_s=IDLE_S + 1)), seen(30.1))


def test_a_limit_is_not_judged_by_what_ran_without_chat() -> None:
    """What had all slots when chat came back, and what that threw away, says nothing of it; what it allows does."""
    now = after_a_pause()
    assert 8 == step(now, seen(30.2, slow=2)).limit
    assert 8 == step(now, waste(33.0, 31.0)).limit
    within = step(now, seen(30.2, batch=8))
    assert 8 == step(within, waste(40.0, 31.0, batch=8)).limit
    assert 8 * (1 - WASTE_DROP) == step(within, waste(40.0, 33.0, batch=8)).limit
    assert 8 * (1 - DROP) == step(within, seen(30.3, slow=1)).limit


def test_chat_that_comes_back_to_slow_answers_has_batch_cut_to_the_limit_and_not_to_half_of_it() -> None:
    """Each pause of chat halved a limit that was right."""
    cut = step(after_a_pause(), seen(30.5, recent=Evidence(3, 3)))
    assert (8, State.CUT) == (cut.limit, cut.state)
    assert 8 == step(cut, seen(30.6, slow=3)).limit
    assert 4 == step(step(cut, seen(30.6, batch=8)), seen(31.0, batch=8, recent=Evidence(3, 3))).limit


def test_what_the_deadline_starts_does_not_keep_the_limit_where_it_is() -> None:
    """Never at zero without cause: one protected line after the other runs over a limit that keeps batch out."""
    for over in (replace(beside_chat(limit=0.5), state=State.CUT, over=True, slow_at=0.0), after_a_pause(limit=0.5)):
        now, caps = over, []
        for number in range(round(10 * PROTECTED_S) + KEEP):
            now = step(now, seen(now.at + 0.1, good=1, slow=number % 2, batch=1))
            caps.append(cap(now))
        assert (0, 1) == (max(caps[: round(10 * PROTECTED_S)]), max(caps))


def test_a_far_looser_objective_is_searched_from_where_batch_is() -> None:
    """A doubling of the limit would take 700 good requests; a search takes two runs."""
    now = replace(beside_chat(limit=8.0), chat=2.0)
    assert 6 == cap(loosened(now), chat=2)
    now = step(loosened(now), seen(0.1, good=RUN, chat=2, batch=6))
    assert 9 == cap(step(now, seen(0.2, chat=2)), chat=2)
    assert 1 == cap(loosened(replace(now, limit=LEAST)), chat=2)


def test_what_is_over_is_not_said_for_ever() -> None:
    """Chat's own load is over with the next good request, a cut with its end, also where there is no batch to run."""
    now = without_batch(beside_chat(limit=3.0), slow=1)
    assert State.OWN_LOAD is now.state is without_batch(now).state
    assert State.HOLDS is without_batch(now, good=1).state
    assert State.HOLDS is without_batch(replace(now, state=State.CUT, over=True), good=1).state
    assert State.SEARCH is without_batch(replace(now, search=Search(1.0)), good=1).state
