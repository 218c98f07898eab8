"""Stalls: times in which a process did not get to run, as its own clock shows.

On a machine that is busy with other things a process may stand still for seconds. What then comes late is no fault of
llmq, so each process of a chaos run has a thread that sleeps a little, again and again, and writes down when it slept
much longer than it meant to. The audit adds these times to what a law allows.
"""

from __future__ import annotations

import threading
import time

from tests.chaos.journal import Journal

#: How often a process looks whether it still runs on time.
TICK_S = 0.1

#: What a tick may come too late without a word.
TOLERATED_S = 0.15

_monotonic = time.monotonic


def watch_for_stalls(journal: Journal) -> threading.Event:
    """Write the stalls of this process into the journal until it ends, or until the event is set."""
    over = threading.Event()
    threading.Thread(target=_watch, args=(journal, over), name="chaos-stalls", daemon=True).start()
    return over


def _watch(journal: Journal, over: threading.Event) -> None:
    before = _monotonic()
    while not over.wait(TICK_S):
        now = _monotonic()
        late = now - before - TICK_S
        before = now
        if late > TOLERATED_S:
            journal.say("stalled", seconds=round(late, 3))
