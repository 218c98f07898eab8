"""Every harness, for a moment: nothing but errors of the declared kinds leaves a reader."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys

import pytest

from tests.contract.project import ROOT, environment
from tests.fuzz.harnesses import HARNESSES, SEEDS
from tests.fuzz.mutation import mutations

#: Inputs of one test; more belong to a run by hand.
INPUTS = 400

SECONDS = 2

DRIVERS = ["mutation", *(["atheris"] if importlib.util.find_spec("atheris") else [])]


@pytest.mark.parametrize("name", HARNESSES)
def test_what_nobody_would_write_is_refused_or_read(name: str) -> None:
    """Hundreds of changed inputs, always the same ones, end in a value or a declared error (F-132, F-134, F-135)."""
    for data in itertools.islice(mutations(SEEDS[name], seed=7), INPUTS):
        try:
            HARNESSES[name](data)
        except BaseException as error:
            pytest.fail(f"{type(error).__name__}: {error}, for {data!r}")


@pytest.mark.parametrize(("name", "driver"), [(name, driver) for name in HARNESSES for driver in DRIVERS])
def test_a_harness_runs_by_hand(name: str, driver: str) -> None:
    """`python -m tests.fuzz NAME` finds nothing in seconds, with each driver that is here."""
    command = [sys.executable, "-m", "tests.fuzz", name, f"--seconds={SECONDS}", f"--driver={driver}"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=110)
    assert 0 == done.returncode, done.stderr[-4000:]
