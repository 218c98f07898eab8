"""Setting up a trial: an engine is measured briefly, and the recorded traffic is scaled to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llmq.scheduler.errors import UsageError
from llmq.workers.engines.base import EngineInfo
from llmq.workers.traffic import Arrival, rate_for, recorded, scaled
from llmq.workers.trial.capacity import Pace, measure_capacity, measure_pace, scale_for
from llmq.workers.trial.metered import MeteredEngine
from llmq.workers.trial.phase import Plan
from llmq.workers.trial.requests import BATCH_ANSWER, BATCH_PROMPT, Requests

#: Slots where neither user nor engine tells them.
USUAL_SLOTS = 8

#: How long the capacity is measured at most; no longer than a phase.
CAPACITY_S = 6.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the user asks of a trial; None is found out. `share` is what chat alone shall use of the engine.

    Phases have their `seconds` in so many `turns`. `batch_prompt` is how many tokens batch prompts have before scaling,
    from and to; None: as many as usual.
    """

    seconds: float
    warmup: float
    share: float = 0.35
    rate: float | None = None
    tokens: float | None = None
    slots: int | None = None
    most_tokens: int = 2000
    trace: Sequence[Arrival] | None = None
    batch_prompt: tuple[int, int] | None = None
    turns: int = 1


@dataclass(frozen=True, slots=True)
class Setting:
    """A trial that can begin: the plan of its phases, and what was measured for it.

    `capacity` is requests a second with all slots in use, `rate` and `tokens` how the recording is scaled.
    """

    plan: Plan
    pace: Pace
    capacity: float
    rate: float
    tokens: float

    @property
    def chat_a_second(self) -> float:
        """Chat requests a second."""
        return len(self.plan.arrivals) / self.plan.seconds

    def lines(self) -> int:
        """Return how many batch lines are certain to outlast a phase."""
        return int(self.capacity * self.plan.seconds * 3) + 8 * self.plan.slots


async def set_up(engine: MeteredEngine, info: EngineInfo, wanted: Wanted, say: Callable[[str], None]) -> Setting:
    """Measure the engine and scale the traffic. Raises EngineUnavailable, UsageError."""
    slots = wanted.slots or info.slots or USUAL_SLOTS
    trace = list(wanted.trace or recorded())
    measured_s = min(CAPACITY_S, wanted.seconds)
    say(f"measuring the engine ({measured_s:g} s, {slots} slots)")
    pace = await measure_pace(engine)
    tokens = wanted.tokens or scale_for(pace, trace, wanted.most_tokens)

    span = wanted.batch_prompt or BATCH_PROMPT
    if wanted.batch_prompt and (longest := round((span[1] + BATCH_ANSWER[1]) * tokens)) > wanted.most_tokens:
        raise UsageError(
            f"--batch-prompt: a line of {tokens:g} times {span[1]:,} and an answer has up to {longest:,} tokens, and "
            f"--most-tokens allows {wanted.most_tokens:,}: raise it, if the engine takes as much"
        )

    def requests() -> Requests:
        return Requests(pace.wording, tokens, wanted.most_tokens, batch_prompt=span)

    probe = scaled(float("inf"), tokens=tokens, arrivals=trace)[:500]
    capacity = await measure_capacity(engine, requests(), probe, slots, measured_s)
    rate = wanted.rate or rate_for(trace, wanted.seconds, wanted.share * capacity)
    arrivals = scaled(wanted.seconds, rate=rate, tokens=tokens, arrivals=trace)
    if len(arrivals) < 20:
        raise UsageError(
            f"only {len(arrivals)} chat requests would come in {wanted.seconds:g} s: give it longer (--seconds), or "
            "shorter requests (--tokens 0.05)"
        )
    plan = Plan(arrivals, wanted.seconds, wanted.warmup, slots, requests, wanted.turns)
    setting = Setting(plan, pace, capacity, rate, tokens)
    say(
        f"it answers {capacity:.3g} requests a second like chat's ({tokens:g} of the recorded tokens); chat will be "
        f"{setting.chat_a_second:.3g} a second"
    )
    return setting
