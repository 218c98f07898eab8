"""Faults: everything that can go wrong around llmq, one class each.

A fault draws its own dice when the plan is made, and acts on the cast when its time has come; `act` returns when the
fault is over. The cast writes both moments into the journal.
"""

from __future__ import annotations

import asyncio
import random
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from redis import Redis, ResponseError

from tests.chaos.engine import MOODS
from tests.chaos.plan import Kind, Planned

if TYPE_CHECKING:
    from tests.chaos.cast import Cast

#: The lease of a chaos run, in seconds: long enough for a busy machine to renew it, short enough to run out often.
LEASE_S = 2.0


class Fault(Kind, Protocol):
    """One kind of fault: what the plan must know of it, and the deed."""

    async def act(self, cast: Cast, planned: Planned) -> None:
        """Do it, and return when it is over."""
        ...


@dataclass(frozen=True)
class Dice:
    """What most faults draw: a time out of a range."""

    name: str
    weight: float
    hits: str
    shortest: float = 0.0
    longest: float = 0.0

    def draw(self, rng: random.Random) -> tuple[float, str]:
        """Return how long it lasts."""
        return rng.uniform(self.shortest, self.longest), ""


class Kill(Dice):
    """SIGKILL of a worker; another one takes its place after a while."""

    async def act(self, cast: Cast, planned: Planned) -> None:
        """Do it."""
        await cast.places[planned.place].without_worker(signal.SIGKILL, planned.lasts)


class Drain(Dice):
    """SIGTERM of a worker, which then ends by itself; another one takes its place."""

    async def act(self, cast: Cast, planned: Planned) -> None:
        """Do it."""
        await cast.places[planned.place].without_worker(signal.SIGTERM, planned.lasts)


class Freeze(Dice):
    """SIGSTOP of a worker, for less or more than its lease, then SIGCONT."""

    async def act(self, cast: Cast, planned: Planned) -> None:
        """Do it."""
        worker = cast.places[planned.place].worker
        if worker is not None and worker.returncode is None:
            worker.send_signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(planned.lasts)
            finally:
                worker.send_signal(signal.SIGCONT)


class Clock(Dice):
    """The wall clock of a worker jumps an hour, on or back, and jumps back when it is over."""

    def draw(self, rng: random.Random) -> tuple[float, str]:
        """Return how long the clock is wrong, and which way."""
        return rng.uniform(self.shortest, self.longest), rng.choice(["on", "back"])

    async def act(self, cast: Cast, planned: Planned) -> None:
        """Do it."""
        jumps = [signal.SIGUSR1, signal.SIGUSR2]
        first, second = jumps if planned.detail == "on" else reversed(jumps)
        place = cast.places[planned.place]
        worker = place.worker
        if worker is not None and place.up:
            worker.send_signal(first)
            await asyncio.sleep(planned.lasts)
            if worker.returncode is None:
                worker.send_signal(second)


class KillEngine(Dice):
    """SIGKILL of an engine with all that it runs; it comes back after a while."""

    async def act(self, cast: Cast, planned: Planned) -> None:
        """Do it."""
        await cast.places[planned.place].without_engine(planned.lasts)


class FreezeEngine(Dice):
    """An engine that says nothing any more, with its connections open."""

    async def act(self, cast: Cast, planned: Planned) -> None:
        """Do it."""
        engine = cast.places[planned.place].engine
        if engine is not None and engine.returncode is None:
            engine.send_signal(signal.SIGSTOP)
            try:
                await asyncio.sleep(planned.lasts)
            finally:
                engine.send_signal(signal.SIGCONT)


