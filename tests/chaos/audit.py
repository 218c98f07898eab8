"""The audit: from what was recorded to the laws that were broken, one pure function a law.

Where a law speaks of time, what it allows is the law's own bound and a second for the machine (`MARGIN_S`); and it is
asked only of times in which nothing stood in the way, neither a fault nor this machine itself (`weather.py`). Where a
law speaks of order, the server's history is exact and there is no margin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from tests.chaos.evidence import Evidence, Violation, pid_of
from tests.chaos.journal import of_kind
from tests.chaos.ledger import Claim, Entry
from tests.chaos.limits import bucket_excess, deadline_gaps

#: What a busy machine may add to any time: a process waits its turn on two cores behind a dozen others.
MARGIN_S = 1.0

#: Rounding: Redis' clock is read in ms, the journal's in us.
CLOCK_S = 0.005

#: How soon work must go on once nothing is in the way: leases, contact and a probe of the engine, 6 s at most.
RESUME_S = 8.0

ENDS = {
    "answered": {"completed"},
    "JobFailed": {"failed", "completed"},
    "JobCancelled": {"cancelled"},
    "JobExpired": {"expired"},
    "JobInterrupted": {"interrupted"},
}


def g1(evidence: Evidence) -> Iterator[Violation]:
    """An acknowledged submit is never lost while Redis keeps its data."""
    for event in of_kind(evidence.events, "acked"):
        if event["name"] not in evidence.entries:
            yield Violation("G1", event["name"], event.at, "was acknowledged, and never was in the server")
    for event in of_kind(evidence.events, "batch fed"):
        lines = sum(len(evidence.entries.get(f"{event['name']}.{n}", ())) for n in range(1, event["lines"] + 1))
        if event["how"] == "ok" and lines != event["lines"]:
            yield Violation("G1", event["name"], event.at, f"{event['lines']} lines were acknowledged, {lines} came")
    for at, entry in evidence.ledger.vanished:
        yield Violation("G1", entry.name, at, "went without a result")
    for name, entry in _all(evidence):
        if not entry.results and entry.gone_at == float("inf"):
            yield Violation("G1", name, entry.at, "has not ended")
        if any(result.code == "lost" for result in entry.results):
            yield Violation("G1", name, entry.results[0].at, "was lost without a flush")


def g2(evidence: Evidence) -> Iterator[Violation]:
    """Every job runs at least once, unless cancelled, expired or interrupted."""
    ran = {event["name"] for event in of_kind(evidence.events, "run")}
    answered = {event["run"] for event in of_kind(evidence.events, "ran") if event["how"] == "answered"}
    for name, entry in _all(evidence):
        for result in entry.results:
            if result.state == "completed" and result.run not in answered:
                yield Violation("G2", name, result.at, f"is completed by run {result.run!r}, which answered nothing")
            known = entry.batch or name != entry.name
            if result.state == "failed" and result.code != "worker_lost" and known and name not in ran:
                yield Violation("G2", name, result.at, f"failed ({result.code}) and never ran")


def g3(evidence: Evidence) -> Iterator[Violation]:
    """At most one attempt's result is accepted, and every write of a worker is fenced."""
    for at, job in evidence.ledger.doubles:
        yield Violation("G3", job, at, "was added twice")
    for at, claim, taker in evidence.ledger.stolen:
        yield Violation("G3", claim.entry.name, at, f"{taker} renewed what {claim.consumer} had claimed")
    for name, entry in _all(evidence):
        if len(entry.results) > 1:
            yield Violation("G3", name, entry.results[1].at, f"has {len(entry.results)} results")
        for result in entry.results:
            if result.state == "completed":
                held = (pid_of(result.holder), entry.lane, entry.id, result.delivery) if result.holder else None
                if evidence.run_by.get(result.run, held) != held:
                    text = f"took the answer of {evidence.run_by[result.run]}, while {held} held it"
                    yield Violation("G3", name, result.at, text)


