"""Fuzz one reader: `python -m tests.fuzz NAME --seconds N`; without a name, list them.

A crash ends the run with status 1 (77 under atheris), its traceback, and the input on one line.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fuzz.mutation import LONGEST, mutations


def main() -> int:
    """Run what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("name", nargs="?", help="which reader")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--driver", choices=("atheris", "mutation"), help="default: atheris where it is installed")
    given = parser.parse_args()
    driver = given.driver or ("atheris" if importlib.util.find_spec("atheris") else "mutation")
    if given.name is None:
        from tests.fuzz.harnesses import HARNESSES

        print("\n".join(f"{name:16} {harness.__doc__}" for name, harness in HARNESSES.items()))
        return 0
    if driver == "atheris":
        return _with_atheris(given.name, given.seconds, given.seed)
    return _with_mutation(given.name, given.seconds, given.seed)


def _with_mutation(name: str, seconds: float, seed: int) -> int:
    from tests.fuzz.harnesses import HARNESSES, SEEDS

    harness, ends, runs = HARNESSES[name], time.monotonic() + seconds, 0
    for data in mutations(SEEDS[name], seed):
        if time.monotonic() > ends:
            break
        _run(harness, data)
        runs += 1
    print(f"{name}: {runs:,} inputs, no crash")
    return 0


def _with_atheris(name: str, seconds: int, seed: int) -> int:
    atheris: Any = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["llmq"]):
        from tests.fuzz.harnesses import HARNESSES, SEEDS

    folder = tempfile.mkdtemp(prefix="llmq-fuzz-")
    _write(Path(folder), SEEDS[name])
    options = [f"-max_total_time={seconds}", f"-seed={seed}", f"-max_len={LONGEST}", "-timeout=20", "-rss_limit_mb=0"]
    atheris.Setup(
        [sys.argv[0], *options, f"-artifact_prefix={folder}/crash-", folder],
        lambda data: _run(HARNESSES[name], data),
    )
    atheris.Fuzz()  # ends the process
    return 0


def _write(folder: Path, seeds: Sequence[bytes]) -> None:
    for number, data in enumerate(seeds):
        (folder / f"seed-{number}").write_bytes(data)


def _run(harness: Any, data: bytes) -> None:
    try:
        harness(data)
    except BaseException:
        print(f"crashed by {data!r}", file=sys.stderr, flush=True)
        raise


if __name__ == "__main__":
    sys.exit(main())
