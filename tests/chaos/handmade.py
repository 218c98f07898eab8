"""Handmade evidence: a run written down by hand, in the very commands that a server would have in its file.

    made = Handmade()
    made.job("j1"); made.claim("j1", "w"); made.at(1); made.finish("j1")
    audit(made.evidence())

For the tests of the audit: each law is shown one run that breaks it, and one that is as near and does not.
"""

from __future__ import annotations

from typing import Any

from tests.chaos.evidence import Evidence
from tests.chaos.history import Command, Step
from tests.chaos.journal import Event
from tests.chaos.replay import PREFIX, Replay

#: When all handmade runs begin: Redis' times are those of a clock.
BEGIN_S = 1_700_000_000.0

#: Consumers are named as llmq names them: host, process, random.
W0, W1 = "host-100-aa", "host-200-bb"


class Handmade:
    """A run in the making; `now` is in seconds from its beginning."""

    def __init__(self) -> None:
        self.now = 0.0
        self._steps: list[Step] = []
        self._events: list[Event] = []
        self._lanes: dict[str, str] = {}
        self._ids: dict[str, str] = {}
        self._held: dict[str, tuple[str, int]] = {}
        self._runs = 0

    # --- time and what is seen --------------------------------------------------------------------------------------

    def at(self, seconds: float) -> Handmade:
        """Go on at a time."""
        self.now = seconds
        return self

    def say(self, who: str, kind: str, **fields: Any) -> None:
        """Let somebody see something now."""
        self._events.append(Event(BEGIN_S + self.now, who, kind, fields))

    def step(self, *commands: Command) -> None:
        """Let the server do something now."""
        self._steps.append(Step(BEGIN_S + self.now, commands))

    def evidence(self, **more: Any) -> Evidence:
        """Return what the audit is given."""
        return Evidence(self._events, Replay().run(self._steps), **more)

    def lives(self, worker: str = W0, place: int = 0) -> None:
        """Let a worker serve from now on."""
        self.say("driver", "worker up", place=place, pid=int(worker.split("-")[1]), worker=worker)

    def fault(self, name: str, hits: str, lasts: float, place: int = -1, detail: str = "") -> None:
        """Let a fault begin now, and be over after a while."""
        about = {"planned": self.now, "fault": name, "hits": hits, "place": place, "detail": detail}
        begins = self.now
        self.say("driver", "fault", **about)
        self.at(begins + lasts).say("driver", "fault over", **about)
        self.at(begins)

    # --- the queue ----------------------------------------------------------------------------------------------------

    def configure(self, **settings: Any) -> None:
        """Change live settings."""
        self.step(("HSET", PREFIX + "config", *(str(word) for pair in settings.items() for word in pair)))

    def job(self, name: str, lane: str = "i:t", *, expires: float = 1e12, cost: int = 1) -> None:
        """Submit a job, or a line where the name is `batch.number`; clients know it by the same name."""
        batch, _, number = name.partition(".")
        lane = f"batch:{batch}" if number else lane
        entry = f"{number}-0" if number else f"{round((BEGIN_S + self.now) * 1000)}-{len(self._ids)}"
        self._lanes[name], self._ids[name] = lane, entry
        cls = "i" if lane.startswith("i:") else "b"
        fields = ("k", name, "d", "", "c", str(cost)) + (() if number else ("x", str(expires * 1000), "r", "me"))
        self.step(
            ("XADD", f"{PREFIX}lane:{lane}", entry, *fields),
            ("HSET", PREFIX + "lanes", lane, f"+{cls}|t|0000000000000"),
        )
        if not number:
            self.say("clients", "acked", name=name, job=name, cls="interactive" if cls == "i" else "batch")

    def claim(
        self, name: str, worker: str = W0, number: int = 1, *, deadline: bool = False, begin: bool = True
    ) -> None:
        """Let a worker claim it, and a slot begin with it."""
        self.step(*self._claiming(name, worker, number, deadline=deadline))
        if begin:
            self.begin(name, worker, number)

    def claim_together(self, *names: str, worker: str = W0) -> None:
        """Let a worker claim several in one step."""
        self.step(*(command for name in names for command in self._claiming(name, worker, 1)))

    def begin(self, name: str, worker: str = W0, number: int = 1) -> None:
        """Let a slot begin with it, and the engine run it."""
        self._runs += 1
        self.say("w0", "began", key=name, **self._fence(name, worker, number))
        self.say("e0", "run", name=name, run=f"run-{self._runs}")

    def answer(self, name: str, worker: str = W0, number: int = 1) -> str:
        """Let the engine answer, and the worker know; return the run."""
        run = f"run-{self._runs}"
        self.say("e0", "ran", name=name, run=run, how="answered")
        self.say("w0", "outcome", key=name, what="Answered", run=run, **self._fence(name, worker, number))
        return run

    def renew(self, name: str, worker: str = W0) -> None:
        """Let a worker renew its lease."""
        self.step(self._xclaim(name, worker, self._held[name][1]))

    def finish(self, name: str, state: str = "completed", *, code: str = "", run: str | None = None) -> None:
        """Let its end be accepted, with the answer of the last run where it is completed."""
        if run is None and state == "completed":
            run = self.answer(name, *self._held[name])
        lane, entry = self._lanes[name], self._ids[name]
        body = f'{{"choices":[{{"message":{{"content":"{run or ""} word"}}}}]}}'
        self._held.pop(name, None)
        self.step(
            ("XACK", f"{PREFIX}lane:{lane}", "workers", entry),
            ("XDEL", f"{PREFIX}lane:{lane}", entry),
            self._result(name, state, code, body),
        )

    def result(self, name: str, state: str) -> None:
        """Write one more result."""
        self.step(self._result(name, state, "", ""))

    def back(self, name: str, past: str = "1 0 0 0 -", *, due: float | None = None) -> None:
        """Let its worker hand it back; `past` is delivery, attempts, crashes, preemptions, flags."""
        self.step(*self._returning(name, past, due))

    def reclaim(self, name: str, by: str = W1, past: str = "1 0 1 0 -") -> None:
        """Let a sweeper reclaim it."""
        self.step(self._xclaim(name, by, self._held[name][1]), *self._returning(name, past, None))

    def note(self, name: str, past: str) -> None:
        """Write what is remembered of an entry: `x` flags a cancel, `s` a first delta."""
        self.step(("HSET", PREFIX + "tries", f"{self._lanes[name]}|{self._ids[name]}", past))

    def delta(self, name: str) -> None:
        """Let its first delta go to the client's inbox."""
        key, at = PREFIX + "inbox:me", f"{round((BEGIN_S + self.now) * 1000)}-0"
        self.step(("XADD", key, "MAXLEN", "~", "10000", at, "t", "d", "j", name, "v", "1", "d", "text"))

    def delete(self, name: str) -> None:
        """Let somebody delete its entry."""
        self.step(("XDEL", f"{PREFIX}lane:{self._lanes[name]}", self._ids[name]))

    def batch_ends(self, batch: str) -> None:
        """Let a batch end."""
        self.step(("HSET", f"{PREFIX}b:{batch}", "status", "completed", "ended_at", "1"))

    def flush(self) -> None:
        """FLUSHALL."""
        self.step(("FLUSHALL",))

    # --- as the server writes it --------------------------------------------------------------------------------------

    def _fence(self, name: str, worker: str, number: int) -> dict[str, Any]:
        pid = int(worker.split("-")[1])
        return {"pid": pid, "lane": self._lanes[name], "entry": self._ids[name], "delivery": number}

    def _claiming(self, name: str, worker: str, number: int, *, deadline: bool = False) -> list[Command]:
        lane, entry = self._lanes[name], self._ids[name]
        self._held[name] = (worker, number)
        commands = [self._xclaim(name, worker, number)]
        if number > 1:
            commands.insert(0, ("ZREM", f"{PREFIX}lane:{lane}:back", entry))
        if not lane.startswith("i:"):
            score = (1 if deadline else -1) * round((BEGIN_S + self.now) * 1000)
            commands.append(("ZADD", PREFIX + "starts", str(score), f"{lane}|{entry}"))
        return commands

    def _xclaim(self, name: str, worker: str, number: int) -> Command:
        key, entry = f"{PREFIX}lane:{self._lanes[name]}", self._ids[name]
        time = str(round((BEGIN_S + self.now) * 1000))
        how = ("TIME", time, "RETRYCOUNT", str(number), "FORCE", "JUSTID", "LASTID", entry)
        return "XCLAIM", key, "workers", worker, "0", entry, *how

    def _returning(self, name: str, past: str, due: float | None) -> list[Command]:
        lane, entry = self._lanes[name], self._ids[name]
        place = entry.partition("-")[0] if lane.startswith("batch:") else "0"
        score = place if due is None else str(round((BEGIN_S + due) * 1000))
        self._held.pop(name, None)
        return [
            ("HSET", PREFIX + "tries", f"{lane}|{entry}", past),
            ("XACK", f"{PREFIX}lane:{lane}", "workers", entry),
            ("ZADD", f"{PREFIX}lane:{lane}:back", score, entry),
        ]

    def _result(self, name: str, state: str, code: str, body: str) -> Command:
        batch, _, number = name.partition(".")
        if not number:
            return "HSET", f"{PREFIX}job:{name}", "state", state, "body", body, "code", code
        at = f"{round((BEGIN_S + self.now) * 1000)}-{number}"
        return "XADD", f"{PREFIX}b:{batch}:results", at, "n", number, "k", name, "s", state, "b", body, "e", code