def g4(evidence: Evidence) -> Iterator[Violation]:
    """A job is never given to another worker while its own renews the lease; time without Redis does not count."""
    # A server that hangs for less than half a lease breaks no contact: its workers renew in time all the same.
    backs = of_kind(evidence.events, "redis back")
    returns = [event.at for event in backs if event["killed"] or event["away"] > evidence.lease_s / 2]
    for claim in evidence.ledger.claims:
        if claim.how == "stolen":
            yield Violation("G4", claim.entry.name, claim.over_at, f"was taken from {claim.consumer}, who held it")
        if claim.how != "reclaimed":
            continue
        held = claim.over_at - claim.touched_at
        back = max((at for at in returns if at <= claim.over_at), default=0.0)
        if held < evidence.lease_s - CLOCK_S:
            text = f"was reclaimed {held:.3f} s after {claim.consumer} renewed it"
            yield Violation("G4", claim.entry.name, claim.over_at, text)
        if claim.over_at - back < max(evidence.lease_s, evidence.contact_s) - 2 * CLOCK_S:
            text = f"was reclaimed {claim.over_at - back:.3f} s after Redis was back"
            yield Violation("G4", claim.entry.name, claim.over_at, text)
        if _lived_well(evidence, claim):
            text = f"was reclaimed from {claim.consumer}, which lived and was not disturbed"
            yield Violation("G4", claim.entry.name, claim.over_at, text)


def g5(evidence: Evidence) -> Iterator[Violation]:
    """After SIGKILL of a worker its jobs are others' within lease and sweep interval."""
    within = evidence.lease_s * 1.25 + MARGIN_S
    for life, killed in _ended_by(evidence, "SIGKILL"):
        latest = killed + within
        if not evidence.weather.fair_somewhere(killed - evidence.lease_s, latest):
            continue
        for claim in evidence.ledger.claims:
            if claim.consumer == life and claim.at <= killed < claim.over_at and claim.over_at > latest:
                text = f"was {claim.over_at - killed:.2f} s with {life}, which was dead"
                yield Violation("G5", claim.entry.name, claim.over_at, text)


def g6(evidence: Evidence) -> Iterator[Violation]:
    """SIGTERM loses nothing and costs no attempt: what the worker held it ended or handed back itself."""
    downs = {event["pid"]: event for event in of_kind(evidence.events, "worker down")}
    for life, told in _ended_by(evidence, "SIGTERM"):
        down, place = downs.get(pid_of(life)), evidence.weather.place_of(life)
        if down is None or place is None or _disturbed_drain(evidence, place, told, down.at):
            continue
        if down["status"] != 0:
            yield Violation("G6", life, down.at, f"ended with status {down['status']} after SIGTERM")
        for claim in evidence.ledger.claims:
            if claim.consumer == life and claim.at <= down.at and claim.over_at > told and claim.how == "reclaimed":
                yield Violation("G6", claim.entry.name, claim.over_at, f"lapsed with {life}, which was told to end")


def g7(evidence: Evidence) -> Iterator[Violation]:
    """A job in flight at 3 deaths is a dead letter, and no other is for it; a worker runs one suspect at a time."""
    for claim in evidence.ledger.claims:
        if claim.other_suspects:
            text = f"{claim.consumer} runs it, a suspect, beside {', '.join(claim.other_suspects)}"
            yield Violation("G7", claim.entry.name, claim.at, text)
    for name, entry in _all(evidence):
        deaths = sum(claim.how in ("reclaimed", "crashed") and not claim.verdict for claim in entry.claims)
        for result in entry.results:
            last = result.code == "worker_lost" and entry.claims and not entry.claims[-1].verdict
            if result.code == "worker_lost" and deaths + bool(last) < 3:
                yield Violation("G7", name, result.at, f"is a dead letter after {deaths + bool(last)} deaths")
        if deaths > 3:
            yield Violation("G7", name, entry.claims[-1].at, f"was in flight at {deaths} deaths")


def g8(evidence: Evidence) -> Iterator[Violation]:
    """Over any time the bucket lets start at most rate * t + burst; deadline starts come on top."""
    for at, text in bucket_excess(evidence.ledger):
        yield Violation("G8", "bucket", at, text)


def g9(evidence: Evidence) -> Iterator[Violation]:
    """While a claimable interactive job waits, no batch job is claimed, except by the deadline."""
    for claim in evidence.ledger.claims:
        if claim.chat_waited:
            text = f"was claimed by {claim.consumer} while chat waited: {', '.join(claim.chat_waited[:5])}"
            yield Violation("G9", claim.entry.name, claim.at, text)