class Mood(Dice):
    """An engine that answers a share of the requests with 429, 500, garbage, half a stream, its death, or nothing."""

    def draw(self, rng: random.Random) -> tuple[float, str]:
        """Return how long, and which mood for which share."""
        return rng.uniform(self.shortest, self.longest), f"{rng.choice(MOODS)} {rng.uniform(0.2, 1):.2f}"

    async def act(self, cast: Cast, planned: Planned) -> None:
        """Do it."""
        mood, share = planned.detail.split()
        await cast.places[planned.place].change_mood(mood, float(share))
        await asyncio.sleep(planned.lasts)
        await cast.places[planned.place].change_mood("", 0.0)


class KillRedis(Dice):
    """SIGKILL of Redis; it comes back with what is in its append-only file."""

    async def act(self, cast: Cast, planned: Planned) -> None:
        """Do it."""
        await asyncio.to_thread(cast.server.kill)
        await asyncio.sleep(planned.lasts)
        # Said before it serves: the earliest moment of the contact that begins now.
        cast.journal.say("redis back", killed=True, away=planned.lasts)
        await asyncio.to_thread(cast.server.start)


class FreezeRedis(Dice):
    """A Redis that hangs, with all connections open."""

    async def act(self, cast: Cast, planned: Planned) -> None:
        """Do it."""
        await asyncio.to_thread(cast.server.freeze)
        try:
            await asyncio.sleep(planned.lasts)
        finally:
            cast.journal.say("redis back", killed=False, away=planned.lasts)
            await asyncio.to_thread(cast.server.thaw)


class FailOver(Dice):
    """A failover by hand: a replica takes over though the primary lives."""

    async def act(self, cast: Cast, planned: Planned) -> None:
        """Do it."""
        await asyncio.to_thread(cast.server.fail_over)


class FlushAll(Dice):
    """FLUSHALL: all is lost, and llmq must go on. The live settings are written again in the same moment."""

    async def act(self, cast: Cast, planned: Planned) -> None:
        """Do it."""
        await asyncio.to_thread(cast.flush)


class ForgetScripts(Dice):
    """SCRIPT FLUSH: the server knows no script any more."""

    async def act(self, cast: Cast, planned: Planned) -> None:
        """Do it."""
        await asyncio.to_thread(cast.operate, lambda redis: redis.script_flush())


class KillClients(Dice):
    """CLIENT KILL of all connections, or of a third of them."""

    def draw(self, rng: random.Random) -> tuple[float, str]:
        """Return which."""
        return 0.0, rng.choice(["all", "some"])

    async def act(self, cast: Cast, planned: Planned) -> None:
        """Do it."""
        await asyncio.to_thread(cast.operate, lambda redis: _kill_clients(redis, 1 if planned.detail == "all" else 3))


class Delay(Dice):
    """A network that is slow for a while."""

    def draw(self, rng: random.Random) -> tuple[float, str]:
        """Return how long, and how slow."""
        return rng.uniform(self.shortest, self.longest), str(rng.choice([0.03, 0.2, 0.6, 1.2]))

    async def act(self, cast: Cast, planned: Planned) -> None:
        """Do it."""
        way = cast.way(planned.place)
        way.delay = float(planned.detail)
        await asyncio.sleep(planned.lasts)
        way.heal()


class Cut(Dice):
    """All connections of one party are reset."""

    async def act(self, cast: Cast, planned: Planned) -> None:
        """Do it."""
        cast.way(planned.place).cut()


class Swallow(Dice):
    """A black hole: connections stay open and nothing arrives. It may end with a reset."""

    def draw(self, rng: random.Random) -> tuple[float, str]:
        """Return how long, and how it ends."""
        return rng.uniform(self.shortest, self.longest), rng.choice(["", "reset"])

    async def act(self, cast: Cast, planned: Planned) -> None:
        """Do it."""
        way = cast.way(planned.place)
        way.swallow()
        await asyncio.sleep(planned.lasts)
        if planned.detail:
            way.cut()
        way.heal()


class HalfOpen(Swallow):
    """What is asked arrives and is done, and no reply comes back. It may end with a reset."""

    async def act(self, cast: Cast, planned: Planned) -> None:
        """Do it."""
        way = cast.way(planned.place)
        way.deafen()
        await asyncio.sleep(planned.lasts)
        if planned.detail:
            way.cut()
        way.heal()


