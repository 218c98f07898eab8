"""Guards of llmq that can be turned off, one at a time, to see that a test or the audit notices.

A guard is a line or two of the product without which a law does not hold. `turn_off` takes it out of the running
process: pieces of scripts' texts, or a method. Each text that is replaced must be there exactly once, so that a guard
that has moved is noticed here and not taken for one that is off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmq.scheduler import scripts
from llmq.scheduler.scripts import call
from llmq.workers.contact import Contact
from llmq.workers.desk import Desk
from llmq.workers.keeper import LeaseKeeper
from llmq.workers.sweeper import Sweeper
from llmq.workers.worker import Worker


@dataclass(frozen=True, slots=True)
class Edit:
    """A piece of a script's text, and what stands there instead when the guard is off."""

    script: str
    before: str
    after: str = ""

    def there(self) -> bool:
        """Whether the piece is in the script, once."""
        return scripts.script(self.script).text.count(self.before) == 1


@dataclass(frozen=True, slots=True)
class Swap:
    """A method, and what is called instead when the guard is off."""

    owner: type
    method: str
    by: Callable[..., Any]

    def there(self) -> bool:
        """Whether there is such a method."""
        return callable(getattr(self.owner, self.method, None))


@dataclass(frozen=True, slots=True)
class Guard:
    """One guard: its name, the laws that it keeps, and how it is turned off, in words and in deed."""

    name: str
    laws: tuple[str, ...]
    how: str
    parts: tuple[Edit | Swap, ...]

    def turn_off(self) -> None:
        """Take it out of this process."""
        gone = [part for part in self.parts if not part.there()]
        if gone:
            raise LookupError(f"guard {self.name!r}: expected these once in the product, they have moved: {gone}")
        _edit([part for part in self.parts if isinstance(part, Edit)])
        for part in self.parts:
            if isinstance(part, Swap):
                setattr(part.owner, part.method, part.by)


def turn_off(name: str) -> None:
    """Turn off the guard of this name in this process; none for an empty name."""
    if name:
        GUARDS[name].turn_off()


def _edit(edits: list[Edit]) -> None:
    read = call.source
    texts: dict[str, str] = {}
    for edit in edits:
        texts[edit.script] = texts.get(edit.script, read(edit.script)).replace(edit.before, edit.after)

    call.source = lambda name: texts[name] if name in texts else read(name)
    call.script.cache_clear()


async def _nothing(*_: Any, **__: Any) -> None:
    return None


async def _forget_unknown(desk: Desk) -> None:
    desk._unsure.clear()


_FENCE = "return not pending.err and pending[1] ~= nil and pending[1][4] == tonumber(delivery)"
_NO_FENCE = "return redis.call('XLEN', stream) > 0 and #redis.call('XRANGE', stream, entry, entry) > 0"
_RECREATE = "redis.call('XGROUP', 'CREATE', stream, 'workers', 0)\n  return redis.call(...) or {}"
_KNOWN = (
    "if known then return "
    "{known_digest and digest ~= '' and known_digest ~= digest and 'differs' or 'exists', known} end"
)

_SAVE = "if b.tokens then redis.call('HSET', bucket, 'tokens', b.tokens, 'unit', b.unit, 'at', math.max(b.at, now)) end"
_CHAT = "while not set.paused_i and not unsure and #jobs < room do"
_NO_CHAT = "while redis.call('EXISTS', ready_b) == 0 and #jobs < room do"
_CAP = "if (finite(redis.call('HGET', counts, cls)) or 0) >= cap then return {'full', cap} end"
_COUNT = "if sum.completed > 0 then add(batch, 'completed', sum.completed) end"

