"""All benchmarks, in one command: `python -m bench`, from the top of the tree.

Each row runs in processes of its own, with a Redis of its own; the medians of its repeats are printed in one table and
written, with everything else, to `bench/results.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.processes import environment
from bench.report import Measured, as_json, as_table, machine
from bench.row import Figures, Row, by_name
from bench.rows import ROWS

RESULTS = Path(__file__).with_name("results.json")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the rows that were asked for."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Measure llmq.")
    parser.add_argument("--only", nargs="+", choices=by_name(ROWS), metavar="ROW", help=", ".join(by_name(ROWS)))
    parser.add_argument(
        "--quick", action="store_true", help="tiny counts: the code is tried out, the figures mean nothing"
    )
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="measure each row N times (default: 3)")
    parser.add_argument("--appendonly", action="store_true", help="Redis with its append-only file, everysec")
    parser.add_argument("--litellm", type=Path, metavar="EXECUTABLE", help="LiteLLM's proxy, for rows of the gateway")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="FILE", help="where the figures go")
    given = parser.parse_args(arguments)
    rows = [by_name(ROWS)[name] for name in given.only] if given.only else ROWS
    about = machine(appendonly=given.appendonly)
    print(*(f"{name}: {value}" for name, value in about.items()), sep="\n", flush=True)
    options = [f"--{name}" for name in ("quick", "appendonly") if getattr(given, name)]
    options += ["--litellm", str(given.litellm.absolute())] if given.litellm else []
    measured = [_measure(row, 1 if given.quick else given.repeat, given.quick, options) for row in rows]
    given.out.write_text(json.dumps(as_json(measured, about), indent=1) + "\n")
    print(f"\n{as_table(measured, judged=not given.quick)}\n\nall figures: {given.out}")


def _measure(row: Row, repeats: int, quick: bool, options: list[str]) -> Measured:
    count = row.quick if quick else row.count
    figures, load = [], []
    for _ in range(repeats):
        load.append(round(os.getloadavg()[0], 2))
        figures.append(_measure_once(row, count, options))
        shown = ", ".join(f"{name} {value:,.2f}" for name, value in figures[-1].items())
        print(f"{row.name}: {shown} (load {load[-1]})", file=sys.stderr, flush=True)
    return Measured(row, count, figures, load)


def _measure_once(row: Row, count: int, options: list[str]) -> Figures:
    """Measure in a session of processes that is ended as a whole, however the measurement ends."""
    with tempfile.TemporaryDirectory(prefix="llmq-bench-") as folder:
        command = [sys.executable, "-m", "bench.measure", row.name, str(count), folder, *options]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=environment(),
            start_new_session=True,
        )
        try:
            out, _ = process.communicate()
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # all of them have ended
            process.wait()
        if process.returncode:
            raise SystemExit(f"error: row {row.name} ended with exit code {process.returncode}")
        figures: Figures = json.loads(out)
        return figures


if __name__ == "__main__":
    main()
