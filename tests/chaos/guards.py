"""Guards of llmq that can be turned off, one at a time, to see that a test or the audit notices.

A guard is a line or two of the product without which a law does not hold. `turn_off` takes it out of the running
process: a piece of a script's text, or a method. Each text that is replaced must be there exactly once, so that a
guard that moved is noticed here and not taken for one that is off.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llmq.scheduler import scripts
from llmq.workers.contact import Contact
from llmq.workers.desk import Desk
from llmq.workers.keeper import LeaseKeeper
from llmq.workers.sweeper import Sweeper
from llmq.workers.worker import Worker


@dataclass(frozen=True, slots=True)
class Guard:
    """One guard: its name, the laws that it keeps, what is done to turn it off, and the doing."""

    name: str
    laws: tuple[str, ...]
    how: str
    turn_off: Callable[[], None]


def turn_off(name: str) -> None:
    """Turn off the guard of this name in this process; none for an empty name."""
    if name:
        GUARDS[name].turn_off()


def _edit(*edits: tuple[str, str, str]) -> Callable[[], None]:
    """Return what edits scripts: script's name, text in it, text instead."""

    def edit() -> None:
        load = scripts.script
        texts = {}
        for name, before, after in edits:
            text = texts.get(name, load(name).text)
            if text.count(before) != 1:
                raise LookupError(f"expected this text once in {name}.lua, found it {text.count(before)} times: {before}")
            texts[name] = text.replace(before, after)

        def edited(name: str) -> scripts.Script:
            text = texts.get(name)
            if text is None:
                return load(name)
            return scripts.Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())

        scripts.script = edited  # type: ignore[assignment]

    return edit


def _replace(owner: type, method: str, by: Callable[..., Any]) -> Callable[[], None]:
    def replace() -> None:
        getattr(owner, method)  # raises where it is called otherwise by now
        setattr(owner, method, by)

    return replace


async def _nothing(*_: Any, **__: Any) -> None:
    return None


def _sweep_once(self: Sweeper) -> float:
    return 3600.0


_FENCE = "return not pending.err and pending[1] ~= nil and pending[1][4] == tonumber(delivery)"
_RECREATE = "redis.call('XGROUP', 'CREATE', stream, 'workers', 0)\n  return redis.call(...) or {}"
_CLAMP = "as_debt and math.max(math.min(tank.tokens, -set.burst), left) or left"

#: All guards that can be turned off, by name.
GUARDS = {
    guard.name: guard
    for guard in (
        Guard(
            "fence",
            ("G3",),
            "`holds()` in queue.lua says yes to every delivery of every consumer",
            _edit(
                *(
                    (script, _FENCE, "return redis.call('XLEN', stream) > 0 and #redis.call('XRANGE', stream, entry, entry) > 0")
                    for script in ("renew", "finish", "hand_back", "retry", "first_delta")
                )
            ),
        ),
        Guard(
            "lease thread",
            ("G4",),
            "the keeper's thread writes the heartbeat and renews nothing",
            _replace(LeaseKeeper, "_renew", lambda self: None),
        ),
        Guard(
            "delete on ack",
            ("G2", "G11"),
            "finish.lua acknowledges an entry and does not delete it",
            _edit(("finish", "redis.call('XDEL', stream, entry)", "")),
        ),
        Guard(
            "sweep cursor",
            ("G5",),
            "the sweeper stops after the first step of a lane",
            _edit(("sweep", "return {found[1], again, to_end, found[3] or {}}", "return {'0-0', again, to_end, {}}")),
        ),
        Guard(
            "group re-creation",
            ("G12",),
            "`in_group()` in queue.lua does not make a group that is gone",
            _edit(("claim", _RECREATE, "return {}")),
        ),
        Guard(
            "sweeper",
            ("G5",),
            "nobody reclaims",
            _replace(Sweeper, "_reclaim", _nothing),
        ),
        Guard(
            "contact",
            ("G4",),
            "a sweeper reclaims whatever looks idle, however short its contact with Redis",
            _replace(Contact, "wanting", lambda self: 0.0),
        ),
        Guard(
            "bucket",
            ("G8",),
            "a claim does not write the bucket's tokens back",
            _edit(("claim", "if b.tokens then redis.call('HSET', bucket, 'tokens', b.tokens, 'at', math.max(b.at, now)) end", "")),
        ),
        Guard(
            "chat first",
            ("G9",),
            "the claim takes batch before it looks for chat",
            _edit(("claim", "while not set.paused_i and not unsure and #jobs < room do", "while redis.call('EXISTS', ready_b) == 0 and #jobs < room do")),
        ),
        Guard(
            "deadline",
            ("G10",),
            "the claim never starts batch by the deadline",
            _edit(("claim", "if may_batch and room > 0 then", "if false then")),
        ),
        Guard(
            "back first",
            ("G17",),
            "a claim takes new entries and leaves those that wait again for last",
            _edit(("claim", "  local again\n", "  local again = has_new(stream)\n"), ("claim", "  repeat\n    again = false\n", "  repeat\n    if again then break end\n    again = false\n")),
        ),
        Guard(
            "idempotent submit",
            ("G3",),
            "submit_job.lua does not look whether it knows the id",
            _edit(("submit_job", "if known then return {'exists', known} end", "")),
        ),
        Guard(
            "suspects apart",
            ("G7",),
            "a claim gives a worker several suspects at once",
            _edit(("claim", "if c > 0 and suspects > 0 then held_back = true", "if false then held_back = true")),
        ),
        Guard(
            "three deaths",
            ("G7",),
            "a job is reclaimed however often its worker died",
            _edit(("sweep", "elseif c >= 2 then verdict = 'dead' end", "end"), ("claim", "or c >= 3 and 'dead'", "")),
        ),
        Guard(
            "hand back at drain",
            ("G6",),
            "a worker that is told to stop leaves what it holds to lapse",
            _replace(Worker, "_drain", _nothing),
        ),
        Guard(
            "hand back of lost claims",
            ("G7",),
            "a claim whose reply was lost is forgotten, and lapses",
            _replace(Desk, "_return_unknown", lambda self: _forget_unknown(self)),
        ),
        Guard(
            "begun is never begun again",
            ("G18",),
            "nobody notes that a delta was sent",
            _edit(("first_delta", "if flags == '-' then remember(lane, entry, d, a, c, p, 's') end", "")),
        ),
        Guard(
            "cancel",
            ("G14",),
            "cancel_job.lua leaves the entry where it waits",
            _edit(("cancel_job", "local there = redis.call('XDEL', stream, entry)", "local there = 1")),
        ),
        Guard(
            "cap",
            ("G15",),
            "submit_job.lua does not look at the cap",
            _edit(("submit_job", "if tonumber(redis.call('HGET', counts, cls) or 0) >= cap then return {'full', cap} end", "")),
        ),
        Guard(
            "lanes go",
            ("G11",),
            "a lane whose last job has ended stays",
            _edit(("finish", "if redis.call('XLEN', stream) == 0 then remove_lane(lane, meta, stream, back) end", "")),
        ),
        Guard(
            "counts",
            ("G16",),
            "a worker finishes a line without counting it",
            _edit(("finish", "if sum.completed > 0 then redis.call('HINCRBY', batch, 'completed', sum.completed) end", "")),
        ),
    )
}


async def _forget_unknown(desk: Desk) -> None:
    desk._unsure.clear()
