"""The audit of sets of servers is not lax: for each law a run that breaks it, and one that is nearly the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.chaos.evidence import Evidence
from tests.chaos.faults import FAULTS, FAULTS_OF_SETS
from tests.chaos.handmade import Handmade
from tests.chaos.run import terms
from tests.chaos.told import FOLLOW_S, LAWS, audit_told, losses, resumptions

Case = Callable[[bool], Evidence]


def chat(made: Handmade, name: str, how: str = "answered", run: str = "") -> None:
    """Let a chat be acknowledged now, run, and be told an end half a second later."""
    run = run or f"run-{name}"
    made.say("clients", "asked", name=name, cls="interactive")
    made.say("clients", "acked", name=name, job=f"id-{name}", cls="interactive")
    made.say("e0", "run", name=name, run=f"run-{name}", mood="")
    made.at(made.now + 0.5).say("clients", "told", name=name, how=how, run=run if how == "answered" else "")


def a_job_is_lost(bad: bool) -> Evidence:
    """G1: its submit was long before the primary died, or while it did."""
    made = Handmade()
    made.at(5.0 if bad else 19.8)
    chat(made, "c1", "JobLost")
    made.at(20.0).fault("kill-redis", "redis", 3.0)
    made.at(20.0 + FOLLOW_S + 5)
    chat(made, "c2")
    return made.evidence()


def a_batch_is_lost(bad: bool) -> Evidence:
    """G1: without a reason, or by a FLUSHALL."""
    made = Handmade()
    made.say("clients", "batch opened", name="b1", lines=3)
    if not bad:
        made.at(1.0).fault("flush-all", "redis", 0.0)
    made.at(2.0).say("clients", "batch over", name="b1", status="")
    return made.evidence()


def an_answer_is_anothers(bad: bool) -> Evidence:
    """G2: the run that it is from was of another job."""
    made = Handmade()
    chat(made, "c1")
    chat(made, "c2", run="run-c1" if bad else "")
    return made.evidence()


def a_job_has_two_answers(bad: bool) -> Evidence:
    """G3: its owner was told one, its record holds another."""
    made = Handmade()
    chat(made, "c1")
    made.say("driver", "job left", job="id-c1", state="completed", run="run-9" if bad else "run-c1")
    return made.evidence()


def a_key_is_left(bad: bool) -> Evidence:
    """G11: it has no TTL."""
    return Handmade().evidence(left=["llmq:{default}:x"] if bad else [])


def a_worker_ends(bad: bool) -> Evidence:
    """G12: by itself, or because it was told to."""
    made = Handmade()
    made.say("driver", "worker down", place=0, pid=7, status=1, expected=not bad)
    return made.evidence()


def nobody_serves(bad: bool) -> Evidence:
    """G12: after a failover no job is answered any more."""
    made = Handmade()
    made.fault("fail-over", "redis", 1.0)
    made.at(2.0 + FOLLOW_S)
    chat(made, "c1", "JobExpired" if bad else "answered")
    return made.evidence()


def somebody_waits(bad: bool) -> Evidence:
    """G13: to the end of the run."""
    made = Handmade()
    if bad:
        made.say("clients", "waits in vain", name="c1", job="id-c1")
    return made.evidence()


def a_file_has_a_line_twice(bad: bool) -> Evidence:
    """G16: a collector wrote it before and after a failover."""
    made = Handmade()
    made.say("clients", "batch fed", name="b1", lines=2, how="ok")
    made.say("clients", "collected", name="b1", ids=["1", "2", "2"] if bad else ["1", "2"])
    return made.evidence()


def a_batch_ends_without_a_line(bad: bool) -> Evidence:
    """G16: Redis has no result of it."""
    made = Handmade()
    made.say("driver", "batch left", name="b1", ended=True, total=3, lines=[1, 3] if bad else [1, 3, 2])
    return made.evidence()


def a_count_is_wrong(bad: bool) -> Evidence:
    """G16: the record of a batch counts a line twice."""
    made = Handmade()
    made.say("clients", "batch fed", name="b1", lines=2, how="ok")
    made.say("clients", "batch over", name="b1", status="completed", completed=2, failed=int(bad))
    return made.evidence()


CASES: list[tuple[str, Case]] = [
    ("G1", a_job_is_lost),
    ("G1", a_batch_is_lost),
    ("G2", an_answer_is_anothers),
    ("G3", a_job_has_two_answers),
    ("G11", a_key_is_left),
    ("G12", a_worker_ends),
    ("G12", nobody_serves),
    ("G13", somebody_waits),
    ("G16", a_file_has_a_line_twice),
    ("G16", a_batch_ends_without_a_line),
    ("G16", a_count_is_wrong),
]


@pytest.mark.parametrize(("law", "case"), CASES, ids=[case.__name__ for _, case in CASES])
def test_a_broken_law_is_found_and_nothing_else(law: str, case: Case) -> None:
    """The run that breaks it is found, for this law alone; the other is clean."""
    assert {law} == {violation.law for violation in audit_told(case(True))}
    assert [] == audit_told(case(False))


def test_every_law_that_is_judged_has_a_case() -> None:
    """No law of this audit is judged without having been seen to find something."""
    assert set(LAWS) == {law for law, _ in CASES}


def test_what_redis_has_lost_is_counted() -> None:
    """Also where it may be lost; and how long it took until a job was served again."""
    evidence = a_job_is_lost(False)
    assert [("c1", "job")] == [(name, kind) for name, _, kind in losses(evidence)]
    assert [FOLLOW_S + 5.5] == [took for *_, took in resumptions(evidence)]


def test_sets_have_faults_of_their_own() -> None:
    """No network that a proxy would have to spoil; and failovers by hand. A single server's plans stay as they are."""
    assert {"fail-over"} == FAULTS_OF_SETS.keys() - FAULTS.keys()
    assert {"delay", "cut", "swallow", "half-open"} == FAULTS.keys() - FAULTS_OF_SETS.keys()
    timetable = terms(1, 600, topology="cluster").timetable()
    assert set(FAULTS_OF_SETS) == {planned.fault for planned in timetable}
