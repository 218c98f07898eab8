"""What an engine can do, measured in some seconds: how it counts tokens, how fast it reads and answers.

A trial is scaled to it: arrivals so dense that chat alone uses a stated share, and lengths that the engine answers in
a time that people would wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from llmq.scheduler.errors import EngineUnavailable
from llmq.scheduler.job import Job
from llmq.workers.engines.base import EngineError
from llmq.workers.traffic import Arrival
from llmq.workers.trial.metered import BATCH_USER, MeteredEngine
from llmq.workers.trial.requests import CHAT_URL, Requests, Wording

#: Two prompts of these many words tell how the engine counts, and how fast it reads.
SHORT, LONG = 20, 220

#: An average chat request alone shall take at most this long; else lengths are scaled down.
PATIENCE_S = 2.0

#: Scales that are tried, the first that is short enough is taken.
SCALES = (1.0, 0.5, 0.25, 0.12, 0.06, 0.03)


@dataclass(frozen=True, slots=True)
class Pace:
    """How an engine counts and how fast it is, alone: `prefill_tps` prompt tokens, `decode_tps` answer tokens."""

    wording: Wording
    prefill_tps: float
    decode_tps: float

    def seconds(self, prompt: float, answer: float) -> float:
        """Return how long one request alone takes, about."""
        return prompt / self.prefill_tps + answer / self.decode_tps


async def measure_pace(engine: MeteredEngine) -> Pace:
    """Ask a few single requests. Raises EngineUnavailable where the engine refuses them."""
    plain = Requests(Wording(), 1.0, 100_000, seed=99)
    await _one(engine, plain, SHORT, 8)  # warm
    short_tokens, short_s = await _least(engine, plain, SHORT)
    long_tokens, long_s = await _least(engine, plain, LONG)
    _, _, decode_tps = await _one(engine, plain, SHORT, 64)
    if not 0 < short_tokens < long_tokens:
        wording = Wording()  # no usage, or an engine that counts nothing
        short_tokens, long_tokens = SHORT, LONG
    else:
        per_word = (long_tokens - short_tokens) / (LONG - SHORT)
        wording = Wording(short_tokens - SHORT * per_word, per_word)
    prefill = (long_tokens - short_tokens) / max(1e-4, long_s - short_s)
    return Pace(wording, min(prefill, 1e6), decode_tps)


def scale_for(pace: Pace, arrivals: Sequence[Arrival], most_tokens: int) -> float:
    """Return how much shorter than recorded requests have to be, for an average one to take as long as people wait."""
    prompt = sum(arrival.prompt for arrival in arrivals) / len(arrivals)
    answer = sum(arrival.answer for arrival in arrivals) / len(arrivals)
    for scale in SCALES:
        fits = (prompt + answer) * scale * 2 <= most_tokens
        if fits and pace.seconds(prompt * scale, answer * scale) <= PATIENCE_S:
            return scale
    return SCALES[-1]


async def measure_capacity(
    engine: MeteredEngine, requests: Requests, arrivals: Sequence[Arrival], slots: int, seconds: float
) -> float:
    """Return how many requests like these arrivals the engine answers a second with all slots in use."""
    answer = sum(arrival.answer for arrival in arrivals) / len(arrivals)
    turn = 0

    async def endless() -> None:
        nonlocal turn
        while True:
            arrival = arrivals[turn % len(arrivals)]
            turn += 1
            try:
                await engine.run(Job(CHAT_URL, requests.chat(arrival) | {"user": BATCH_USER}), lambda text, chunk: None)
            except EngineError:
                await asyncio.sleep(0.1)

    tasks = [asyncio.create_task(endless()) for _ in range(slots)]
    try:
        await asyncio.sleep(seconds / 3)
        before, began = engine.meter.tokens, time.monotonic()
        await asyncio.sleep(seconds * 2 / 3)
        made = (engine.meter.tokens - before) / (time.monotonic() - began)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    if not made:
        raise EngineUnavailable("the engine answered nothing while its capacity was measured: look at its log")
    return made / answer


async def _least(engine: MeteredEngine, requests: Requests, words: int) -> tuple[int, float]:
    """Return the prompt tokens and the seconds to the first token of the fastest of three."""
    found = [await _one(engine, requests, words, 2) for _ in range(3)]
    return min((tokens, first_s) for tokens, first_s, _ in found if first_s == min(one[1] for one in found))


async def _one(engine: MeteredEngine, requests: Requests, words: int, answer: int) -> tuple[int, float, float]:
    """Return the prompt tokens of one request, its seconds to the first token, its tokens a second from then on."""
    body = requests.reading(words) | {"max_tokens": answer}
    began, times = time.monotonic(), list[float]()
    try:
        found = await engine.run(Job(CHAT_URL, body), lambda text, chunk: times.append(time.monotonic()))
    except EngineError as error:
        raise EngineUnavailable(f"the engine did not answer a short request: {error}") from None
    if found.status_code >= 400:
        said = found.body[:200].decode(errors="replace")
        raise EngineUnavailable(f"the engine refused a short request with {found.status_code}: {said}")
    first = times[0] if times else time.monotonic()
    rest = (times[-1] - first) if len(times) > 2 else 0.0
    return found.usage.prompt_tokens, first - began, (len(times) - 1) / rest if rest > 0 else 1000.0
