"""The audit of a run on a set of servers: the laws, held against what everybody was told and what is left at the end.

A failover takes back what replicas had not heard of, so no server's file is the history of a set. Judged are:

    G1   every acknowledged job and batch has an end that its owner was told; lost are only those of a moment in which
         Redis may lose writes (docs/redis.md), and these are counted
    G2   an answer is that of a run of this very job
    G3   a job has one answer: what its owner was told is what its record says
    G11  no key without a TTL is left that no queue may leave
    G12  no worker ends by itself, and after each fault of Redis a job that is submitted then is answered
    G13  nobody waits in vain
    G16  a batch that has ended has one result for each line, in Redis and in each collector's file

Not judged, for want of a history: the order of claims (G9, G17), leases and their times (G4, G5, G6), the bucket and
the deadline (G8, G10), suspects (G7), cancels (G14), caps (G15), and that an answer is not begun again (G18). Those are
properties of the scripts, which are the same on every topology.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from tests.chaos.evidence import Evidence, Violation
from tests.chaos.journal import Event, of_kind

#: Faults in which a primary may be replaced.
REPLACING = ("kill-redis", "freeze-redis", "fail-over")

#: Writes of this long before a fault may not have reached a replica of a machine that is busy.
LAG_S = 1.0

#: Everybody has followed a promotion after this long: sentinels are asked once a second, and a command finds out in 5 s
#: that its server stands still.
FOLLOW_S = 7.0

#: After a fault of Redis a job is answered within this: contact, a lease, the probe of an engine that was away as well.
SERVE_S = 30.0


def g1(evidence: Evidence) -> Iterator[Violation]:
    """An acknowledged submit is lost only where Redis may lose it."""
    for name, at, _ in losses(evidence):
        if not may_lose(evidence, name, at):
            yield Violation("G1", name, at, "was acknowledged and is lost, and Redis had no reason to lose it")


def g2(evidence: Evidence) -> Iterator[Violation]:
    """An answer is that of a run of this very job."""
    runs = {event["run"]: event["name"] for event in of_kind(evidence.events, "run")}
    for event in of_kind(evidence.events, "told"):
        if event["how"] == "answered" and runs.get(event["run"]) != event["name"]:
            text = f"was given the answer {event['run']!r} of {runs.get(event['run'], 'nobody')}"
            yield Violation("G2", event["name"], event.at, text)


def g3(evidence: Evidence) -> Iterator[Violation]:
    """What the owner of a job was told is what its record says at the end."""
    kept = {event["job"]: event for event in of_kind(evidence.events, "job left")}
    for event in of_kind(evidence.events, "told"):
        record = kept.get(evidence.job_of.get(event["name"], ""))
        if event["how"] != "answered" or record is None or may_lose(evidence, event["name"], event.at):
            continue  # an accepted result may be taken back with everything else
        if (record["state"], record["run"]) != ("completed", event["run"]):
            text = f"was told the answer {event['run']}, its record says {record['state']} {record['run']}"
            yield Violation("G3", event["name"], event.at, text)


def g11(evidence: Evidence) -> Iterator[Violation]:
    """A drained queue holds only config, keys, dead letters, and keys with a TTL."""
    for key in evidence.left:
        yield Violation("G11", key, 0.0, "is left in Redis without a TTL")


def g12(evidence: Evidence) -> Iterator[Violation]:
    """Whatever happened to Redis, workers serve again by themselves."""
    for event in of_kind(evidence.events, "worker down"):
        if not event["expected"]:
            yield Violation("G12", f"worker {event['pid']}", event.at, f"ended by itself, status {event['status']}")
    asked = max((event.at for event in of_kind(evidence.events, "asked")), default=0.0)
    for fault, over, took in resumptions(evidence):
        if asked > over + FOLLOW_S and (took is None or took > SERVE_S):  # else nobody was there to be served
            text = "nothing was answered any more" if took is None else f"served again after {took:.1f} s"
            yield Violation("G12", fault["fault"], fault.at, text)


def g13(evidence: Evidence) -> Iterator[Violation]:
    """A waiter always returns."""
    for event in of_kind(evidence.events, "waits in vain", "producer died"):
        yield Violation("G13", event.get("name", "a producer"), event.at, f"{event.kind} {event.get('error', '')}")


def g16(evidence: Evidence) -> Iterator[Violation]:
    """Every line of a batch ends in exactly one result line or one error line."""
    whole = {event["name"]: event["lines"] for event in of_kind(evidence.events, "batch fed") if event["how"] == "ok"}
    for event in of_kind(evidence.events, "batch over"):
        lines = whole.get(event["name"])
        if lines is not None and event["status"] and event["completed"] + event["failed"] != lines:
            text = f"counts {event['completed']} completed and {event['failed']} failed of {lines} lines"
            yield Violation("G16", event["name"], event.at, text)
    for event in of_kind(evidence.events, "collected"):
        ids = Counter(event["ids"])
        if len(ids) != ids.total() or len(ids) != whole.get(event["name"], len(ids)):
            text = f"its file has {ids.total()} lines with {len(ids)} ids, the batch has {whole.get(event['name'])}"
            yield Violation("G16", event["name"], event.at, text)
    for event in of_kind(evidence.events, "batch left"):
        if event["ended"] and sorted(event["lines"]) != list(range(1, event["total"] + 1)):
            text = f"ended, and has results for {len(event['lines'])} of {event['total']} lines"
            yield Violation("G16", event["name"], event.at, text)


#: The laws that can be judged, by name.
LAWS: dict[str, Callable[[Evidence], Iterator[Violation]]] = {
    law.__name__.upper(): law for law in (g1, g2, g3, g11, g12, g13, g16)
}


def audit_told(evidence: Evidence) -> list[Violation]:
    """Return every law that was broken, in the order of time."""
    return sorted((found for law in LAWS.values() for found in law(evidence)), key=lambda violation: violation.at)


def losses(evidence: Evidence) -> Iterator[tuple[str, float, str]]:
    """Iterate over what was acknowledged and is lost: name, when its owner was told, job or batch."""
    acknowledged = {event["name"] for event in of_kind(evidence.events, "acked")}
    for event in of_kind(evidence.events, "told"):
        if event["how"] == "JobLost" and event["name"] in acknowledged:
            yield event["name"], event.at, "job"
    for event in of_kind(evidence.events, "batch over"):
        if not event["status"]:
            yield event["name"], event.at, "batch"


def may_lose(evidence: Evidence, name: str, told_at: float) -> bool:
    """Whether Redis may have lost a job or a batch between its beginning and the word to its owner.

    Either all was flushed meanwhile, or one of the two moments is near a change of the primary: what was written then
    may be known to the old one alone.
    """
    begun = next(
        (e.at for e in evidence.events if e.kind in ("acked", "batch opened") and e["name"] == name), float("-inf")
    )
    flushes = [event.at for event in of_kind(evidence.events, "fault") if event["fault"] == "flush-all"]
    if any(begun - LAG_S <= at <= told_at for at in flushes):
        return True
    return any(begins <= at <= ends for begins, ends in uncertain(evidence) for at in (begun, told_at))


def uncertain(evidence: Evidence) -> list[tuple[float, float]]:
    """Return the times in which what is acknowledged may be thrown away."""
    return [(fault.at - LAG_S, over + FOLLOW_S) for fault, over in _faults_of_redis(evidence) if _replaces(fault)]


def resumptions(evidence: Evidence) -> Iterator[tuple[Event, float, float | None]]:
    """Iterate over the faults of Redis: when each was over, and after how long from its begin a job that was submitted
    since then was answered; None: never."""
    acked = {event["name"]: event.at for event in of_kind(evidence.events, "acked")}
    answered = [(acked[e["name"]], e.at) for e in of_kind(evidence.events, "told") if e["how"] == "answered"]
    for fault, over in _faults_of_redis(evidence):
        since = [told for begun, told in answered if begun > fault.at]
        yield fault, over, min(since) - fault.at if since else None


def _faults_of_redis(evidence: Evidence) -> Iterator[tuple[Event, float]]:
    overs = list(of_kind(evidence.events, "fault over"))
    for fault in of_kind(evidence.events, "fault"):
        if _replaces(fault):
            key = fault["planned"], fault["fault"]
            yield fault, next((e.at for e in overs if (e["planned"], e["fault"]) == key), fault.at)


def _replaces(fault: Event) -> bool:
    return fault["fault"] in REPLACING
