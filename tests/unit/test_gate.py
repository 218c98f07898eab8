"""The gate: overload halves the batch cap and pauses batch; quiet lets it grow back; an engine that is gone."""

from __future__ import annotations

from llmq.workers.gate import Gate


def test_an_open_gate_sets_no_cap() -> None:
    """Nothing was refused: the slots are the limit."""
    assert Gate(8).batch_cap(0.0) is None


def test_overload_closes_for_half_a_second_and_halves_the_cap() -> None:
    """Paused for 0.5 s, then half of what ran."""
    gate = Gate(8)
    assert 0.5 == gate.overloaded(10.0, 8, None, "job")
    assert 0 == gate.batch_cap(10.4)
    assert 4 == gate.batch_cap(10.5)


def test_refusals_that_come_together_are_one_overload() -> None:
    """Eight requests refused at once neither double the pause eight times nor take the cap to nothing."""
    gate = Gate(8)
    pauses = {gate.overloaded(10.0 + n / 100, 8 - n, None, n) for n in range(8)}
    assert {0.5} == pauses
    assert 4 == gate.batch_cap(10.6)


def test_the_pause_doubles_to_thirty_seconds() -> None:
    """0.5, 1, 2, 4, 8, 16, 30, 30: an engine that stays overloaded is asked ever more rarely."""
    gate, now, pauses = Gate(8), 0.0, []
    for _ in range(8):
        pauses.append(gate.overloaded(now, 4, None, "job"))
        now += pauses[-1]
    assert [0.5, 1, 2, 4, 8, 16, 30, 30] == pauses


def test_retry_after_wins() -> None:
    """The engine's own word, shorter or longer."""
    gate = Gate(8)
    assert 7.0 == gate.overloaded(0.0, 4, 7.0, "job")
    assert 0 == gate.batch_cap(6.9)
    assert gate.batch_cap(7.0)
    assert 0.1 == Gate(8).overloaded(0.0, 4, 0.1, "job")


def test_a_retry_after_without_measure_is_bounded() -> None:
    """A quota of a year stops a worker for an hour at a time, and a 0, or a date that is over, asks for no storm."""
    assert 3600.0 == Gate(8).overloaded(0.0, 4, 365 * 86400.0, "job")
    gate, now, pauses = Gate(8), 0.0, []
    for _ in range(4):
        pauses.append(gate.overloaded(now, 4, 0.0, "job"))
        now += pauses[-1]
    assert [0.5, 1, 2, 4] == pauses
    for answer in range(5):
        gate.answered(answer)
        pauses.append(gate.overloaded(0.0, 4, 0.0, "job"))
    assert min(pauses) >= 0.5


def test_it_refuses_batch_by_the_deadline_too_but_for_30_s_at_most() -> None:
    """G10: it is asked again for the deadline's sake, though it asked to be left alone for an hour."""
    gate = Gate(8)
    assert not gate.refuses(0.0)
    gate.overloaded(0.0, 4, None, "job")
    assert [True, False] == [gate.refuses(now) for now in (0.4, 0.5)]
    gate.overloaded(1.0, 4, 3600.0, "job")
    assert [True, False] == [gate.refuses(now) for now in (30.9, 31.0)]
    gate.overloaded(31.0, 0, None, "job")
    assert [True, False] == [gate.refuses(now) for now in (60.9, 61.0)]


def test_a_shorter_retry_after_does_not_open_a_gate_that_is_closed_for_longer() -> None:
    """The latest moment that any refusal named holds."""
    gate = Gate(8)
    gate.overloaded(0.0, 8, 10.0, "a")
    gate.overloaded(0.1, 8, 0.1, "b")
    assert 0 == gate.batch_cap(9.9)


def test_the_cap_grows_by_one_a_second_and_is_forgotten_at_the_top() -> None:
    """Halved to 2 of 4, it is 3 after a second and gone after two; the next pause is short again."""
    gate = Gate(4)
    gate.overloaded(0.0, 4, None, "job")
    assert [2, 2, 3] == [gate.batch_cap(now) for now in (0.5, 1.4, 1.5)]
    assert gate.batch_cap(2.5) is None
    assert 0.5 == gate.overloaded(3.0, 4, None, "other")


def test_growth_does_not_depend_on_how_often_one_asks() -> None:
    """Asked a thousand times a second or once: the same cap."""
    often, once = Gate(16), Gate(16)
    for gate in (often, once):
        gate.overloaded(0.0, 16, None, "job")
    for tick in range(500, 4600):
        often.batch_cap(tick / 1000)
    assert once.batch_cap(4.6) == often.batch_cap(4.6) == 12


def test_the_cap_never_falls_to_nothing() -> None:
    """One batch request may always run once the pause is over, or batch would never learn that the engine is well."""
    gate, now = Gate(8), 0.0
    for _ in range(6):
        now += gate.overloaded(now, 1, None, "job")
    assert 1 == gate.batch_cap(now)


def test_a_job_that_is_refused_while_others_are_answered_pauses_alone() -> None:
    """G16: the first three refusals may be an overload; later ones say nothing about the engine."""
    gate, now = Gate(8), 0.0
    for other in range(5):
        pause = gate.overloaded(now, 8, None, "refused")
        gate.answered(other)
        now += pause + 10
    assert 16.0 == pause
    assert gate.batch_cap(now - pause - 10) is None
    gate.answered("refused")
    assert 0.5 == gate.overloaded(now, 8, None, "refused")


def test_an_engine_that_answers_nobody_is_overloaded_however_often_it_refuses_a_job() -> None:
    """Without an answer to others there is nothing that a job could be alone with."""
    gate, now = Gate(8), 0.0
    for _ in range(20):
        now += gate.overloaded(now, 1, None, "job")
    assert 0 == gate.batch_cap(now - 1)


def test_an_engine_is_gone_until_it_is_back() -> None:
    """Nothing is claimed in between; overload is another matter."""
    gate = Gate(8)
    gate.lost()
    assert gate.gone
    gate.back()
    assert not gate.gone
    assert gate.batch_cap(0.0) is None


def test_a_job_that_is_refused_for_days_breaks_nothing() -> None:
    """The pause stays at its longest, however often it would have doubled."""
    gate = Gate(8)
    for answer in range(1100):
        gate.answered(answer)
        pause = gate.overloaded(0.0, 4, None, "job")
    assert 30.0 == pause
