"""Recorded chat traffic: when requests come, how long their prompts are and how long their answers.

Fifteen minutes of a public trace of a conversation service are shipped with llmq (`traffic.csv`, with source and
licence in its head), so that a policy is tried on bursts as people make them, not on even ones. What was recorded is
lengths and times: it holds no text.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.resources import files
from pathlib import Path

from llmq.scheduler.errors import UsageError


@dataclass(frozen=True, slots=True)
class Arrival:
    """One chat request: seconds from the beginning, tokens of its prompt and of its answer."""

    at: float
    prompt: int
    answer: int


def recorded() -> Iterator[Arrival]:
    """Yield the recorded arrivals in order."""
    return _read(files("llmq.workers").joinpath("traffic.csv").read_text(encoding="utf-8").splitlines())


def recorded_in(path: Path) -> list[Arrival]:
    """Return the arrivals of a user's file: lines of time, prompt tokens, answer tokens.

    Times are milliseconds, or date and time as in the Azure traces; a line of headings and lines that begin with # are
    passed over. Raises UsageError that names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--trace: {path} cannot be read: {error}") from None
    found = list(_read(lines, str(path)))
    if not found:
        raise UsageError(f"--trace: {path} holds no arrivals: expected lines of milliseconds, prompt and answer tokens")
    begin = found[0].at
    return [Arrival(arrival.at - begin, arrival.prompt, arrival.answer) for arrival in found]


def scaled(
    seconds: float,
    *,
    rate: float = 1.0,
    tokens: float = 1.0,
    most_prompt: int = 1_000_000,
    arrivals: Iterable[Arrival] | None = None,
) -> list[Arrival]:
    """Return the arrivals of the first `seconds`, `rate` times as dense, with `tokens` times as many tokens.

    Scaling keeps the shape: what is a burst stays one. The recording lasts 900 s; a higher rate uses it up sooner.
    `arrivals` are others than the recorded ones.
    """
    found = []
    for arrival in recorded() if arrivals is None else arrivals:
        at = arrival.at / rate
        if at >= seconds:
            break
        prompt = max(1, min(most_prompt, round(arrival.prompt * tokens)))
        found.append(Arrival(at, prompt, max(1, round(arrival.answer * tokens))))
    return found


def rate_for(arrivals: Sequence[Arrival], seconds: float, a_second: float) -> float:
    """Return the rate at which so many requests a second come in the first `seconds`, as near as the recording allows.

    A recording that is too short for it is used up: its last moment is then the last one of `seconds`.
    """
    low, high = 0.0, max(1e-6, arrivals[-1].at) / seconds
    for _ in range(40):
        middle = (low + high) / 2
        came = sum(1 for arrival in arrivals if arrival.at < seconds * middle)
        low, high = (middle, high) if came < a_second * seconds else (low, middle)
    return high


def _read(lines: Iterable[str], name: str = "traffic.csv") -> Iterator[Arrival]:
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith(("#", "TIMESTAMP")):
            continue
        try:
            when, prompt, answer = line.split(",")[:3]
            yield Arrival(_seconds(when), int(prompt), int(answer))
        except ValueError:
            raise UsageError(
                f"{name}, line {number}: expected time, prompt tokens, answer tokens, got {line[:60]!r}"
            ) from None


def _seconds(text: str) -> float:
    if text.strip().replace(".", "", 1).isdigit():
        return float(text) / 1000
    return datetime.fromisoformat(text.strip()[:26]).timestamp()
