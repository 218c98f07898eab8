"""The benchmarks run: each row, with so few jobs that its figures mean nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.project import ROOT, environment

ROWS = (
    "drain",
    "submit",
    "submit-async",
    "bulk",
    "slots",
    "start",
    "start-beside-batch",
    "gateway",
    "gateway-calm",
    "gateway-streams",
    "memory",
    "kill",
    "file",
    "idle",
)


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmarks as anybody would, from the top of the tree."""
    command = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)


# Rows measure the server that is on PATH; where there is none, nothing can be measured.
@pytest.mark.parametrize("row", ROWS if shutil.which("redis-server") else ["none"])
def test_each_row_gives_its_figures(row: str, tmp_path: Path) -> None:
    """A row is printed as a table, and written with all its figures to the file that was asked for."""
    out = tmp_path / "results.json"
    done = bench("--quick", "--only", row, "--out", str(out))
    if row == "none":
        assert "invalid choice" in done.stderr
        return
    assert 0 == done.returncode, done.stderr
    (figures,) = json.loads(out.read_text())["rows"][row]["repeats"]
    assert f"| {row} " in done.stdout
    assert all(f"{name}, " in done.stdout or f"| {name} " in done.stdout for name in figures)


def test_these_are_all_rows() -> None:
    """No row is forgotten here: the help lists those that are tried."""
    words = " ".join(bench("--help").stdout.split()).replace("- ", "-")  # long lines break at hyphens, too
    assert ", ".join(ROWS) in words
