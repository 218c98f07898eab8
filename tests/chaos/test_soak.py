"""A small soak: jobs through restarts, and afterwards all is as it was. A large one: `python -m tests.chaos.soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.soak import soak

#: On a machine that is busy with other things a run takes much longer than its storms.
pytestmark = pytest.mark.timeout(300)


async def test_nothing_is_left_of_many_jobs(tmp_path: Path) -> None:
    """G1, G11, G16: once results are deleted, keys, memory, connections and files end where they began."""
    soaked = await soak(tmp_path, 4000, batch=1000)
    assert [] == soaked.faulty
    assert soaked.faults > 0
