"""Windows: at what times of the week batch may start, and how fast. Text in, plan out.

    mon-fri 08:00-20:00 5/s; 20:00-08:00 off; sat,sun closed; tz=Europe/Berlin

A rule is `[DAYS] [HH:MM-HH:MM] WHAT`. Without days it means every day, without times the whole day; times that pass
midnight belong to the day on which they begin. WHAT is a rate (`5/s`, `2000tok/s`), `off` (no limit), `open` (the rate
that is set by `llmq rate`) or `closed` (no batch starts). Where several rules cover a moment, **the last one in the
text** holds; where none does, it is `open`. Without `tz` times are UTC.

People mean wall-clock times; the claim script knows only milliseconds. So `expand` writes the plan that it reads: all
changes from now until a week ahead as absolute times. A time that the clocks skip is the moment of their change, one
that comes twice is its first. Pure: who stores a plan, and when it is renewed, stands in `queue.py`.
"""

from __future__ import annotations

import bisect
import re
import zoneinfo
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Literal

from llmq.scheduler.errors import UsageError
from llmq.scheduler.limit import Limit
from llmq.scheduler.units import RATE_FORMS, parse_rate

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")

#: How far ahead a plan reaches: workers that nobody sweeps for (none runs) need no plan either.
AHEAD = timedelta(days=7)

#: The claim reads the whole plan each time; a week of this many rules stays a matter of microseconds.
MAX_RULES = 20

#: Midnight at the end of a day, in minutes.
MIDNIGHT = 24 * 60

Action = Limit | Literal["off", "open", "closed"]

_TIMES = re.compile(r"([0-9]{1,2}):([0-9]{2})-([0-9]{1,2}):([0-9]{2})")
_DAYS = re.compile(r"[a-z]{3}(-[a-z]{3})?(,[a-z]{3}(-[a-z]{3})?)*")
_STEP = re.compile(r"([0-9]{1,15}) (\S+) (\S+) (\S+);")


@dataclass(frozen=True, slots=True)
class Rule:
    """On these days (0 is Monday), from `start` to `end` (minutes after midnight; an end <= start is next day's)."""

    days: frozenset[int]
    start: int
    end: int
    action: Action


@dataclass(frozen=True, slots=True)
class Windows:
    """What a text of windows says."""

    rules: tuple[Rule, ...]
    zone: zoneinfo.ZoneInfo


@dataclass(frozen=True, slots=True)
class PlanState:
    """A plan at one moment: what is in force, and when that changes (ms; None: not within the plan)."""

    action: Action
    changes_at_ms: int | None


def parse_windows(text: str) -> Windows:
    """Read a text of windows. Raises UsageError that names the rule at fault and what was expected."""
    zone: zoneinfo.ZoneInfo | None = None
    rules: list[Rule] = []
    for part in (part.strip() for part in text.split(";")):
        if not part:
            continue
        if part.lower().startswith("tz="):
            if zone is not None:
                raise UsageError(f"expected one time zone, got a second: {part!r}")
            zone = _zone(part[3:].strip())
        else:
            rules.append(_rule(part))
    if not rules:
        raise UsageError(f"expected rules like 'mon-fri 08:00-20:00 5/s; sat,sun closed', got {text[:60]!r}")
    if len(rules) > MAX_RULES:
        raise UsageError(f"expected at most {MAX_RULES} rules, got {len(rules)}")
    return Windows(tuple(rules), zone or zoneinfo.ZoneInfo("UTC"))


def expand(windows: Windows, now_ms: int) -> str:
    """Return the plan that the claim script reads: "from_ms rate burst unit;" a change, in order of time.

    It begins with the change before the one in force, because a deadline counts from when a window opened, and ends a
    week ahead. The same rules at another moment give the same steps, so that a plan changes only when it must.
    """
    today = datetime.fromtimestamp(now_ms / 1000, windows.zone).date()
    # A rule may have begun yesterday, and the change before that another week ago.
    days = [today + timedelta(days=n) for n in range(-8, AHEAD.days + 2)]
    spans = [_spans(rule, days, windows.zone) for rule in windows.rules]
    moments = sorted({moment for rule_spans in spans for span in rule_spans for moment in span})
    steps: list[tuple[int, Action]] = []
    for moment in moments:
        action = _in_force(windows.rules, spans, moment)
        if not steps or steps[-1][1] != action:
            steps.append((moment, action))
    begun = sum(1 for moment, _ in steps if moment <= now_ms)
    horizon = now_ms + AHEAD // timedelta(milliseconds=1)
    # Days are whole, so that the plan does not change with every second.
    horizon += _MS_A_DAY - horizon % _MS_A_DAY
    kept = [step for step in steps[max(0, begun - 2) :] if step[0] <= horizon]
    return " ".join(f"{moment} {_step_text(action)};" for moment, action in kept)


def plan_state(plan: str, now_ms: int) -> PlanState:
    """Read a plan as the claim script does."""
    action: Action = "open"
    for match in _STEP.finditer(plan):
        moment = int(match[1])
        if moment > now_ms:
            return PlanState(action, moment)
        action = _step_action(match[2], match[3], match[4])
    return PlanState(action, None)


