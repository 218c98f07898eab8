"""The story: everything that any party saw of one job, in order, with the faults of that time.

A violation names a job, a line, a batch or a worker; its story is what a person reads to find out why.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.chaos.evidence import Evidence, Violation
from tests.chaos.journal import Event
from tests.chaos.ledger import Entry

#: What a story shows of the time around its job, in seconds.
AROUND_S = 4.0

#: Kinds of events that belong to every story of their time.
EVERYBODYS = {"fault", "fault over", "signal", "worker up", "worker down", "engine up", "poisoned", "redis back"}

#: A story is read by a person: a batch's is not told line by line.
MOST_LINES = 150


def story(evidence: Evidence, violation: Violation) -> str:
    """Tell all that is known of what a violation is about."""
    subject = violation.subject
    names = {job: name for name, job in evidence.job_of.items()}
    subject = names.get(subject, subject)
    entries = evidence.entries.get(subject, [])
    job = evidence.job_of.get(subject, subject)
    told = [*(moment for entry in entries for moment in _of_entry(entry))]
    told += [(event.at, str(event)) for event in evidence.events if _is_about(event, subject, job, entries)]
    times = [at for at, _ in told] or [violation.at]
    begins, ends = min(times) - AROUND_S, max(times) + AROUND_S
    told += [(e.at, str(e)) for e in evidence.events if e.kind in EVERYBODYS and begins <= e.at <= ends]
    begin = evidence.events[0].at if evidence.events else 0.0
    lines = [f"  {at - begin:9.3f} {text}" for at, text in sorted(told)]
    left_out = [f"  ... and {len(lines) - MOST_LINES} more"] if len(lines) > MOST_LINES else []
    return "\n".join([str(violation), *lines[:MOST_LINES], *left_out])


def _of_entry(entry: Entry) -> Iterator[tuple[float, str]]:
    yield entry.at, f"redis: {entry.lane} {entry.id} submitted as {entry.key}"
    for claim in entry.claims:
        verdict = f", {claim.verdict}" if claim.verdict else ""
        yield claim.at, f"redis: delivery {claim.number} to {claim.consumer} ({claim.why}{verdict})"
        if claim.touched_at > claim.at:
            yield claim.touched_at, f"redis: delivery {claim.number} last renewed"
        if claim.how != "open":
            yield claim.over_at, f"redis: delivery {claim.number} {claim.how}"
    if entry.delta_at < float("inf"):
        yield entry.delta_at, "redis: first delta"
    for result in entry.results:
        by = f" by {result.holder}/{result.delivery}" if result.holder else ""
        yield result.at, f"redis: {result.state} {result.code} {result.run}{by}"


def _is_about(event: Event, subject: str, job: str, entries: list[Entry]) -> bool:
    if event.get("name") == subject or event.get("worker") == subject:
        return True
    return event.get("key") == job or any(
        event.get("lane") == entry.lane and event.get("entry") == entry.id for entry in entries
    )
