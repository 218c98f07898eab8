"""Run chaos by hand: `python -m tests.chaos --seed S --seconds 600`.

Prints the plan, then each violation with its story, then what was seen. Exits with 1 where a law was broken. The same
seed is the same plan. `--keep` leaves the journal and the server's history where they are.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.chaos import guards
from tests.chaos.audit import judged_kills
from tests.chaos.evidence import Evidence
from tests.chaos.faults import FAULTS, FAULTS_OF_SETS
from tests.chaos.run import PEACE_S, judge, run, terms
from tests.chaos.store import TOPOLOGIES
from tests.chaos.story import story
from tests.chaos.told import losses, resumptions
from tests.servers import process_kinds

#: The first violations explain the others.
STORIES = 5


def main() -> int:
    """Do what the command line says; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="llmq under every fault, audited")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--topology", choices=sorted(TOPOLOGIES), default="single")
    parser.add_argument("--server", choices=sorted(process_kinds()), default="valkey")
    names = ", ".join(FAULTS | FAULTS_OF_SETS)
    parser.add_argument("--faults", default="", help=f"names, with commas; default: all of a topology, of {names}")
    parser.add_argument("--peace", type=float, default=PEACE_S, help="seconds until all must have ended, afterwards")
    parser.add_argument("--plan", action="store_true", help="print the plan and end")
    parser.add_argument("--keep", action="store_true", help="keep the journal and the history, and say where")
    given = parser.parse_args()
    guards.turn_off(os.environ.get("CHAOS_GUARD_OFF", ""))
    chosen = terms(
        given.seed, given.seconds, given.faults, topology=given.topology, server=given.server, peace_s=given.peace
    )
    for planned in chosen.timetable():
        print(planned)
    if given.plan:
        return 0
    sys.stdout.flush()
    folder = Path(tempfile.mkdtemp(prefix=f"chaos-{given.seed}-"))
    evidence = asyncio.run(run(folder, chosen))
    violations = judge(evidence, given.topology)
    for violation in violations[:STORIES]:
        print(story(evidence, violation), end="\n\n")
    for violation in violations[STORIES:]:
        print(violation)
    print("\n".join(_seen(evidence) if given.topology == "single" else _told(evidence)))
    print(f"seed {given.seed}: {f'{len(violations)} VIOLATIONS' if violations else 'clean'}")
    if given.keep or violations:
        print(f"journal and history: {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if violations else 0


def _seen(evidence: Evidence) -> list[str]:
    """Return what a run was made of, in figures: a clean run in which nothing happened proves nothing."""
    ledger = evidence.ledger
    kinds = Counter(event.kind for event in evidence.events)
    faults = Counter(event["fault"] for event in evidence.events if event.kind == "fault")
    kills, judged = judged_kills(evidence)
    stalled = sum(event["seconds"] for event in evidence.events if event.kind == "stalled")
    states = Counter(result.state for entry in ledger.entries for result in entry.results)
    return [
        f"faults {dict(faults)}",
        f"jobs and lines {len(ledger.entries)}, as {dict(states)}; claims {len(ledger.claims)}, which were "
        f"{dict(Counter(claim.verdict or claim.how for claim in ledger.claims))}",
        f"asked {kinds['asked']}, acknowledged {kinds['acked']}, told {kinds['told']}; runs in engines {kinds['run']}",
        f"workers killed {kills}, {judged} of them in fair weather; stalls {stalled:.1f} s in {kinds['stalled']}",
    ]


def _told(evidence: Evidence) -> list[str]:
    """Return what a run on a set of servers was made of, and what Redis has lost in it."""
    kinds = Counter(event.kind for event in evidence.events)
    faults = Counter(event["fault"] for event in evidence.events if event.kind == "fault")
    told = Counter(event["how"] for event in evidence.events if event.kind == "told")
    batches = Counter(event["status"] or "lost" for event in evidence.events if event.kind == "batch over")
    lost = Counter(kind for _, _, kind in losses(evidence))
    took = sorted(took for *_, took in resumptions(evidence) if took is not None)
    middle, longest = (took[len(took) // 2], took[-1]) if took else (0.0, 0.0)
    return [
        f"faults {dict(faults)}",
        f"asked {kinds['asked']}, acknowledged {kinds['acked']}, told {dict(told)}; runs in engines {kinds['run']}",
        f"batches {dict(batches)}; files of collectors {kinds['collected']}",
        f"lost where Redis may lose: {dict(lost) or 'nothing'}; served again after {len(took)} faults of Redis, in the "
        f"middle after {middle:.1f} s, at most after {longest:.1f} s",
    ]


if __name__ == "__main__":
    sys.exit(main())
