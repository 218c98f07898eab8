"""The audit is not lax: for each law a run that breaks it is found, and one that is nearly the same is not.

The runs are made by hand (`handmade.py`), in the commands that stand in a server's append-only file.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.chaos.audit import LAWS, audit
from tests.chaos.evidence import Evidence
from tests.chaos.handmade import W0, W1, Handmade

Case = Callable[[bool], Evidence]

CASES: list[tuple[str, Case]] = []


def case(law: str) -> Callable[[Case], Case]:
    """Add a pair of runs of a law: `bad` chooses the one that breaks it."""

    def add(make: Case) -> Case:
        CASES.append((law, make))
        return make

    return add


def one_job(name: str = "j", lane: str = "i:t") -> Handmade:
    """Return a run in which one job was submitted and is claimed a second later."""
    made = Handmade()
    made.configure(lease=1500, deadline=2000)
    made.job(name, lane)
    made.at(1.0).claim(name)
    return made


@case("G1")
def a_job_never_ends(bad: bool) -> Evidence:
    """An accepted job is still there when all is over."""
    made = one_job()
    if not bad:
        made.at(2.0).finish("j")
    return made.evidence()


@case("G1")
def an_acknowledged_job_never_came(bad: bool) -> Evidence:
    """A client was told that its job is queued, and the server never had it."""
    made = one_job()
    made.at(2.0).finish("j")
    if bad:
        made.say("clients", "acked", name="other", job="other", cls="interactive")
    return made.evidence()


@case("G1")
def an_entry_is_trimmed(bad: bool) -> Evidence:
    """An entry goes without a result."""
    made = one_job()
    made.job("k")
    made.at(2.0).finish("j")
    if bad:
        made.delete("k")
    else:
        made.claim("k")
        made.finish("k")
    return made.evidence()


@case("G1")
def a_line_of_a_fed_file_is_missing(bad: bool) -> Evidence:
    """A file was queued whole, as its producer was told, but for a line."""
    made = one_job("b.1")
    made.at(2.0).finish("b.1")
    made.say("clients", "batch fed", name="b", lines=2 if bad else 1, how="ok")
    return made.evidence()


@case("G2")
def a_job_is_completed_by_nobody(bad: bool) -> Evidence:
    """A job has an answer that no engine gave."""
    made = one_job()
    made.at(2.0).finish("j", run="run-99" if bad else None)
    return made.evidence()


@case("G2")
def a_line_fails_unseen(bad: bool) -> Evidence:
    """A line failed although no engine was ever asked."""
    made = Handmade()
    made.job("b.1")
    made.at(1.0).claim("b.1", begin=not bad)
    made.at(2.0).finish("b.1", "failed", code="engine_error")
    return made.evidence()


@case("G3")
def two_results_are_accepted(bad: bool) -> Evidence:
    """A line has two results."""
    made = one_job("b.1")
    made.at(2.0).finish("b.1")
    if bad:
        made.result("b.1", "failed")
    return made.evidence()


@case("G3")
def a_late_answer_is_accepted(bad: bool) -> Evidence:
    """The answer of an attempt that had lost its lease is taken while another one holds it."""
    made = one_job()
    late = made.at(1.5).answer("j")
    made.at(4.0).reclaim("j")
    made.claim("j", W1, 2)
    made.at(5.0).finish("j", run=late if bad else None)
    return made.evidence()


@case("G3")
def a_job_is_added_twice(bad: bool) -> Evidence:
    """A submit that was sent twice made two entries of one job."""
    made = Handmade()
    made.job("j")
    made.at(1.0).claim("j")
    made.at(2.0).finish("j")
    made.job("j" if bad else "k")
    made.at(3.0).claim("j" if bad else "k")
    made.finish("j" if bad else "k")
    return made.evidence()


@case("G3")
def a_renewal_takes_what_is_anothers(bad: bool) -> Evidence:
    """A worker renews a lease that belongs to another by now."""
    made = one_job()
    made.at(4.0).reclaim("j")
    made.claim("j", W1, 2)
    made.at(4.5).renew("j", W0 if bad else W1)
    made.at(5.0).finish("j")
    return made.evidence()


@case("G4")
def a_lease_is_cut_short(bad: bool) -> Evidence:
    """A job is reclaimed sooner than one lease after its worker renewed it."""
    made = one_job()
    made.at(2.0).renew("j")
    made.at(3.4 if bad else 3.6).reclaim("j")
    made.claim("j", W1, 2)
    made.at(4.0).finish("j")
    return made.evidence()


@case("G4")
def time_without_redis_is_held_against_a_lease(bad: bool) -> Evidence:
    """A job is reclaimed sooner than one lease after Redis was back."""
    made = one_job()
    made.at(5.0).say("driver", "redis back", killed=True, away=1.0)
    made.at(6.0 if bad else 6.6).reclaim("j")
    made.claim("j", W1, 2)
    made.at(7.0).finish("j")
    return made.evidence()


@case("G4")
def a_job_is_taken_from_a_worker_that_lives(bad: bool) -> Evidence:
    """A job is reclaimed from a worker that lived and was not disturbed: it did not renew."""
    made = Handmade()
    made.at(-10.0).lives()
    made.at(0.0).job("j")
    made.at(1.0).claim("j")
    if not bad:
        made.at(1.2).fault("freeze", "worker", 3.0, place=0)
    made.at(4.0).reclaim("j")
    made.claim("j", W1, 2)
    made.at(5.0).finish("j")
    return made.evidence()


@case("G4")
def a_claim_steals(bad: bool) -> Evidence:
    """A job that is pending is delivered to another worker, and nobody reclaimed it."""
    made = one_job()
    if not bad:
        made.at(4.0).reclaim("j")
    made.at(4.0).claim("j", W1, 2)
    made.at(5.0).finish("j")
    return made.evidence()


@case("G5")
def a_dead_workers_job_stays_with_it(bad: bool) -> Evidence:
    """A job is with a worker that was killed for longer than lease and sweep interval."""
    made = Handmade()
    made.at(-10.0).lives()
    made.lives(W1, place=1)
    made.at(0.0).job("j")
    made.at(1.0).claim("j")
    made.at(1.5).say("driver", "signal", place=0, pid=100, number="SIGKILL")
    made.at(5.0 if bad else 4.0).reclaim("j")
    made.claim("j", W1, 2)
    made.at(6.0).finish("j")
    return made.evidence()


@case("G6")
def a_drained_worker_leaves_its_jobs(bad: bool) -> Evidence:
    """A worker that was told to end ended, and its job lapsed."""
    made = Handmade()
    made.at(-10.0).lives()
    made.at(0.0).job("j")
    made.at(1.0).claim("j")
    made.at(1.1).say("driver", "signal", place=0, pid=100, number="SIGTERM")
    if bad:
        made.at(2.0).say("driver", "worker down", pid=100, status=0, expected=True)
        made.at(4.0).reclaim("j")
    else:
        made.at(1.9).back("j")
        made.at(2.0).say("driver", "worker down", pid=100, status=0, expected=True)
    made.at(4.0).claim("j", W1, 2)
    made.at(5.0).finish("j")
    return made.evidence()


@case("G7")
def a_dead_letter_after_two_deaths(bad: bool) -> Evidence:
    """A job is a dead letter as one that killed three workers, and it was in flight at two deaths."""
    made = one_job()
    for number in range(1, 2 if bad else 4):
        made.at(4.0 * number).reclaim("j", past=f"{number} 0 {number} 0 -")
        if number < 3:
            made.claim("j", W0, number + 1)
    if not bad:
        made.claim("j", W1, 4, begin=False)
    made.at(20.0).finish("j", "failed", code="worker_lost")
    return made.evidence()


@case("G7")
def two_suspects_run_side_by_side(bad: bool) -> Evidence:
    """A worker runs two suspects at once: the death of one may be blamed on the other."""
    made = Handmade()
    for name in ("j", "k"):
        made.job(name)
        made.claim(name)
    made.at(4.0).reclaim("j")
    made.reclaim("k")
    made.claim("j", W1, 2)
    if not bad:
        made.at(5.0).finish("j")
    made.at(5.0).claim("k", W1, 2)
    made.at(6.0).finish("k")
    if bad:
        made.at(6.0).begin("j", W1, 2)
        made.finish("j")
    return made.evidence()


@case("G8")
def the_bucket_gives_too_much(bad: bool) -> Evidence:
    """More batch jobs start than rate and burst allow."""
    made = Handmade()
    made.configure(rate=2, burst=2)
    for number, at in enumerate([0.0, 0.0, 0.5, 0.9 if bad else 1.0, 1.5]):
        name = f"b.{number + 1}"
        made.at(at).job(name)
        made.claim(name)
        made.finish(name)
    return made.evidence()


@case("G8")
def the_deadline_gives_too_much(bad: bool) -> Evidence:
    """More batch jobs start by the deadline than one each deadline; one that is cancelled does not count."""
    made = Handmade()
    made.configure(deadline=2000, rate=0.001, burst=1)
    for number, at in enumerate([0.0, 2.0, 3.9, 4.0]):
        name = f"b.{number + 1}"
        made.at(at).job(name)
        made.claim(name, deadline=True)
        made.finish(name, "completed" if bad or at != 3.9 else "cancelled")
    return made.evidence()


@case("G9")
def batch_goes_before_chat(bad: bool) -> Evidence:
    """A line is claimed while chat waits that could be."""
    made = Handmade()
    made.job("b.1")
    made.at(1.0).job("j")
    made.at(2.0)
    if bad:
        made.claim("b.1")
        made.at(2.1).claim("j")
    else:
        made.claim_together("j", "b.1")
        made.begin("b.1")
        made.finish("b.1")
        made.begin("j")
        made.finish("j")
        return made.evidence()
    made.begin("b.1")
    made.finish("b.1")
    made.begin("j")
    made.finish("j")
    return made.evidence()


@case("G10")
def batch_waits_longer_than_the_deadline(bad: bool) -> Evidence:
    """Batch waits, a worker has room, and nothing starts for longer than the deadline."""
    made = Handmade()
    made.at(-10.0).lives()
    made.configure(deadline=2000)
    made.at(0.0).job("b.1")
    made.at(5.0 if bad else 3.0).claim("b.1")
    made.at(6.0).finish("b.1")
    return made.evidence()


@case("G11")
def a_key_stays(bad: bool) -> Evidence:
    """A key without a TTL is left when the queue is empty."""
    return Handmade().evidence(left=["llmq:{default}:lane:i:t"] if bad else [])


@case("G12")
def a_worker_ends_by_itself(bad: bool) -> Evidence:
    """A worker ends that nobody told to."""
    made = Handmade()
    made.lives()
    made.at(3.0).say("driver", "worker down", place=0, pid=100, status=1, expected=not bad)
    return made.evidence()


@case("G12")
def nobody_serves_any_more(bad: bool) -> Evidence:
    """Work waits, a worker lives, nothing disturbs it, and nothing is claimed."""
    made = Handmade()
    made.lives()
    made.at(1.0).job("j")
    made.at(30.0 if bad else 5.0).claim("j")
    made.at(31.0).finish("j")
    return made.evidence()


@case("G13")
def a_waiter_waits_in_vain(bad: bool) -> Evidence:
    """A client still waits when all is over."""
    made = one_job()
    made.at(2.0).finish("j")
    if bad:
        made.say("clients", "waits in vain", name="j", job="j")
    else:
        made.say("clients", "told", name="j", how="answered", run="run-1")
    return made.evidence()


@case("G13")
def a_waiter_is_told_an_untruth(bad: bool) -> Evidence:
    """A client is told that its job was cancelled, and it is completed."""
    made = one_job()
    made.at(2.0).finish("j")
    made.say("clients", "told", name="j", how="JobCancelled" if bad else "answered", run="")
    return made.evidence()


@case("G13")
def a_job_is_called_lost_without_a_flush(bad: bool) -> Evidence:
    """A client is told that its job is lost, and nothing was."""
    made = one_job()
    if bad:
        made.at(2.0).finish("j")
    else:
        made.at(2.0).flush()
    made.at(3.0).say("clients", "told", name="j", how="JobLost", run="")
    return made.evidence()


@case("G14")
def a_cancelled_job_starts(bad: bool) -> Evidence:
    """A job that was marked as cancelled is begun."""
    made = one_job()
    made.note("j", "0 0 0 0 x")
    made.at(2.0).back("j", "1 0 0 0 x")
    made.at(3.0).claim("j", W1, 2, begin=bad)
    made.at(4.0).finish("j", "cancelled")
    return made.evidence()


@case("G14")
def a_cancelled_job_is_claimed(bad: bool) -> Evidence:
    """A job that ended as cancelled while it waited is claimed afterwards."""
    made = Handmade()
    made.job("j")
    made.at(1.0).result("j", "cancelled")
    if bad:
        made.at(2.0).claim("j")
    made.at(3.0).delete("j")
    return made.evidence()


@case("G14")
def a_cancelled_run_goes_on(bad: bool) -> Evidence:
    """The engine runs a cancelled request for more than a second."""
    made = Handmade()
    made.at(-10.0).lives()
    made.at(0.0).job("j")
    made.at(1.0).claim("j")
    made.at(2.0).say("clients", "cancel", name="j", verdict="signalled")
    made.at(5.0 if bad else 2.5).say("e0", "ran", name="j", run="run-1", how="aborted")
    made.at(5.1).finish("j", "cancelled")
    return made.evidence()


@case("G15")
def a_full_queue_takes_more(bad: bool) -> Evidence:
    """A job is taken above the cap."""
    made = Handmade()
    made.configure(cap_interactive=1 if bad else 2)
    for name in ("j", "k"):
        made.job(name)
    for name in ("j", "k"):
        made.claim(name)
        made.finish(name)
    return made.evidence()


@case("G16")
def a_batch_ends_without_a_line(bad: bool) -> Evidence:
    """A batch has ended, and one of its lines has no result."""
    made = Handmade()
    for name in ("b.1", "b.2"):
        made.job(name)
        made.at(made.now + 1).claim(name)
    made.finish("b.1")
    if bad:
        made.batch_ends("b")
    made.begin("b.2")
    made.finish("b.2")
    made.batch_ends("b" if not bad else "other")
    return made.evidence()


@case("G16")
def a_collectors_file_has_a_line_twice(bad: bool) -> Evidence:
    """What a collector wrote has a line twice."""
    made = one_job("b.1")
    made.at(2.0).finish("b.1")
    made.batch_ends("b")
    made.say("clients", "collected", name="b", ids=["b.1", "b.1"] if bad else ["b.1"])
    return made.evidence()


@case("G16")
def a_record_counts_too_little(bad: bool) -> Evidence:
    """The record of a batch counts fewer lines than it has results."""
    made = one_job("b.1")
    made.at(2.0).finish("b.1")
    made.batch_ends("b")
    made.say("clients", "batch over", name="b", status="completed", completed=0 if bad else 1, failed=0)
    return made.evidence()


@case("G17")
def a_new_line_goes_before_one_that_came_back(bad: bool) -> Evidence:
    """A line that was handed back waits while one that never ran is claimed."""
    made = one_job("b.1")
    made.job("b.2")
    made.at(2.0).back("b.1")
    order = [("b.2", 1), ("b.1", 2)] if bad else [("b.1", 2), ("b.2", 1)]
    for name, number in order:
        made.at(made.now + 1).claim(name, W0, number)
        made.finish(name)
    return made.evidence()


@case("G18")
def an_answer_is_begun_twice(bad: bool) -> Evidence:
    """A chat whose first delta has gone out is begun again."""
    made = one_job()
    made.at(2.0)
    if bad:
        made.delta("j")
    made.at(4.0).reclaim("j")
    made.claim("j", W1, 2)
    made.at(5.0).finish("j")
    return made.evidence()


@case("G18")
def an_interrupted_job_is_begun(bad: bool) -> Evidence:
    """A chat that was to end as interrupted is begun by the worker that should have ended it."""
    made = one_job()
    made.note("j", "0 0 0 0 s")
    made.at(4.0).reclaim("j", past="1 0 1 0 s")
    made.claim("j", W1, 2, begin=bad)
    made.at(5.0).finish("j", "interrupted")
    return made.evidence()


PAIRS = [pytest.param(law, make, id=f"{law}-{make.__name__}") for law, make in CASES]


@pytest.mark.parametrize(("law", "make"), PAIRS)
def test_a_run_that_breaks_a_law_is_found(law: str, make: Case) -> None:
    """What breaks a law is found, under that law and no other."""
    assert {law} == {violation.law for violation in audit(make(True))}


@pytest.mark.parametrize(("law", "make"), PAIRS)
def test_a_run_that_nearly_breaks_a_law_is_not_found(law: str, make: Case) -> None:
    """What looks alike and breaks nothing is not found."""
    assert [] == audit(make(False))


def test_every_law_has_a_run_that_breaks_it() -> None:
    """No law of the audit is without a case: one that never finds anything is no law."""
    assert list(LAWS) == sorted({law for law, _ in CASES}, key=lambda law: int(law[1:]))