def g10(evidence: Evidence) -> Iterator[Violation]:
    """While batch waits, at most the deadline passes between two starts that are left to finish."""
    for begins, ends, deadline in deadline_gaps(evidence.ledger):
        latest = begins + deadline + 1.1 + MARGIN_S
        if ends > latest and evidence.weather.fair_somewhere(begins, ends):
            yield Violation("G10", "batch", ends, f"waited {ends - begins:.2f} s for a start, deadline {deadline:g} s")


def g11(evidence: Evidence) -> Iterator[Violation]:
    """A drained queue holds only config, keys, dead letters, and keys with a TTL."""
    for key in evidence.left:
        yield Violation("G11", key, 0.0, "is left in Redis without a TTL")


def g12(evidence: Evidence) -> Iterator[Violation]:
    """Whatever happened to Redis, workers serve again by themselves."""
    for event in of_kind(evidence.events, "worker down"):
        if not event["expected"]:
            yield Violation("G12", f"worker {event['pid']}", event.at, f"ended by itself, status {event['status']}")
    claims = sorted(claim.at for claim in evidence.ledger.claims)
    added = [entry.at for entry in evidence.ledger.entries if not entry.batch]
    for life in evidence.weather.lives:
        for begins in (at for at in added if life.begins <= at):
            ends = begins + RESUME_S
            if any(begins <= at <= ends for at in claims):
                continue
            if evidence.weather.fair(life.place, begins, ends) and life.ends >= ends:
                yield Violation("G12", life.worker, begins, f"nothing was claimed for {RESUME_S:g} s")
                break


def g13(evidence: Evidence) -> Iterator[Violation]:
    """A waiter always returns, and with the truth."""
    acked = {event["name"]: event for event in of_kind(evidence.events, "acked")}
    for event in of_kind(evidence.events, "waits in vain", "producer died"):
        yield Violation("G13", event.get("name", "a producer"), event.at, f"{event.kind} {event.get('error', '')}")
    for event in of_kind(evidence.events, "told"):
        name, how = event["name"], event["how"]
        entries = evidence.entries.get(name, [])
        states = {result.state for entry in entries for result in entry.results}
        if how == "JobLost":
            if not evidence.flushed_between(acked[name].at, event.at):
                yield Violation("G13", name, event.at, "its waiter was told that it is lost, and nothing was flushed")
        elif not states & ENDS[how] and not (how == "JobInterrupted" and acked[name]["cls"] == "batch"):
            yield Violation("G13", name, event.at, f"its waiter was told {how}, its record says {states or 'nothing'}")


def g14(evidence: Evidence) -> Iterator[Violation]:
    """A cancelled queued job never starts; a cancelled running one is aborted in the engine within 1 s."""
    yield from _began_doomed(evidence, "cancelled", "G14")
    for claim in evidence.ledger.claims:
        over = next((result for result in claim.entry.results if result.at < claim.at), None)
        if over is not None:
            yield Violation("G14", claim.entry.name, claim.at, f"was claimed after it had ended as {over.state}")
    runs = {event["run"]: event for event in of_kind(evidence.events, "run")}
    ran = {event["run"]: event.at for event in of_kind(evidence.events, "ran")}
    for event in of_kind(evidence.events, "cancel", "batch cancelled"):
        name = event["name"]
        for run, begun in runs.items():
            if begun["name"] != name and not begun["name"].startswith(f"{name}."):
                continue
            latest = event.at + 1 + MARGIN_S
            late = begun.at < event.at and ran.get(run, latest + 1) > latest
            calm = evidence.weather.fair(int(begun.who[1:]), event.at - 1, latest)
            if event.get("verdict", "signalled") == "signalled" and late and calm:
                yield Violation("G14", begun["name"], event.at, f"run {run} went on after its cancel")


def g15(evidence: Evidence) -> Iterator[Violation]:
    """A full queue refuses new jobs."""
    for at, cls, held, cap in evidence.ledger.overfull:
        yield Violation("G15", f"class {cls}", at, f"a job was taken while there were {held}, the cap is {cap}")


def g16(evidence: Evidence) -> Iterator[Violation]:
    """Every line of a batch ends in exactly one result line or one error line."""
    for batch, (lines, results) in evidence.ledger.ended.items():
        if lines != results:
            yield Violation("G16", batch, 0.0, f"ended with {results} results for {lines} lines")
    for event in of_kind(evidence.events, "batch over"):
        lines, _ = evidence.ledger.ended.get(event["name"], (0, 0))
        if event["status"] and event["completed"] + event["failed"] != lines:
            text = f"counts {event['completed']} completed and {event['failed']} failed of {lines} lines"
            yield Violation("G16", event["name"], event.at, text)
    for event in of_kind(evidence.events, "collected"):
        ids = Counter(event["ids"])
        lines, _ = evidence.ledger.ended.get(event["name"], (0, 0))
        if len(ids) != lines or ids.total() != lines:
            text = f"its file has {ids.total()} lines with {len(ids)} ids, the batch has {lines}"
            yield Violation("G16", event["name"], event.at, text)