_MS_A_DAY = 24 * 3600 * 1000

#: An action without numbers of its own, as a plan writes it.
_STEPS: dict[str, Literal["off", "open", "closed"]] = {"-": "open", "off": "off", "closed": "closed"}


def _step_text(action: Action) -> str:
    if isinstance(action, Limit):
        fields = action.fields()
        return f"{fields['rate']} {fields['burst']} {fields['unit']}"
    return {word: step for step, word in _STEPS.items()}[action] + " - -"


def _step_action(rate: str, burst: str, unit: str) -> Action:
    return _STEPS.get(rate) or Limit.stored(rate, burst, unit) or "open"


def _rule(text: str) -> Rule:
    words = text.lower().split()
    days, start, end = frozenset(range(7)), 0, MIDNIGHT
    rest = list(words)
    if rest and _DAYS.fullmatch(rest[0]) and rest[0] != "off":
        days = _days(rest.pop(0), text)
    if rest and ":" in rest[0]:
        start, end = _times(rest.pop(0), text)
    if len(rest) != 1:
        raise UsageError(f"rule {text!r}: expected [DAYS] [HH:MM-HH:MM] and one of a rate, off, open, closed")
    return Rule(days, start, end, _action(rest[0], text))


def _days(word: str, rule: str) -> frozenset[int]:
    found: set[int] = set()
    for part in word.split(","):
        first, _, last = part.partition("-")
        for name in (first, last or first):
            if name not in DAYS:
                raise UsageError(f"rule {rule!r}: expected days like mon-fri or sat,sun, got {name!r}")
        begin, end = DAYS.index(first), DAYS.index(last or first)
        # fri-mon is Friday to Monday: the week has no end.
        found.update((begin + n) % 7 for n in range((end - begin) % 7 + 1))
    return frozenset(found)


def _times(word: str, rule: str) -> tuple[int, int]:
    match = _TIMES.fullmatch(word)
    if match is None:
        raise UsageError(f"rule {rule!r}: expected times like 08:00-20:00, got {word!r}")
    minutes = [int(match[n]) * 60 + int(match[n + 1]) for n in (1, 3)]
    if any(int(match[n]) > 59 for n in (2, 4)) or max(minutes) > MIDNIGHT or minutes[0] == MIDNIGHT:
        raise UsageError(f"rule {rule!r}: expected times from 00:00 to 24:00, got {word!r}")
    if minutes[0] == minutes[1]:
        raise UsageError(f"rule {rule!r}: begins and ends at the same time; for the whole day leave the times out")
    return minutes[0], minutes[1]


def _action(word: str, rule: str) -> Action:
    match word:
        case "off" | "open" | "closed":
            return word
    try:
        rate = parse_rate(word)
    except UsageError as error:
        if "/" in word:
            raise UsageError(f"rule {rule!r}: {error}") from None
        raise UsageError(f"rule {rule!r}: expected a rate ({RATE_FORMS}), open or closed, got {word!r}") from None
    return "off" if rate is None else Limit.of(rate)


def _zone(name: str) -> zoneinfo.ZoneInfo:
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        raise UsageError(
            f"expected a time zone like Europe/Berlin, got {name[:60]!r}; "
            "a host without time zones gets them by: pip install tzdata"
        ) from None


def _spans(rule: Rule, days: list[date], zone: zoneinfo.ZoneInfo) -> list[tuple[int, int]]:
    """Return when a rule holds: (from, until) in ms, in order of time."""
    spans = []
    for day in days:
        if day.weekday() in rule.days:
            last = day if rule.end > rule.start else day + timedelta(days=1)
            span = _moment(day, rule.start, zone), _moment(last, rule.end, zone)
            if span[0] < span[1]:  # all of it may lie within an hour that the clocks skip
                spans.append(span)
    return spans


def _in_force(rules: tuple[Rule, ...], spans: list[list[tuple[int, int]]], moment: int) -> Action:
    for rule, rule_spans in zip(reversed(rules), reversed(spans), strict=True):
        position = bisect.bisect_right(rule_spans, (moment, _FAR)) - 1
        if position >= 0 and moment < rule_spans[position][1]:
            return rule.action
    return "open"


#: After every moment: with it, a search finds the last span that begins at or before one.
_FAR = 10**18


def _moment(day: date, minutes: int, zone: zoneinfo.ZoneInfo) -> int:
    """Return the first moment, in ms, at which the clocks of a zone show this time or a later one of that day."""
    naive = datetime(day.year, day.month, day.day) + timedelta(minutes=minutes)
    first, second = (_seconds(naive.replace(tzinfo=zone, fold=fold)) for fold in (0, 1))
    if first <= second:  # an ordinary time, or the first of two
        return first * 1000
    # The clocks skip it. By the rules of `fold`, their change lies between the two readings: search for it.
    before, after = second, first
    offset = datetime.fromtimestamp(after, zone).utcoffset()
    while after - before > 1:
        middle = (before + after) // 2
        if datetime.fromtimestamp(middle, zone).utcoffset() == offset:
            after = middle
        else:
            before = middle
    return after * 1000


def _seconds(moment: datetime) -> int:
    return int(moment.astimezone(UTC).timestamp())
