"""Scenes: chat beside batch on one simulated GPU, as recorded and as made up, and what comes of them pooled.

A scene is several runs, each of which begins with a governor that knows nothing; what they saw is put together as one
phase, so that the figures of `llmq bench` can be made of it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from llmq.workers.traffic import Arrival, recorded
from llmq.workers.trial.figures import Row, rows_of
from llmq.workers.trial.phase import Phase
from tests.governing.shared_gpu import Gpu, SharedGpu
from tests.governing.virtual_time import run_virtually

#: About an 8-billion model on one large GPU, a small engine such as llama.cpp on a few cores, and one on a single core,
#: where two requests at a time make a twelfth more than one, and four an eighth.
LARGE = Gpu(64, 30_000, 150, reserve=7, prompt=(100, 800), answer=(100, 400))
SMALL = Gpu(8, 3_000, 40, reserve=1, prompt=(50, 200), answer=(20, 80))
ONE_CORE = Gpu(8, 3_600, 600, reserve=1, prompt=(20, 30), answer=(6, 24), parallel=1.18)

#: Each run lasts so long.
SECONDS = 285.0


@dataclass(frozen=True, slots=True)
class Scene:
    """A GPU, and the chat of each run; `caps` are fixed batch caps to compare with."""

    name: str
    gpu: Gpu
    runs: Sequence[Sequence[Arrival]]
    caps: Sequence[int]

    def play(self, name: str, cap: int | None = None, ttft_p95_s: float | None = None) -> Phase:
        """Play all runs with a fixed cap, or with an objective."""
        phase = Phase(name, SECONDS * len(self.runs), 0.0, objective_s=ttft_p95_s)
        phase.counted_s = phase.seconds
        for number, arrivals in enumerate(self.runs):
            found = run_virtually(SharedGpu(self.gpu, arrivals, cap=cap, ttft_p95_s=ttft_p95_s, keeps=True).run())
            phase.firsts += [(came + number * SECONDS, seconds) for came, seconds in found.firsts]
            phase.made += found.made
            phase.all_made += found.made
            phase.wasted_tokens += found.wasted
            phase.preempted += found.preempted
        return phase

    def rows(self, factor: float) -> list[Row]:
        """Return chat alone, the governor with an objective of so many times chat alone's p95, and the fixed caps."""
        alone = self.play("chat alone", cap=0)
        objective_s = factor * rows_of([alone])[0].p95_s
        governed = self.play(f"llmq, objective {factor:g} x", ttft_p95_s=objective_s)
        return rows_of([alone, governed, *(self.play(f"fixed cap {cap}", cap=cap) for cap in self.caps)])


def recorded_slice(begin: float, rate: float, tokens: float = 1.0) -> list[Arrival]:
    """Return a run of the recording from `begin` on, `rate` times as dense, with `tokens` times as many tokens."""
    return [
        Arrival((chat.at - begin) / rate, max(1, round(chat.prompt * tokens)), max(1, round(chat.answer * tokens)))
        for chat in recorded()
        if begin <= chat.at < begin + SECONDS * rate
    ]


def made_up(seed: int, quiet: float, burst: float, every_s: float = 30.0, burst_s: float = 5.0) -> list[Arrival]:
    """Return chat of `quiet` requests a second at random, and of `burst` a second for a while each half minute."""
    luck, at, found = random.Random(seed), 0.0, list[Arrival]()
    while True:
        bursting = at > every_s / 2 and at % every_s < burst_s
        at += luck.expovariate(burst if bursting else quiet)
        if at >= SECONDS:
            return found
        found.append(Arrival(at, round(luck.triangular(100, 1500)), luck.randint(50, 300)))


def scenes() -> list[Scene]:
    """Return the scenes of the report."""
    return [
        Scene(
            "recorded chat, 64 slots, 4.7 requests a second",
            LARGE,
            [recorded_slice(begin, 0.95) for begin in (0, 300, 600)],
            (1, 2, 4, 6, 8, 16, 24, 40),
        ),
        Scene("made-up bursts, 64 slots", LARGE, [made_up(seed, 3, 14) for seed in (3, 4)], (2, 4, 6, 8, 16)),
        Scene("one chat request a second, 64 slots", LARGE, [made_up(seed, 1, 1) for seed in (3, 4)], (2, 4, 6, 8, 16)),
        Scene(
            "recorded chat, 64 slots, batch prompts of 2,000 to 8,000 tokens",
            replace(LARGE, prompt=(2000, 8000)),
            [recorded_slice(begin, 0.95) for begin in (0, 300, 600)],
            (1, 2, 4),
        ),
        Scene(
            "one chat request a second, 64 slots, batch prompts of 2,000 to 8,000 tokens",
            replace(LARGE, prompt=(2000, 8000)),
            [made_up(seed, 1, 1) for seed in (3, 4)],
            (1, 2, 4),
        ),
        Scene(
            "recorded chat, a slow engine of 8 slots",
            SMALL,
            [recorded_slice(begin, rate, 0.12) for begin, rate in ((0, 0.4), (300, 0.33), (600, 0.4))],
            (1, 2, 4),
        ),
        Scene(
            "recorded chat, an engine of 8 slots that one request fills",
            ONE_CORE,
            [recorded_slice(begin, 1.4, 0.08) for begin in (0, 400)],
            (1, 2, 4),
        ),
    ]
