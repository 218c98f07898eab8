"""Chaos: everything that can be killed, frozen, cut off or flushed is, at random, while chat and batch go on.

Afterwards all is left in peace until the queue is empty, and the audit holds every law against the server's own
history and against what every party saw. What happens is drawn from a seed. For longer runs, and other seeds:

    python -m tests.chaos --seed 7 --seconds 600
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.audit import audit
from tests.chaos.faults import FAULTS
from tests.chaos.run import PLACES, run, terms
from tests.chaos.story import story

#: On a machine that is busy with other things a run takes much longer than its storms.
pytestmark = pytest.mark.timeout(300)

#: A storm, a calm with its lone kill, and the beginning of the next storm.
SECONDS = 33.0

#: For so long nothing may move afterwards: less than what is left of the time that a test may take.
PEACE_S = 30.0


@pytest.mark.parametrize(("seed", "server"), [(1, "valkey"), (2, "valkey"), (3, "redis")])
async def test_chaos_breaks_no_law(tmp_path: Path, seed: int, server: str) -> None:
    """G1 to G18: whatever dies, freezes, is cut off, flushed, cancelled or changed, in whichever order."""
    evidence = await run(tmp_path, terms(seed, SECONDS, server=server, peace_s=PEACE_S))
    assert len(evidence.ledger.claims) > 50, "the run was too quiet to show anything"
    violations = audit(evidence)
    assert not violations, "\n\n".join(story(evidence, violation) for violation in violations[:3])


def test_a_seed_is_a_timetable() -> None:
    """The same seed is the same plan, another one another, and a fault that is not wanted is not in it."""
    assert terms(1, 60).timetable() == terms(1, 60).timetable()
    assert terms(1, 60).timetable() != terms(2, 60).timetable()
    assert {"kill", "cut"} == {planned.fault for planned in terms(1, 60, "kill,cut").timetable()}


def test_a_long_plan_holds_every_fault() -> None:
    """Ten minutes are long enough for every kind of fault to happen, at every place."""
    timetable = terms(1, 600).timetable()
    assert set(FAULTS) == {planned.fault for planned in timetable}
    assert set(range(-1, PLACES)) == {planned.place for planned in timetable}
