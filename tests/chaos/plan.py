"""The plan: a seed makes the whole timetable of faults, before anything has begun.

Storms, in which faults come one after another and on top of each other, take turns with calms, in which one worker is
killed and nothing else happens: only then can it be said how fast llmq must have recovered. What the plan holds is all
the randomness of a run's faults, so the same seed is the same timetable.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

STORM_S = 14.0
CALM_S = 14.0

#: Into a calm, until the lone kill: what the storm has broken is whole again.
SETTLE_S = 4.0

#: Between two faults of a storm, in seconds.
GAPS = (0.1, 1.2)


@dataclass(frozen=True, slots=True)
class Planned:
    """One fault of the timetable: when (seconds from the start), which, where, for how long, and what exactly."""

    at: float
    fault: str
    place: int
    lasts: float
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.at:7.2f} {self.fault} place={self.place} lasts={self.lasts:.2f} {self.detail}".rstrip()


class Kind(Protocol):
    """What the plan must know of a fault: how often it is drawn, what it keeps busy, and its own dice."""

    @property
    def name(self) -> str:
        """What it is called."""
        ...

    @property
    def weight(self) -> float:
        """How often it is drawn."""
        ...

    @property
    def hits(self) -> str:
        """`worker`, `way` or `engine` (of a place), or what there is one of: `redis`, `clients`, ..."""
        ...

    def draw(self, rng: random.Random) -> tuple[float, str]:
        """Return how long it lasts, and what exactly it does."""
        ...


def plan(seed: int, seconds: float, kinds: Mapping[str, Kind], places: int) -> list[Planned]:
    """Return the timetable of a run."""
    rng = random.Random(f"faults {seed}")
    faults: list[Planned] = []
    begins = 0.0
    while begins < seconds:
        calm = min(begins + STORM_S, seconds)
        faults += _storm(rng, begins, calm, list(kinds.values()), places)
        if calm + CALM_S <= seconds and "kill" in kinds:
            faults.append(Planned(calm + SETTLE_S, "kill", rng.randrange(places), kinds["kill"].draw(rng)[0]))
        begins = calm + CALM_S
    return faults


def _storm(rng: random.Random, begins: float, ends: float, kinds: Sequence[Kind], places: int) -> list[Planned]:
    """Draw faults, never two at once on the same thing."""
    faults: list[Planned] = []
    busy: dict[tuple[str, int], float] = {}
    at = begins
    while (at := at + rng.uniform(*GAPS)) < ends:
        kind = rng.choices(kinds, [kind.weight for kind in kinds])[0]
        lasts, detail = kind.draw(rng)
        place = rng.randrange(places) if kind.hits in ("worker", "way", "engine") else -1
        place = rng.randrange(-1, places) if kind.hits == "way" else place  # -1: the clients' way
        thing = (kind.hits, place)
        if busy.get(thing, 0.0) > at:
            continue
        lasts = max(0.0, min(lasts, ends - at))
        busy[thing] = at + lasts
        faults.append(Planned(round(at, 2), kind.name, place, round(lasts, 2), detail))
    return faults
