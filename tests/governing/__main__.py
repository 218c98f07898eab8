"""Print what the governor makes of recorded chat, beside fixed caps: `python -m tests.governing`. In virtual time."""

from __future__ import annotations

from llmq.workers.traffic import scaled
from tests.governing.shared_gpu import Gpu, Outcome, SharedGpu
from tests.governing.virtual_time import run_virtually

#: About an 8-billion model on one large GPU, under five minutes of 4.6 chat requests a second.
LARGE = Gpu(64, 30_000, 150, reserve=7, prompt=(100, 800), answer=(100, 400))
SECONDS = 300.0
ARRIVALS = scaled(SECONDS, rate=0.95)


def run(cap: int | None = None, ttft_p95_s: float | None = None) -> Outcome:
    """Run the arrivals with a fixed cap, or with an objective."""
    return run_virtually(SharedGpu(LARGE, ARRIVALS, cap=cap, ttft_p95_s=ttft_p95_s, keeps=True).run())


def main() -> None:
    """Print one row for chat alone, for the governor, and for each of some fixed caps."""
    alone = run(cap=0)
    rows = [("chat alone", alone), ("llmq, objective 1.1 x", run(ttft_p95_s=1.1 * alone.p95))]
    rows += [(f"fixed cap {cap}", run(cap=cap)) for cap in (2, 4, 6, 8, 16, 24, 40)]
    print("| | p95 | x alone | within 1.25 x | batch tokens/s | preempted |")
    print("|---|---|---|---|---|---|")
    for name, found in rows:
        ratio, within = found.p95 / alone.p95, found.within(1.25 * alone.p95)
        made = found.made / SECONDS
        print(f"| {name} | {found.p95 * 1000:.0f} ms | {ratio:.2f} | {within:.0%} | {made:,.0f} | {found.preempted} |")


if __name__ == "__main__":
    main()
