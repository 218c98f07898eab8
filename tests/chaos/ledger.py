"""The ledger: what became of each job, from its submit to its end, as the server's history tells it.

Values only: `replay.py` fills them in, `audit.py` judges them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: In `back`, what is below is a line number: at once. Above it is a time in ms.
LEAST_TIME_MS = 1e11

NEVER = float("inf")


@dataclass(eq=False, slots=True)
class Claim:
    """One delivery of an entry to a consumer, from its claim to how it ended (`open` at the end of the history)."""

    entry: Entry
    number: int
    consumer: str
    at: float
    verdict: str = ""
    step: int = 0
    """The number of the step that claimed it: steps follow each other even where their times are the same."""
    why: str = "bucket"
    """bucket, deadline, or protected: not to be preempted, because it was three times; started by either."""
    first: bool = False
    touched_at: float = 0.0
    """When it was claimed or last renewed."""
    over_at: float = NEVER
    how: str = "open"
    """ended, retried, crashed (a retry after the engine died), back, preempted, reclaimed, stolen, flushed."""
    chat_waited: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    other_suspects: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """One accepted end of a job: its state and code, the run that its answer is from, and who held it then."""

    at: float
    state: str
    code: str = ""
    run: str = ""
    holder: str = ""
    delivery: int = 0


@dataclass(eq=False, slots=True)
class Entry:
    """One job or line in its lane, from its submit to its end."""

    lane: str
    id: str
    key: str
    at: float
    cost: int = 1
    expires: float = NEVER
    era: int = 0
    claims: list[Claim] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    pending: Claim | None = None
    due: float | None = None
    crashes: int = 0
    preemptions: int = 0
    attempts: int = 0
    flags: str = "-"
    delta_at: float = NEVER
    gone_at: float = NEVER

    @property
    def cls(self) -> str:
        """Its class: i or b."""
        return "i" if self.lane.startswith("i:") else "b"

    @property
    def batch(self) -> str:
        """The batch whose line it is; empty for a single job."""
        return self.lane.removeprefix("batch:") if self.lane.startswith("batch:") else ""

    @property
    def name(self) -> str:
        """The line's name, as its batch and number; the id of a single job."""
        return f"{self.batch}.{self.id.partition('-')[0]}" if self.batch else self.key

    def waits(self, now: float) -> bool:
        """Whether it could be claimed, as far as it is concerned."""
        due = self.due is None or self.due < LEAST_TIME_MS or self.due / 1000 <= now
        fresh = self.due is not None or not self.claims
        return self.pending is None and self.gone_at == NEVER and due and fresh and self.expires > now


@dataclass(frozen=True, slots=True)
class Moment:
    """A change of something that holds until the next one."""

    at: float
    value: float


@dataclass(slots=True)
class Ledger:
    """Everything that happened, in the order in which it did."""

    entries: list[Entry] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    flushes: list[float] = field(default_factory=list)
    doubles: list[tuple[float, str]] = field(default_factory=list)
    """Jobs that were added a second time."""
    vanished: list[tuple[float, Entry]] = field(default_factory=list)
    """Entries that went without a result, and without a flush."""
    stolen: list[tuple[float, Claim, str]] = field(default_factory=list)
    """Renewals of what somebody else had claimed: when, whose claim, by whom."""
    overfull: list[tuple[float, str, int, int]] = field(default_factory=list)
    """Submits above the cap: when, class, jobs then, cap."""
    rates: list[tuple[int, float, float, bool]] = field(default_factory=list)
    """From which step on which rate (inf: none), burst, and whether LLM tokens are counted."""
    deadlines: list[Moment] = field(default_factory=list)
    batch_waits: list[Moment] = field(default_factory=list)
    """From when on batch could be claimed (1) or not (0)."""
    ended: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Batches that ended: lines, and results."""
