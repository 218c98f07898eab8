"""The weather: when a party was disturbed by a fault, and when nothing stood in its way.

How fast something must happen can be said only of times in which the world was whole. The weather is read from the
journal: the faults of the plan with what they leave behind, engines that died of poison, workers that came and went,
and the stalls of all processes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tests.chaos.journal import Event, of_kind
from tests.chaos.stalls import TICK_S

NEVER = float("inf")

#: What a fault leaves behind is over after this long: connections are made again, scripts loaded, contact is whole.
AFTERWARDS_S = 2.0

#: Of a time that is judged, the machine may have stood still for this long in all: less than a renewal may be late.
STEADY_S = 0.4

#: A worker probes an engine that is away every 1 to 5 s.
ENGINE_AFTERWARDS_S = 6.0


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A time in which a place (None: all of them) could not be expected to do anything."""

    begins: float
    ends: float
    place: int | None
    what: str


class Weather:
    """What the journal says of the world at any time."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._disturbances = [*_planned(events), *_poisoned(events)]
        self._stalls = _union(_stalls(events))
        self.lives = list(_lives(events))

    def fair(self, place: int, begins: float, ends: float, *, awake: bool = True, but: Collection[float] = ()) -> bool:
        """Whether nothing stood in the way of a place; with `awake` also whether one worker served all the time.

        Where this machine stood still for too long, something did. Disturbances that began at `but` do not count.
        """
        if self.stalled(begins, ends) > STEADY_S:
            return False
        alive = not awake or any(
            life.place == place and life.begins <= begins and life.ends >= ends for life in self.lives
        )
        return alive and not any(
            disturbance.begins < ends and disturbance.ends > begins and disturbance.place in (None, place)
            for disturbance in self._disturbances
            if disturbance.begins not in but
        )

    def fair_somewhere(self, begins: float, ends: float) -> bool:
        """Whether at least one place could work all the time."""
        return any(self.fair(place, begins, ends) for place in {life.place for life in self.lives})

    def stalled(self, begins: float, ends: float) -> float:
        """Return for how many seconds of a time some process of the run stood still without a fault."""
        return sum(max(0.0, min(ends, last) - max(begins, first)) for first, last in self._stalls)

    def place_of(self, consumer: str) -> int | None:
        """Return where a consumer's process lived."""
        return next((life.place for life in self.lives if life.worker == consumer), None)


@dataclass(frozen=True, slots=True)
class Life:
    """One worker's time: from when it served until it was told to end, or ended."""

    begins: float
    ends: float
    place: int
    pid: int
    worker: str


def _planned(events: Sequence[Event]) -> Iterator[Disturbance]:
    begun: dict[tuple[float, str, int], Event] = {}
    for event in of_kind(events, "fault", "fault over"):
        key = (event["planned"], event["fault"], event["place"])
        if event.kind == "fault":
            begun[key] = event
        elif key in begun:
            yield _disturbance(begun.pop(key), event.at)
    for event in begun.values():
        yield _disturbance(event, NEVER)


def _disturbance(event: Event, ends: float) -> Disturbance:
    hits, place = event["hits"], event["place"]
    if (hits == "way" and place < 0) or hits in ("producers", "collectors"):
        return Disturbance(event.at, ends, -1, event["fault"])
    if hits == "settings" and not event["detail"].startswith("paused"):
        return Disturbance(event.at, ends, -1, event["fault"])
    after = ENGINE_AFTERWARDS_S if hits == "engine" else AFTERWARDS_S
    return Disturbance(event.at, ends + after, place if place >= 0 else None, event["fault"])


def _poisoned(events: Sequence[Event]) -> Iterator[Disturbance]:
    ups = list(of_kind(events, "engine up"))
    for event in of_kind(events, "poisoned"):
        back = next((up.at for up in ups if up.who == event.who and up.at > event.at), NEVER)
        yield Disturbance(event.at, back + ENGINE_AFTERWARDS_S, int(event.who[1:]), "poison")


def _lives(events: Sequence[Event]) -> Iterator[Life]:
    ends = [(event["pid"], event.at) for event in of_kind(events, "signal", "worker down")]
    for event in of_kind(events, "worker up"):
        pid = event["pid"]
        over = min((at for ended, at in ends if ended == pid and at >= event.at), default=NEVER)
        yield Life(event.at, over, event["place"], pid, event["worker"])


def _stalls(events: Sequence[Event]) -> Iterator[tuple[float, float]]:
    """Iterate over the times in which a process stood still that nobody had stopped."""
    frozen: dict[str, list[float]] = {}
    for event in of_kind(events, "fault"):
        if event["fault"] in ("freeze", "freeze-engine"):
            who = ("w" if event["fault"] == "freeze" else "e") + str(event["place"])
            frozen.setdefault(who, []).append(event.at)
    for event in of_kind(events, "stalled"):
        begins = event.at - event["seconds"] - 2 * TICK_S
        if not any(begins <= at <= event.at for at in frozen.get(event.who, ())):
            yield event.at - event["seconds"], event.at


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Join spans of time that overlap: what stalls two processes at once delays once."""
    joined: list[tuple[float, float]] = []
    for begins, ends in sorted(spans):
        if joined and begins <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], ends))
        else:
            joined.append((begins, ends))
    return joined