def g17(evidence: Evidence) -> Iterator[Violation]:
    """A line that waits again keeps its place before lines that have not started."""
    for claim in evidence.ledger.claims:
        if claim.passed:
            text = f"was claimed by {claim.consumer} before {', '.join(claim.passed[:5])}, which waited again"
            yield Violation("G17", claim.entry.name, claim.at, text)


def g18(evidence: Evidence) -> Iterator[Violation]:
    """An interactive job that has sent a delta is not run a second time."""
    yield from _began_doomed(evidence, "interrupted", "G18")
    entries = {(entry.lane, entry.id): entry for entry in evidence.ledger.entries}
    for event in of_kind(evidence.events, "began"):
        entry = entries.get((event["lane"], event["entry"]))
        if entry is not None and entry.cls == "i" and event.at > entry.delta_at + CLOCK_S:
            yield Violation("G18", entry.name, event.at, "was begun again after its first delta")


#: Every law, by name.
LAWS: dict[str, Callable[[Evidence], Iterator[Violation]]] = {
    law.__name__.upper(): law
    for law in (g1, g2, g3, g4, g5, g6, g7, g8, g9, g10, g11, g12, g13, g14, g15, g16, g17, g18)
}


def judged_kills(evidence: Evidence) -> tuple[int, int]:
    """Return how many workers were killed, and after how many of these it could be said how soon (G5)."""
    kills = [killed for _, killed in _ended_by(evidence, "SIGKILL")]
    within = evidence.lease_s * 1.25 + MARGIN_S
    return len(kills), sum(evidence.weather.fair_somewhere(at - evidence.lease_s, at + within) for at in kills)


def audit(evidence: Evidence) -> list[Violation]:
    """Return every law that was broken, in the order of time."""
    found = [violation for law in LAWS.values() for violation in law(evidence)]
    return sorted(found, key=lambda violation: violation.at)


def _all(evidence: Evidence) -> Iterator[tuple[str, Entry]]:
    return ((name, entry) for name, entries in evidence.entries.items() for entry in entries)


def _ended_by(evidence: Evidence, number: str) -> Iterator[tuple[str, float]]:
    """Iterate over the workers that were sent a signal, and when."""
    lives = {life.pid: life.worker for life in evidence.weather.lives}
    for event in of_kind(evidence.events, "signal"):
        if event["number"] == number and event["pid"] in lives:
            yield lives[event["pid"]], event.at


def _lived_well(evidence: Evidence, claim: Claim) -> bool:
    """Whether a worker lived and was not disturbed from its claim to the moment at which it was reclaimed from."""
    place = evidence.weather.place_of(claim.consumer)
    life = next((life for life in evidence.weather.lives if life.worker == claim.consumer), None)
    if place is None or life is None or life.ends < claim.over_at or life.begins > claim.at:
        return False
    return evidence.weather.fair(place, claim.touched_at - evidence.lease_s, claim.over_at, awake=False)


def _disturbed_drain(evidence: Evidence, place: int, told: float, down: float) -> bool:
    """Whether anything but the SIGTERM itself, or a SIGKILL after it, stood in the way of a drain."""
    signals = [event for event in of_kind(evidence.events, "signal") if event["place"] == place]
    again = any(told < event.at <= down for event in signals)
    drains = {event.at for event in of_kind(evidence.events, "fault") if event["fault"] == "drain"}
    return again or not evidence.weather.fair(place, told - 1, down, awake=False, but=drains)


def _began_doomed(evidence: Evidence, verdict: str, law: str) -> Iterator[Violation]:
    """Find attempts that a slot began with although the job was to be ended."""
    for claim in evidence.ledger.claims:
        fence = (pid_of(claim.consumer), claim.entry.lane, claim.entry.id, claim.number)
        if claim.verdict == verdict and fence in evidence.began:
            yield Violation(law, claim.entry.name, claim.at, f"was {verdict}, and {claim.consumer} began with it")
