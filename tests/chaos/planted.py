"""Planted faults: turn one guard of llmq off at a time, and see that somebody notices.

    python -m tests.chaos.planted [GUARD ...]

Each guard of `guards.py` is turned off in processes of their own, for the smallest thing that should go red then: a
short chaos run under the faults that the guard is there for, or a test of the suite. Prints one row of the table in
docs/guarantees.md for each; exits with 1 where the guard's own law was not found broken.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.guards import GUARDS

ROOT = Path(__file__).parents[2]

#: A check that takes longer than this has found out nothing.
TIMEOUT_S = 300.0

#: A run of planted faults is one storm, and need not wait long for what will never end.
SECONDS = 14.0
PEACE_S = 12.0


@dataclass(frozen=True, slots=True)
class Chaos:
    """A short run under some faults."""

    faults: str
    seed: int = 3

    @property
    def command(self) -> list[str]:
        """What is started."""
        about = [f"--seed={self.seed}", f"--seconds={SECONDS:g}", f"--peace={PEACE_S:g}", f"--faults={self.faults}"]
        return [sys.executable, "-m", "tests.chaos", *about]

    def __str__(self) -> str:
        return f"`tests.chaos --seed {self.seed} --seconds {SECONDS:g} --faults {self.faults}`"

    def red(self, output: str) -> list[str]:
        """Return the laws that were found broken."""
        return sorted(set(re.findall(r"^(G\d+) ", output, re.MULTILINE)), key=lambda law: int(law[1:]))


@dataclass(frozen=True, slots=True)
class Suite:
    """A test of the suite, or some: what pytest is given."""

    path: str
    only: str = ""

    @property
    def command(self) -> list[str]:
        """What is started."""
        only = ["-k", self.only] if self.only else []
        options = ["-q", "-n0", "-p", "tests.chaos.guard_plugin", "--server=valkey", "--timeout=100"]
        return [sys.executable, "-m", "pytest", *options, self.path, *only]

    def __str__(self) -> str:
        return f"`{self.path}`"

    def red(self, output: str) -> list[str]:
        """Return the tests that failed."""
        return sorted(set(re.findall(r"^(?:FAILED|ERROR) \S+::(\w+)", output, re.MULTILINE)))


Check = Chaos | Suite

#: What should notice, guard by guard.
CHECKS: dict[str, Check] = {
    "fence": Suite("tests/redis/test_finish.py::TestFence"),
    "lease thread": Chaos("cut"),
    "delete on ack": Chaos("cut"),
    "sweep cursor": Suite("tests/redis/test_sweep.py::test_a_large_lane_is_swept_in_steps"),
    "group re-creation": Suite("tests/redis/test_claim.py::TestForeignHands"),
    "sweeper": Chaos("kill"),
    "contact": Chaos("kill-redis,freeze-redis"),
    "bucket": Chaos("settings", seed=4),
    "chat first": Chaos("cut"),
    "deadline": Suite("tests/redis/test_claim.py::TestDeadline"),
    "back first": Chaos("drain"),
    "idempotent submit": Chaos("half-open"),
    "suspects apart": Chaos("kill,kill-engine"),
    "three deaths": Suite("tests/redis/test_sweep.py::TestTheThirdDeath"),
    "hand back at drain": Chaos("drain"),
    "hand back of lost claims": Suite("tests/redis/test_worker.py::TestLostReplies"),
    "forgotten claims": Suite(
        "tests/redis/test_worker.py::TestForgottenClaims::test_another_job_in_its_place_gets_an_answer_of_its_own"
    ),
    "begun is never begun again": Chaos("kill"),
    "cancel": Suite("tests/redis/test_reap_and_cancel.py"),
    "cap": Chaos("settings", seed=13),
    "lanes go": Chaos("cut"),
    "counts": Suite("tests/redis/test_finish.py::test_the_last_line_ends_the_batch"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """What turning off one guard came to."""

    guard: str
    check: Check
    red: list[str]

    @property
    def noticed(self) -> bool:
        """Whether the guard's own law was found broken, or a test failed."""
        return bool(self.red) and (
            isinstance(self.check, Suite) or not set(GUARDS[self.guard].laws).isdisjoint(self.red)
        )

    def __str__(self) -> str:
        guard = GUARDS[self.guard]
        found = (
            ", ".join(f"`{name}`" if isinstance(self.check, Suite) else name for name in self.red[:3]) or "**nothing**"
        )
        return f"| {guard.name} | {', '.join(guard.laws)} | {guard.how} | {self.check} | {found} |"


def plant(guard: str) -> Row:
    """Run a guard's check with the guard off."""
    check = CHECKS[guard]
    environment = {**os.environ, "CHAOS_GUARD_OFF": guard}
    done = subprocess.run(
        check.command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    output = done.stdout + done.stderr
    red = check.red(output) if done.returncode else []
    if done.returncode and not red:
        raise RuntimeError(f"the check of {guard!r} found out nothing:\n{output[-3000:]}")
    return Row(guard, check, sorted(red, key=lambda law: law not in GUARDS[guard].laws))


def main() -> int:
    """Turn off the guards that are named, or all; print the table."""
    missed = 0
    for guard in sys.argv[1:] or list(GUARDS):
        row = plant(guard)
        missed += not row.noticed
        print(row, flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
