"""Sampling: some lines of a checked file, and what they say of all of it: LLM tokens and time, with a range.

The file is cut into as many stretches as lines are wanted, and one line is drawn from each: so a file that is sorted by
length or by topic is seen whole. What is drawn follows from the file's digest alone: the same file and number give the
same lines. A range is the 95 % confidence interval of the mean (Student's t, with the correction for a finite file);
drawing by stretches can only make it wider than need be. It is about lines like those that were seen: what is rare in
the file may be missing in a small sample.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

from llmq.scheduler.input_file import InputFile
from llmq.scheduler.lines import Checked, InputLine, read_lines

#: A sample below this says little: the range itself is not to be trusted.
FEW_LINES = 30

_Z = NormalDist().inv_cdf(0.975)


def choose(good: int, count: int, seed: str) -> list[int]:
    """Return which of `good` lines to take, `count` of them or all: places from 0, ascending."""
    count = min(good, count)
    draw = random.Random(seed)
    return [draw.randrange(good * place // count, good * (place + 1) // count) for place in range(count)]


def sample_lines(file: InputFile, checked: Checked, count: int) -> Iterator[InputLine]:
    """Iterate over `count` lines of a file, or all of it; bad lines are not among them."""
    chosen = iter(choose(checked.good, count, file.digest))
    wanted = next(chosen, None)
    good = (line for line in read_lines(file, checked) if isinstance(line, InputLine))
    for place, line in enumerate(good):
        if place == wanted:
            yield line
            wanted = next(chosen, None)
        if wanted is None:
            return


@dataclass(frozen=True, slots=True)
class SampledLine:
    """How one line of a sample ended; `reason` says why it failed, "" where it did not."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Range:
    """An estimate; `low` and `high` are None where there is no telling (one line)."""

    estimate: float
    low: float | None
    high: float | None

    def to_json(self) -> dict[str, int | None]:
        """Return whole numbers."""
        low, high = (None if value is None else round(value) for value in (self.low, self.high))
        return {"estimate": round(self.estimate), "low": low, "high": high}


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a sample says of a file of `lines` good lines: LLM tokens and seconds of all of it, failures by reason.

    `lines_per_second` is how fast the sample went, from the moment at which it was queued to its last answer.
    """

    lines: int
    sampled: int
    failed: int
    reasons: tuple[tuple[str, int], ...]
    prompt_tokens: Range
    completion_tokens: Range
    seconds: Range
    lines_per_second: float

    def to_json(self) -> dict[str, object]:
        """Return what `--json` shows."""
        return {
            "lines": self.lines,
            "sampled": self.sampled,
            "completed": self.sampled - self.failed,
            "failed": self.failed,
            "reasons": [{"reason": reason, "lines": count} for reason, count in self.reasons],
            "tokens": {"prompt": self.prompt_tokens.to_json(), "completion": self.completion_tokens.to_json()},
            "seconds": self.seconds.to_json(),
            "lines_per_second": round(self.lines_per_second, 3),
        }


def estimate(sample: Sequence[SampledLine], lines: int, seconds: float) -> Estimate:
    """Estimate what `lines` lines take, of a sample of them (one at least) that took `seconds`."""
    reasons = sorted(line.reason for line in sample if line.reason)
    counted = [(reason, len(list(same))) for reason, same in itertools.groupby(reasons)]
    seconds = max(seconds, 1e-3)
    return Estimate(
        lines=lines,
        sampled=len(sample),
        failed=len(reasons),
        reasons=tuple(sorted(counted, key=lambda pair: -pair[1])),
        prompt_tokens=total_of([line.prompt_tokens for line in sample], lines),
        completion_tokens=total_of([line.completion_tokens for line in sample], lines),
        seconds=_time_of(sample, lines, seconds),
        lines_per_second=len(sample) / seconds,
    )


def total_of(values: Sequence[int], lines: int) -> Range:
    """Estimate the sum over `lines` lines from the values of some of them. It is never below what was seen."""
    seen, count = sum(values), len(values)
    total = fmean(values) * lines
    if count == lines:
        return Range(total, total, total)
    if count < 2:
        return Range(total, None, None)
    error = _student(count - 1) * stdev(values) / math.sqrt(count) * math.sqrt(1 - count / lines) * lines
    return Range(total, max(float(seen), total - error), total + error)


def _time_of(sample: Sequence[SampledLine], lines: int, seconds: float) -> Range:
    """Estimate the seconds of all lines: as uncertain as their tokens are, and as a rate of so few events is."""
    total, count = seconds * lines / len(sample), len(sample)
    tokens = total_of([line.prompt_tokens + line.completion_tokens for line in sample], lines)
    if count == lines or tokens.high is None:
        return Range(total, *((total, total) if count == lines else (None, None)))
    spread = tokens.high / tokens.estimate - 1 if tokens.estimate else 0.0
    error = math.hypot(spread, _Z / math.sqrt(count)) * total
    return Range(total, max(seconds, total - error), total + error)


def _student(degrees: int) -> float:
    """Return the 97.5 % point of Student's t (Cornish-Fisher; right to 1 % from 3 degrees on, too low below)."""
    exact = {1: 12.706, 2: 4.303}
    if degrees in exact:
        return exact[degrees]
    return _Z + (_Z**3 + _Z) / (4 * degrees) + (5 * _Z**5 + 16 * _Z**3 + 3 * _Z) / (96 * degrees**2)
