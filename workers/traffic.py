"""Recorded chat traffic: when requests come, how long their prompts are and how long their answers.

Fifteen minutes of a public trace of a conversation service are shipped with llmq (`traffic.csv`, with source and
licence in its head), so that a policy is tried on bursts as people make them, not on even ones. What was recorded is
lengths and times: it holds no text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Arrival:
    """One chat request: seconds from the beginning, tokens of its prompt and of its answer."""

    at: float
    prompt: int
    answer: int


def recorded() -> Iterator[Arrival]:
    """Yield the recorded arrivals in order."""
    for line in files("llmq.workers").joinpath("traffic.csv").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            milliseconds, prompt, answer = line.split(",")
            yield Arrival(int(milliseconds) / 1000, int(prompt), int(answer))


def scaled(seconds: float, *, rate: float = 1.0, tokens: float = 1.0, most_prompt: int = 1_000_000) -> list[Arrival]:
    """Return the arrivals of the first `seconds`, `rate` times as dense, with `tokens` times as many tokens.

    Scaling keeps the shape: what is a burst stays one. The recording lasts 900 s; a higher rate uses it up sooner.
    """
    found = []
    for arrival in recorded():
        at = arrival.at / rate
        if at >= seconds:
            break
        prompt = max(1, min(most_prompt, round(arrival.prompt * tokens)))
        found.append(Arrival(at, prompt, max(1, round(arrival.answer * tokens))))
    return found
