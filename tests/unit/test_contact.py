"""Contact: how long Redis was seen without a gap, on a clock that the test moves."""

from __future__ import annotations

import pytest

from llmq.workers.contact import Contact


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


@pytest.fixture
def clock() -> Clock:
    """Return a new clock."""
    return Clock()


def seen_for(contact: Contact, clock: Clock, seconds: float) -> None:
    """See Redis each second for a while."""
    contact.seen(clock.now)
    for _ in range(int(seconds)):
        clock.now += 1
        contact.seen(clock.now)


def test_nobody_who_has_not_seen_redis_has_contact(clock: Clock) -> None:
    """G4: a worker that has just started reclaims nothing."""
    contact = Contact(10, clock)
    assert 0 == contact.unbroken()
    assert not contact.long_enough()


def test_contact_is_long_enough_after_one_lease(clock: Clock) -> None:
    """G4: one full lease, not less."""
    contact = Contact(10, clock)
    seen_for(contact, clock, 9)
    assert not contact.long_enough()
    seen_for(contact, clock, 1)
    assert contact.long_enough()


def test_a_lost_contact_begins_anew(clock: Clock) -> None:
    """G4: Redis was away; what looks like a lapsed lease may only not have been renewed for that."""
    contact = Contact(10, clock)
    seen_for(contact, clock, 20)
    contact.lost()
    assert 0 == contact.unbroken()
    seen_for(contact, clock, 3)
    assert 3 == contact.unbroken()


def test_half_a_lease_without_a_sign_of_life_breaks_it(clock: Clock) -> None:
    """G4: a process that was stopped, or a Redis that was, is noticed by the gap alone."""
    contact = Contact(10, clock)
    seen_for(contact, clock, 20)
    clock.now += 5.1
    assert 0 == contact.unbroken()
    contact.seen(clock.now)
    assert 0 == contact.unbroken()


def test_a_clock_that_was_set_on_breaks_it(clock: Clock) -> None:
    """G4: leases look older by what it leapt, while their owners have had no time to renew them."""
    contact = Contact(10, clock)
    ahead = 5_000.0
    for _ in range(20):
        clock.now += 1
        contact.seen(clock.now)
        contact.redis_time(clock.now + ahead, clock.now)
    assert contact.long_enough()
    contact.redis_time(clock.now + ahead + 3, clock.now)
    assert 0 == contact.unbroken()
    contact.redis_time(clock.now + ahead + 3, clock.now)
    seen_for(contact, clock, 10)
    assert contact.long_enough()


@pytest.mark.parametrize("leapt", [-3600.0, 0.0, 2.4])
def test_a_clock_that_was_set_back_or_little_on_does_not(clock: Clock, leapt: float) -> None:
    """Leases look younger then, or older by less than a quarter of one."""
    contact = Contact(10, clock)
    seen_for(contact, clock, 20)
    contact.redis_time(7_000.0, clock.now)
    contact.redis_time(7_000.0 + leapt, clock.now)
    assert contact.long_enough()


def test_a_time_that_was_long_on_its_way_is_no_leap(clock: Clock) -> None:
    """The question or the answer waited: when in between Redis told it is not known."""
    contact = Contact(60, clock)
    seen_for(contact, clock, 60)
    for early, late in ((0.0, 20.0), (20.0, 0.0), (0.0, 20.0)):
        asked_at = clock.now
        clock.now += early
        told = 5_000.0 + clock.now
        clock.now += late
        contact.redis_time(told, asked_at)
        contact.seen(clock.now)
    assert contact.long_enough()


def test_an_answer_that_comes_late_proves_nothing_of_the_time_in_which_it_came(clock: Clock) -> None:
    """G4: it waited on its way, and came while Redis had stopped: the contact begins when that is over."""
    contact = Contact(2, clock)
    contact.lost()
    clock.now += 2
    contact.seen(clock.now - 1.8)  # came now, from before Redis stopped
    assert 0 == contact.unbroken()
    clock.now += 0.2
    contact.seen(clock.now - 0.1)
    assert 0 == contact.unbroken()
    seen_for(contact, clock, 5)
    assert 5 == contact.unbroken()


def test_an_old_answer_takes_nothing_back_from_a_newer_one(clock: Clock) -> None:
    """A bell is waited for a second or longer, and other calls are answered meanwhile."""
    contact = Contact(2, clock)
    seen_for(contact, clock, 5)
    contact.seen(clock.now - 4)
    assert 5 == contact.unbroken()


def test_another_server_is_another_contact(clock: Clock) -> None:
    """G4: a failover, or a restart between two commands, shows by the server's run id."""
    contact = Contact(10, clock)
    contact.server("a")
    seen_for(contact, clock, 20)
    contact.server("a")
    assert contact.long_enough()
    contact.server("b")
    assert not contact.long_enough()


def test_a_lease_that_is_made_shorter_counts_from_then_on(clock: Clock) -> None:
    """G4: others renew by the longer lease until they have heard of the shorter one, so 5 s pass at least."""
    contact = Contact(10, clock)
    seen_for(contact, clock, 20)
    contact.lease_is(2)
    seen_for(contact, clock, 4)
    assert not contact.long_enough()
    seen_for(contact, clock, 1)
    assert contact.long_enough()


def test_a_lease_that_is_made_longer_needs_more_contact(clock: Clock) -> None:
    """G4: the contact goes on, and is measured by the longer lease."""
    contact = Contact(10, clock)
    seen_for(contact, clock, 20)
    contact.lease_is(60)
    assert 20 == contact.unbroken()
    assert not contact.long_enough()