#: All guards that can be turned off, by name.
GUARDS = {
    guard.name: guard
    for guard in (
        Guard(
            "fence",
            ("G3",),
            "`holds()` says yes to every delivery of every consumer",
            tuple(Edit(name, _FENCE, _NO_FENCE) for name in ("renew", "finish", "hand_back", "retry", "first_delta")),
        ),
        Guard(
            "lease thread",
            ("G4",),
            "the keeper's thread writes the heartbeat and renews nothing",
            (Swap(LeaseKeeper, "_renew", lambda self: None),),
        ),
        Guard(
            "delete on ack",
            ("G1", "G11"),
            "`finish` acknowledges an entry and does not delete it",
            (Edit("finish", "redis.call('XDEL', stream, entry)"),),
        ),
        Guard(
            "sweep cursor",
            ("G5",),
            "the sweep says after its first step that it has seen the whole lane",
            (Edit("sweep", "return {found[1], again, to_end, found[3] or {}}", "return {'0-0', again, to_end, {}}"),),
        ),
        Guard(
            "group re-creation",
            ("G12",),
            "a claim does not make a group that is gone",
            (Edit("claim", _RECREATE, "return {}"),),
        ),
        Guard("sweeper", ("G5", "G13"), "nobody reclaims", (Swap(Sweeper, "_reclaim", _nothing),)),
        Guard(
            "contact",
            ("G4",),
            "a sweeper reclaims what looks idle, however short its contact with Redis",
            (Swap(Contact, "wanting", lambda self: 0.0),),
        ),
        Guard("bucket", ("G8",), "a claim does not write down what it took", (Edit("claim", _SAVE),)),
        Guard("chat first", ("G9",), "a claim takes batch before chat", (Edit("claim", _CHAT, _NO_CHAT),)),
        Guard(
            "deadline",
            ("G10",),
            "a claim never starts batch by the deadline",
            (Edit("claim", "if may_batch and room > 0 then", "if false then"),),
        ),
        Guard(
            "back first",
            ("G17",),
            "a claim takes what is new before what waits again",
            (
                Edit("claim", "  local again\n", "  local again = has_new(stream)\n"),
                Edit(
                    "claim",
                    "  repeat\n    again = false\n",
                    "  repeat\n    if again then break end\n    again = false\n",
                ),
            ),
        ),
        Guard(
            "idempotent submit",
            ("G3",),
            "`submit_job` does not look whether it knows the id",
            (Edit("submit_job", _KNOWN),),
        ),
        Guard(
            "suspects apart",
            ("G7",),
            "a claim gives a worker several suspects at once",
            (Edit("claim", "if c > 0 and suspects > 0 then held_back = true", "if false then held_back = true"),),
        ),
        Guard(
            "three deaths",
            ("G7",),
            "a job is reclaimed however often its worker died",
            (Edit("sweep", "elseif c >= 2 then verdict = 'dead' end", "end"), Edit("claim", "or c >= 3 and 'dead'")),
        ),
        Guard(
            "hand back at drain",
            ("G6",),
            "a worker that is told to stop leaves what it holds to lapse",
            (Swap(Worker, "_drain", _nothing),),
        ),
        Guard(
            "hand back of lost claims",
            ("G7",),
            "a claim whose reply was lost is forgotten, and lapses",
            (Swap(Desk, "_return_unknown", _forget_unknown),),
        ),
        Guard(
            "forgotten claims",
            ("G3", "G12"),
            "a claim that Redis made before, and has forgotten, is run beside the first",
            (Swap(Desk, "_is_new", lambda self, lease, left: True),),
        ),
        Guard(
            "begun is never begun again",
            ("G18",),
            "nobody notes that a first delta was sent",
            (Edit("first_delta", "if flags == '-' then remember(lane, entry, d, a, c, p, 's') end"),),
        ),
        Guard(
            "cancel",
            ("G14",),
            "`cancel_job` leaves the entry where it waits",
            (Edit("cancel_job", "local there = redis.call('XDEL', stream, entry)", "local there = 1"),),
        ),
        Guard("cap", ("G15",), "`submit_job` does not look at the cap", (Edit("submit_job", _CAP),)),
        Guard(
            "lanes go",
            ("G11",),
            "a lane whose last job has ended stays",
            (Edit("finish", "if redis.call('XLEN', stream) == 0 then remove_lane(lane, meta, stream, back) end"),),
        ),
        Guard("counts", ("G16",), "`finish` does not count what it completes", (Edit("finish", _COUNT),)),
    )
}
