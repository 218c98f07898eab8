"""The replay: llmq's books, kept a second time from the effects of its scripts alone.

Step by step it follows what waits, what runs and by whose hands, what came back and what ended as what, and notes down
what only that moment shows: which chat waited when batch was claimed, who was passed over, who ran beside a suspect.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from tests.chaos.engine import run_of
from tests.chaos.history import Command, Step, option
from tests.chaos.ledger import NEVER, Claim, Entry, Ledger, Moment, Result

PREFIX = "llmq:{default}:"


class Replay:
    """Replays steps into a ledger."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._at = 0.0
        self._step = 0
        self._era = 0
        self._config: dict[str, str] = {}
        self._lanes: dict[str, str] = {}
        self._live: dict[str, dict[str, Entry]] = defaultdict(dict)
        self._jobs: dict[str, Entry] = {}
        self._lines: dict[str, Entry] = {}
        self._touched: dict[Entry, list[str]] = {}
        self._claimed: list[Claim] = []
        self._renewed: dict[Claim, float] = {}
        self._settings_changed()

    def run(self, steps: Iterable[Step]) -> Ledger:
        """Replay all steps."""
        for step in steps:
            self._at = step.at
            self._step += 1
            self._touched, self._claimed, self._renewed = {}, [], {}
            added: dict[str, int] = defaultdict(int)
            for command in step.commands:
                self._apply(command, added)
            self._settle()
            self._look_around()
            self._check_caps(added)
        return self.ledger

    # --- commands -------------------------------------------------------------------------------------------------

    def _apply(self, command: Command, added: dict[str, int]) -> None:
        verb = command[0].upper()
        if verb in ("FLUSHALL", "FLUSHDB"):
            self._flush()
            return
        key = command[1].removeprefix(PREFIX)
        if key.startswith("lane:"):
            self._apply_to_lane(verb, key.removeprefix("lane:"), command, added)
        elif verb == "DEL":
            for name in command[1:]:
                self._drop_lane(name.removeprefix(PREFIX))
        elif key == "tries" and verb == "HSET":
            self._note_tries(command)
        elif key == "config":
            self._configure(verb, command)
        elif key == "lanes":
            self._note_lane(verb, command)
        elif key == "starts" and verb == "ZADD":
            self._note_start(float(command[2]), command[3])
        elif key.startswith("job:") and verb == "HSET":
            self._note_job(key.removeprefix("job:"), _pairs(command[2:]))
        elif key.endswith(":results") and verb == "XADD":
            self._note_line(key.removeprefix("b:").removesuffix(":results"), _pairs(_after_id(command)))
        elif key.startswith("inbox:") and verb == "XADD":
            self._note_delta(_pairs(_after_id(command)))
        elif key.startswith("b:") and verb == "HSET" and "ended_at" in command:
            self._note_batch_end(key.removeprefix("b:"))

    def _apply_to_lane(self, verb: str, lane: str, command: Command, added: dict[str, int]) -> None:
        if verb == "DEL":
            for name in command[1:]:
                self._drop_lane(name.removeprefix(PREFIX))
        elif lane.endswith(":back"):
            lane = lane.removesuffix(":back")
            for entry in (self._live[lane].get(word) for word in command[2:]):
                if entry is not None:
                    entry.due = float(command[2]) if verb == "ZADD" else None
                    self._touched.setdefault(entry, []).append("back" if verb == "ZADD" else "taken")
        elif verb == "XADD":
            self._add(lane, command, added)
        elif verb == "XCLAIM":
            if entry := self._live[lane].get(command[5]):
                self._claim(entry, command[3], int(option(command, "RETRYCOUNT")))
        elif verb in ("XACK", "XDEL"):
            for word in command[3 if verb == "XACK" else 2 :]:
                if entry := self._live[lane].get(word):
                    self._touched.setdefault(entry, []).append(verb)

    def _add(self, lane: str, command: Command, added: dict[str, int]) -> None:
        fields = _pairs(command[3:])
        expires = float(fields.get("x", NEVER)) / 1000
        entry = Entry(lane, command[2], fields.get("k", ""), self._at, int(fields.get("c", 1)), expires, self._era)
        if not entry.batch:
            if entry.key in self._jobs:
                self.ledger.doubles.append((self._at, entry.key))
            self._jobs[entry.key] = entry
        else:
            self._lines[entry.name] = entry
        self._live[lane][entry.id] = entry
        self.ledger.entries.append(entry)
        added[entry.cls] += 1

    def _claim(self, entry: Entry, consumer: str, number: int) -> None:
        held = entry.pending
        if held is not None and held.number == number:
            if held.consumer == consumer:
                self._renewed.setdefault(held, held.touched_at)
                held.touched_at = self._at
            self._touched.setdefault(entry, []).append(f"claimed by {consumer}")
            return
        claim = Claim(entry, number, consumer, self._at, self._verdict(entry), first=not entry.claims)
        claim.touched_at, claim.step = self._at, self._step
        claim.passed = self._passed_over(entry, claim)
        claim.other_suspects = self._suspects_of(consumer) if entry.crashes and not claim.verdict else ()
        if held is not None:  # nobody had acknowledged it: a doomed one that is reclaimed, or stolen
            swept = any(mark.startswith("claimed by") for mark in self._touched.get(entry, []))
            self._end(held, "reclaimed" if swept else "stolen")
        entry.pending, entry.due = claim, None
        entry.claims.append(claim)
        self.ledger.claims.append(claim)
        self._claimed.append(claim)
        self._touched.setdefault(entry, []).append("delivered")

    def _verdict(self, entry: Entry) -> str:
        if entry.flags == "x" or self._state(entry.lane) == "x":
            return "cancelled"
        if entry.flags == "s":
            return "interrupted"
        if entry.expires <= self._at:
            return "expired"
        return "dead" if entry.crashes >= 3 else ""

    def _note_tries(self, command: Command) -> None:
        for name, text in _pairs(command[2:]).items():
            lane, _, word = name.rpartition("|")
            if entry := self._live[lane].get(word):
                _, attempts, crashes, preemptions, flags = text.split(" ", 4)
                now = int(attempts), int(crashes), int(preemptions)
                marks = self._touched.setdefault(entry, [])
                marks += ["retry"] * (now[0] > entry.attempts) + ["crash"] * (now[1] > entry.crashes)
                marks += ["preempt"] * (now[2] > entry.preemptions)
                (entry.attempts, entry.crashes, entry.preemptions), entry.flags = now, flags

    def _note_start(self, score: float, member: str) -> None:
        lane, _, word = member.rpartition("|")
        entry = self._live[lane].get(word)
        if entry and entry.pending in self._claimed and score > 0:
            entry.pending.why = "deadline" if entry.preemptions < 3 else "protected"

    def _note_job(self, job: str, fields: dict[str, str]) -> None:
        if "state" in fields and (entry := self._jobs.get(job)):
            self._note_result(entry, fields["state"], fields.get("code", ""), fields.get("body", ""))

    def _note_line(self, batch: str, fields: dict[str, str]) -> None:
        if entry := self._lines.get(f"{batch}.{fields['n']}"):
            self._note_result(entry, fields["s"], fields.get("e", ""), fields.get("b", ""))

    def _note_result(self, entry: Entry, state: str, code: str, body: str) -> None:
        held = entry.pending
        result = Result(self._at, state, code, run_of(body.encode()) if state == "completed" else "")
        if held is not None:
            result = Result(self._at, state, code, result.run, held.consumer, held.number)
        entry.results.append(result)

    def _note_delta(self, fields: dict[str, str]) -> None:
        if fields.get("t") == "d" and (entry := self._jobs.get(fields.get("j", ""))):
            entry.delta_at = min(entry.delta_at, self._at)

    def _note_batch_end(self, batch: str) -> None:
        lines = [entry for entry in self.ledger.entries if entry.batch == batch and entry.era == self._era]
        self.ledger.ended[batch] = (len(lines), sum(len(line.results) for line in lines))

    # --- settings and lanes -----------------------------------------------------------------------------------------

    def _configure(self, verb: str, command: Command) -> None:
        if verb == "HDEL":
            for name in command[2:]:
                self._config.pop(name, None)
        else:
            self._config.update(_pairs(command[2:]))
        self._settings_changed()

    def _settings_changed(self) -> None:
        rate = float(self._config.get("rate", NEVER))
        burst = float(self._config.get("burst") or max(1.0, rate))
        terms = (rate, burst, self._config.get("unit") == "tok")
        if not self.ledger.rates or self.ledger.rates[-1][1:] != terms:
            self.ledger.rates.append((self._step, *terms))
        deadline = float(self._config.get("deadline", 30_000)) / 1000
        if not self.ledger.deadlines or self.ledger.deadlines[-1].value != deadline:
            self.ledger.deadlines.append(Moment(self._at, deadline))

    def _note_lane(self, verb: str, command: Command) -> None:
        if verb == "HDEL":
            for lane in command[2:]:
                self._lanes.pop(lane, None)
        elif verb == "HSET" or command[2] not in self._lanes:
            self._lanes.update(_pairs(command[2:]))

    def _state(self, lane: str) -> str:
        return self._lanes.get(lane, "?")[:1]

    def _open(self, lane: str) -> bool:
        due = int(self._lanes.get(lane, "|0").rpartition("|")[2])
        return self._state(lane) == "+" and not 0 < due <= self._at * 1000

    # --- ends -------------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """See what the step did to each entry that it touched, as a whole."""
        for entry, marks in self._touched.items():
            held = entry.pending
            takers = {f"claimed by {held.consumer}" if held else ""}
            if (
                held
                and "XACK" not in marks
                and "delivered" not in marks
                and any(mark.startswith("claimed by") and mark not in takers for mark in marks)
            ):
                self.ledger.stolen.append((self._at, held, marks[0].removeprefix("claimed by ")))
            if "XACK" in marks and held is not None:
                self._end(held, _how(marks))
                if held.how == "reclaimed":  # by its own worker: that XCLAIM was the sweep's, and no renewal
                    held.touched_at = self._renewed.get(held, held.touched_at)
                entry.pending = None
            if "XDEL" in marks:
                self._gone(entry)

    def _gone(self, entry: Entry) -> None:
        self._live[entry.lane].pop(entry.id, None)
        entry.gone_at = self._at
        if not entry.results:
            self.ledger.vanished.append((self._at, entry))

    def _drop_lane(self, name: str) -> None:
        lane = name.removeprefix("lane:")
        for entry in list(self._live.get(lane, {}).values()) if name.startswith("lane:") else []:
            if "XDEL" not in self._touched.get(entry, []):
                self._gone(entry)

    def _end(self, claim: Claim, how: str) -> None:
        claim.over_at, claim.how = self._at, how

    def _flush(self) -> None:
        self.ledger.flushes.append(self._at)
        self._era += 1
        for entries in self._live.values():
            for entry in entries.values():
                entry.gone_at = self._at
                if entry.pending is not None:
                    self._end(entry.pending, "flushed")
        self._live.clear()
        self._jobs.clear()
        self._lines.clear()
        self._lanes.clear()
        self._config.clear()
        self._settings_changed()

    # --- what only this moment shows --------------------------------------------------------------------------------

    def _passed_over(self, entry: Entry, claim: Claim) -> tuple[str, ...]:
        """Return those of the lane that should have gone first: all that wait again, those with a lower place."""
        if claim.verdict:
            return ()
        waiting = (other for other in self._live[entry.lane].values() if other.due is not None and other is not entry)
        place = (NEVER, "") if claim.first else (entry.due or 0.0, entry.id)
        return tuple(
            other.name
            for other in waiting
            if other.waits(self._at - 0.002) and not other.crashes and ((other.due or 0.0), other.id) < place
        )

    def _suspects_of(self, consumer: str) -> tuple[str, ...]:
        held = (entry for lane in self._live.values() for entry in lane.values() if entry.crashes and entry.pending)
        return tuple(e.name for e in held if e.pending and e.pending.consumer == consumer and not e.pending.verdict)

    def _look_around(self) -> None:
        batch = [claim for claim in self._claimed if claim.entry.cls == "b" and not claim.verdict]
        if any(claim.why == "bucket" for claim in batch) and not self._config.get("paused_i"):
            waited = tuple(entry.name for entry in self._claimable("i") if not entry.crashes)
            for claim in batch:
                claim.chat_waited = waited if claim.why == "bucket" else ()
        value = float(not self._config.get("paused_b") and any(not e.crashes for e in self._claimable("b")))
        if not self.ledger.batch_waits or self.ledger.batch_waits[-1].value != value:
            self.ledger.batch_waits.append(Moment(self._at, value))

    def _claimable(self, cls: str) -> Iterable[Entry]:
        lanes = (entries for lane, entries in self._live.items() if lane.startswith("i:") == (cls == "i"))
        return (
            entry
            for entries in lanes
            for entry in entries.values()
            if entry.waits(self._at - 0.002) and self._open(entry.lane) and entry.flags == "-"
        )

    def _check_caps(self, added: dict[str, int]) -> None:
        for cls, new in added.items():
            name, default = ("cap_interactive", 10_000) if cls == "i" else ("cap_batch", 1_000_000)
            cap = int(self._config.get(name, default))
            held = sum(len(entries) for lane, entries in self._live.items() if lane.startswith("i:") == (cls == "i"))
            if held > cap:
                self.ledger.overfull.append((self._at, cls, held - new, cap))


def _how(marks: list[str]) -> str:
    if "XDEL" in marks:
        return "ended"
    if "crash" in marks:
        return "reclaimed" if any(mark.startswith("claimed by") for mark in marks) else "crashed"
    return "retried" if "retry" in marks else "preempted" if "preempt" in marks else "back"


def _pairs(words: Iterable[str]) -> dict[str, str]:
    some = list(words)
    return dict(zip(some[::2], some[1::2], strict=False))


def _after_id(command: Command) -> Command:
    """Return the fields of an XADD, which may name a limit before the id."""
    at = next(i for i, word in enumerate(command) if i > 1 and "-" in word and word.replace("-", "").isdigit())
    return command[at + 1 :]