class KillProducer(Dice):
    """SIGKILL of a process that feeds a file; it is started again and goes on."""

    async def act(self, cast: Cast, planned: Planned) -> None:
        """Do it."""
        cast.kill_one(cast.feeders)


class KillCollector(Dice):
    """SIGKILL of a process that collects results; it is started again and goes on."""

    async def act(self, cast: Cast, planned: Planned) -> None:
        """Do it."""
        cast.kill_one(cast.collectors)


class Settings(Dice):
    """An operator changes a live setting, and changes it back when the fault is over."""

    CHOICES = (
        ("rate", "15", "5"), ("rate", "3", "1"), ("rate", "0.2", "1"), ("cap_batch", "60"), ("cap_interactive", "3"),
        ("deadline", "1000"), ("deadline", "4000"), ("weight.t1", "3"), ("queue_ttl", "2000"), ("paused_b", "1"),
        ("paused_i", "1"), ("preempt", "0"), ("attempts_batch", "2"),
    )  # fmt: skip

    def draw(self, rng: random.Random) -> tuple[float, str]:
        """Return for how long which setting changes."""
        return rng.uniform(self.shortest, self.longest), " ".join(rng.choice(self.CHOICES))

    async def act(self, cast: Cast, planned: Planned) -> None:
        """Do it."""
        name, value, *burst = planned.detail.split()
        changes = {name: value} | ({"burst": burst[0]} if burst else {})
        await cast.configure(changes)
        await asyncio.sleep(planned.lasts)
        await cast.configure({changed: cast.SETTINGS.get(changed, "") for changed in changes})


#: Every fault, by name.
FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Kill("kill", 3, "worker", 0.0, 2.0),
        Drain("drain", 2, "worker", 0.0, 1.0),
        Freeze("freeze", 3, "worker", 0.3, 3 * LEASE_S),
        Clock("clock", 1, "worker", 1.0, 4.0),
        KillEngine("kill-engine", 2, "engine", 0.0, 1.5),
        FreezeEngine("freeze-engine", 1, "engine", 0.5, 4.0),
        Mood("mood", 4, "engine", 1.0, 4.0),
        KillRedis("kill-redis", 1.5, "redis", 0.0, 2.5),
        FreezeRedis("freeze-redis", 1.5, "redis", 0.3, 4.0),
        FlushAll("flush-all", 0.4, "redis"),
        ForgetScripts("forget-scripts", 1, "redis"),
        KillClients("kill-clients", 2, "redis"),
        Delay("delay", 2, "way", 0.5, 3.0),
        Cut("cut", 2, "way"),
        Swallow("swallow", 2, "way", 0.3, 5.0),
        HalfOpen("half-open", 2, "way", 0.3, 5.0),
        KillProducer("kill-producer", 1, "producers"),
        KillCollector("kill-collector", 1, "collectors"),
        Settings("settings", 3, "settings", 1.0, 7.0),
    )
}

#: Those of a set of servers: its clients reach it by themselves, so there is no bad network between them; and a primary
#: may be replaced.
FAULTS_OF_SETS: dict[str, Fault] = {
    fault.name: fault
    for fault in (*(one for one in FAULTS.values() if one.hits != "way"), FailOver("fail-over", 1, "redis"))
}


def faults_of(topology: str) -> dict[str, Fault]:
    """Return the faults that may happen to a topology, by name."""
    return FAULTS if topology == "single" else FAULTS_OF_SETS


def _kill_clients(redis: Redis, one_in: int) -> None:
    mine = redis.client_id()
    for client in redis.client_list()[::one_in]:
        if int(client["id"]) != mine:
            try:
                redis.client_kill_filter(_id=client["id"])
            except ResponseError:
                pass  # it has left by itself
