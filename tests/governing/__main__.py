"""Print what the governor makes of chat, beside fixed caps: `python -m tests.governing [FACTOR]`. In virtual time.

FACTOR is the objective, as a multiple of chat alone's p95 (1.1).
"""

from __future__ import annotations

import sys

from llmq.workers.trial.figures import Row
from tests.governing.scenes import scenes

HEAD = "| | p50 | p95 | x alone | within 1.25 x | first 5 s of bursts, x alone | batch tokens/s | preempted |"


def main(factor: float) -> None:
    """Print one table for each scene."""
    for scene in scenes():
        print(f"{scene.name}: {sum(map(len, scene.runs)):,} chat requests in {len(scene.runs)} runs\n\n{HEAD}")
        print("|---" * (HEAD.count("|") - 1) + "|")
        for row in scene.rows(factor):
            print(_line(row))
        print()


def _line(row: Row) -> str:
    return (
        f"| {row.name} | {row.p50_s * 1000:.0f} ms | {row.p95_s * 1000:.0f} ms | {row.ratio:.2f} | {row.within:.0%} "
        f"| {row.burst_ratio:.2f} | {row.batch_tps:,.0f} | {row.preempted} |"
    )


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.1)
