"""Stalls: times in which a process did not get to run, or its way to Redis did not carry, as its own clock shows.

On a machine that is busy with other things a process may stand still for seconds. What then comes late is no fault of
llmq, so each process of a chaos run has a thread that sleeps a little, again and again, and writes down when it slept
much longer than it meant to; a worker's thread also sends a PING, over a connection of its own on the worker's way, and
writes down when the answer came late. The audit judges no time in which this machine stood still.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import redis

from tests.chaos.journal import Journal
from tests.servers import client_of

#: How often a process looks whether it still runs on time.
TICK_S = 0.1

#: What a tick may come too late without a word.
TOLERATED_S = 0.25

#: A PING that takes longer than this is sent again.
PING_TIMEOUT_S = 5.0

_monotonic = time.monotonic


def watch_for_stalls(journal: Journal, url: str = "") -> threading.Event:
    """Write the stalls of this process into the journal until it ends, or until the event is set.

    With a URL also those of the way to the Redis there.
    """
    over = threading.Event()
    looks = [(_sleep, "chaos-stalls")] + ([(_pings(url), "chaos-pings")] if url else [])
    for look, name in looks:
        threading.Thread(target=_watch, args=(journal, over, look), name=name, daemon=True).start()
    return over


def _watch(journal: Journal, over: threading.Event, look: Callable[[], float]) -> None:
    while not over.wait(TICK_S):
        late = look()
        if late > TOLERATED_S:
            journal.say("stalled", seconds=round(late, 3))


def _sleep() -> float:
    """Return how much longer than a tick a tick takes."""
    began = _monotonic()
    time.sleep(TICK_S)
    return _monotonic() - began - TICK_S


def _pings(url: str) -> Callable[[], float]:
    """Return what sends a PING and says how long it took; a way that is broken has not stalled."""
    client = client_of(url, socket_timeout=PING_TIMEOUT_S)

    def ping() -> float:
        began = _monotonic()
        try:
            client.ping()
        except (redis.RedisError, OSError):
            pass  # cut, swallowed or killed, as planned; one that only took too long has stalled
        return _monotonic() - began

    return ping
