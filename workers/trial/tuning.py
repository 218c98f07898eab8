"""Tuning: how much batch one engine bears before chat's p95 breaks, by trying.

Chat comes as recorded, beside a fixed number of batch requests: 0, 1, 2, 4, ... until its p95 stands above the limit,
then between the last that held and the first that did not. The same with prompts that are read at a growing rate. What
was found is where the governor of a worker begins; from there it feels its way as ever.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from llmq.workers.trial.figures import Row, p95_alone, rows_of
from llmq.workers.trial.metered import MeteredEngine
from llmq.workers.trial.phase import Phase, straight, whole
from llmq.workers.trial.setting import Setting

#: Shares of the engine's reading speed that batch prompts are tried at.
READING = (0.05, 0.1, 0.2, 0.4, 0.6)

#: Tokens of the prompts that are read for it, before scaling.
READ_PROMPT = 800


@dataclass(frozen=True, slots=True)
class Trial:
    """One thing that was tried: so many batch requests, or (`prefill_tps`) so many prompt tokens a second."""

    batch: int
    prefill_tps: float
    row: Row
    holds: bool


@dataclass(frozen=True, slots=True)
class Found:
    """What held: the most batch requests, the most prompt tokens a second; and everything that was tried.

    `chat_in_flight` is how much chat the most batch requests held beside, on average.
    """

    batch: int
    prefill_tps: float
    alone: Row
    chat_in_flight: float
    trials: list[Trial]


async def find_limits(setting: Setting, engine: MeteredEngine, factor: float, say: Callable[[str], None]) -> Found:
    """Try until it is known at what chat's p95 exceeds `factor` times chat's alone. Raises EngineUnavailable."""
    plan = setting.plan
    first = await whole(straight("chat alone", plan, engine, 0))
    alone = rows_of([first])[0]
    say(f"chat alone: p95 {p95_alone([first]) * 1000:.0f} ms")
    trials: list[Trial] = []

    def judge(phase: Phase, batch: int, prefill_tps: float) -> bool:
        row = rows_of([first, phase])[1]
        trials.append(Trial(batch, prefill_tps, row, holds := row.ratio <= factor))
        say(f"{phase.name}: p95 {row.p95_s * 1000:.0f} ms, {row.ratio:.2f} x: {'holds' if holds else 'does not hold'}")
        return holds

    chat = first.chat_in_flight

    async def with_batch(count: int) -> bool:
        nonlocal chat
        phase = await whole(straight(f"{count} batch", plan, engine, count))
        if holds := judge(phase, count, 0.0):
            chat = phase.chat_in_flight
        return holds

    async def with_reading(tps: float) -> bool:
        prompt = max(1, round(READ_PROMPT * setting.tokens))
        phase = await whole(straight(f"{tps:,.0f} prompt tokens/s", plan, engine, 0, (tps, prompt)))
        return judge(phase, 0, tps)

    batch = await most_that_holds(plan.slots, with_batch)
    prefill_tps = 0.0
    for share in READING:
        if not await with_reading(tps := share * setting.pace.prefill_tps):
            break
        prefill_tps = tps
    return Found(batch, prefill_tps, alone, chat, trials)


async def most_that_holds(most: int, holds: Callable[[int], Awaitable[bool]]) -> int:
    """Return the largest number up to `most` that holds; 0 is known to. What holds at one number does at all below."""
    good, bad, trying = 0, most + 1, 1
    while good < most and trying < bad:
        if await holds(trying):
            good, trying = trying, min(most, trying * 2)
            if good == most:
                return good
        else:
            bad = trying
    while bad - good > max(1, good // 8):
        middle = (good + bad) // 2
        if await holds(middle):
            good = middle
        else:
            bad = middle
    return good
