"""The journal: what a worker tells its operator, put together from what it sees.

Called by the desk with every outcome that it is to write, and with every heartbeat's settings. Errors of engines are
not repeated: they may quote a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping

from llmq.scheduler.lease import Answered, Ended, Fence, HandedBack, Lease, Outcome, Reason
from llmq.scheduler.logs import Event, Value, note

#: Fields of the config hash that change by themselves: what the sweeper derives from others.
_DERIVED = {b"plan", b"results_quarter", b"virtual"}


def note_outcome(lease: Lease, outcome: Outcome) -> None:
    """Log an outcome that somebody may have to act on."""
    match outcome:
        case Ended(code=code, dead=True):
            note(Event.DEAD_LETTER, **_of(lease), code=code.value, attempts=lease.attempts, crashes=lease.crashes)
        case Answered(status_code=status, dead=True):
            note(Event.DEAD_LETTER, **_of(lease), status=status, attempts=lease.attempts, crashes=lease.crashes)
        case HandedBack(reason=Reason.PREEMPTED):
            note(Event.PREEMPTED, **_of(lease), preemptions=lease.preemptions + 1)
        case HandedBack(reason=Reason.KEY_MISSING, delay=delay):
            note(Event.KEY_MISSING, **_of(lease), delay_s=delay)


def note_lease(event: Event, fence: Fence) -> None:
    """Log what became of a lease."""
    note(event, lane=fence.lane, entry=fence.entry, delivery=fence.delivery)


def note_changes(before: Mapping[bytes, bytes], after: Mapping[bytes, bytes]) -> None:
    """Log the live settings that somebody changed, as they are stored; "" is the default again."""
    changed = {
        name.decode(errors="replace"): after.get(name, b"").decode(errors="replace")
        for name in sorted(before.keys() | after.keys())
        if name not in _DERIVED and before.get(name) != after.get(name)
    }
    if changed:
        note(Event.SETTINGS_CHANGED, **changed)


def _of(lease: Lease) -> dict[str, Value]:
    return {"lane": lease.fence.lane, "entry": lease.fence.entry, "tenant": lease.tenant}
