"""A run: the cast comes on, people ask, the plan takes its course, all is left in peace, and the books are read.

evidence = await run(folder, seed=7, seconds=60)
violations = audit(evidence)
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.chaos import cast as company
from tests.chaos.audit import audit
from tests.chaos.cast import Cast
from tests.chaos.evidence import Evidence, Violation
from tests.chaos.faults import LEASE_S, Fault, faults_of
from tests.chaos.journal import read
from tests.chaos.ledger import Ledger
from tests.chaos.plan import Planned, plan
from tests.chaos.producers import Producers
from tests.chaos.remains import note_remains
from tests.chaos.replay import Replay
from tests.chaos.told import audit_told
from tests.chaos.worker import LEAST_CONTACT_S
from tests.conftest import PERMANENT_KEYS
from tests.redis.serving import KEYS

PLACES = 3

#: For so long after the last fault nothing may end or be told, unless all has: work that goes on may take its time.
PEACE_S = 45.0

#: How often it is looked whether anything has moved.
LOOK_S = 0.2


@dataclass(frozen=True)
class Terms:
    """What a run is made of."""

    seed: int
    seconds: float
    faults: Mapping[str, Fault]
    topology: str = "single"
    server: str = "valkey"
    peace_s: float = PEACE_S

    def timetable(self) -> list[Planned]:
        """Return the faults of this run: always the same ones for the same terms."""
        return plan(self.seed, self.seconds, self.faults, PLACES)


def terms(seed: int, seconds: float, faults: str = "", **more: Any) -> Terms:
    """Return the terms of a run; `faults` names those that may happen, all where it is empty."""
    known = faults_of(more.get("topology", "single"))
    chosen = faults.split(",") if faults else list(known)
    return Terms(seed, seconds, {name: known[name] for name in chosen}, **more)


async def run(folder: Path, given: Terms) -> Evidence:
    """Do one run, and return what is known of it."""
    stage = company.cast(folder, given.seed, places=PLACES, topology=given.topology, kind=given.server)
    async with stage as cast:
        cast.journal.say("run begins", seed=given.seed, seconds=given.seconds)
        producers = Producers(cast, folder, given.seed)
        try:
            await _act(cast, producers, given)
            await _peace(cast, producers, given.peace_s)
        finally:
            await producers.close()
        left = _left(cast)
        note_remains(cast)
    # Everybody has left the stage, and the server's file is closed.
    history = cast.server.history()
    ledger = Replay().run(history) if history is not None else Ledger()
    return Evidence(read(folder / "journal"), ledger, left, LEASE_S, LEAST_CONTACT_S)


def judge(evidence: Evidence, topology: str) -> list[Violation]:
    """Return the laws that a run has broken, as far as they can be judged on its topology."""
    return audit(evidence) if topology == "single" else audit_told(evidence)


async def _act(cast: Cast, producers: Producers, given: Terms) -> None:
    """Let people ask, and everything go wrong as planned."""
    loop = asyncio.get_running_loop()
    begins = loop.time()
    asking = asyncio.create_task(producers.ask())
    suffering: list[asyncio.Task[None]] = []
    for planned in given.timetable():
        await asyncio.sleep(begins + planned.at - loop.time())
        suffering.append(asyncio.create_task(cast.suffer(planned)))
    await asyncio.sleep(begins + given.seconds - loop.time())
    asking.cancel()
    await asyncio.gather(*suffering)


async def _peace(cast: Cast, producers: Producers, within: float) -> None:
    """Leave all in peace until everybody has been told and the queue is empty, or nothing moves any more."""
    cast.journal.say("peace")
    await cast.configure(dict.fromkeys(("paused_i", "paused_b", "rate", "burst"), ""))

    loop = asyncio.get_running_loop()
    before: object = None
    moved_at = loop.time()
    while producers.waiting or cast.operate(lambda redis: redis.exists(KEYS.lanes)):
        now = (len(producers.waiting), cast.operate(lambda redis: redis.hgetall(KEYS.counts)))
        before, moved_at = now, moved_at if now == before else loop.time()
        if loop.time() > moved_at + within:
            break
        await asyncio.sleep(LOOK_S)
    cast.journal.say("peace over")


def _left(cast: Cast) -> list[str]:
    """Return the keys without a TTL that no queue may leave."""
    with cast.server.client() as redis:
        keys = [key for key in redis.scan_iter(count=1000) if redis.ttl(key) == -1]
    return sorted(key.decode() for key in keys if not PERMANENT_KEYS.fullmatch(key.decode()))
