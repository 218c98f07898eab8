"""The Lua scripts, one typed function each, without logic.

A function takes values and returns a `Call`: which script, with which KEYS and ARGV, and how to read its reply. It
sends nothing; `run` (one trip for any number of calls) does. What a script promises stands in its own header.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Generic, Protocol, TypeVar, cast

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from llmq.scheduler.job import TrafficClass
from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.lease import (
    Answered,
    Ended,
    ErrorCode,
    Fence,
    HandedBack,
    Lease,
    Outcome,
    Reason,
    Retry,
    Why,
    batch_of,
)
from llmq.scheduler.stored_number import whole
from llmq.scheduler.totals import PREFIX as TOTALS_PREFIX

T = TypeVar("T")

#: Names of all scripts; `queue.lua` is what each of them begins with.
NAMES = (
    "submit_job", "open_batch", "submit_lines", "seal_batch", "claim", "renew", "first_delta", "finish", "retry",
    "hand_back", "sweep", "reap", "cancel_job", "cancel_batch", "pause_batch", "collect", "delete_batch", "delete_job",
    "configure", "beat", "lead", "forget", "lose", "recount", "keep_key", "enter", "stay", "leave", "hold", "let_go",
)  # fmt: skip

_WORD = re.compile(r"\w+")

#: A statement of `queue.lua`: from one `local` at the left margin to the next.
_STATEMENT = re.compile(r"^local .*\n(?:(?!local ).*\n)*", re.MULTILINE)

#: A time that no clock gets to.
FAR_AWAY_MS = 9 * 10**15

#: What a worker passes at most: more lanes make the script's KEYS long for little gain.
MAX_CANDIDATES = 16

#: More digits than any number of ours has.
_MOST_DIGITS = 18

#: LLM tokens that one answer is believed to have used. Redis adds them up in 64 bits, and a sum that does not fit would
#: end the finish script in its middle, with every job of the call (G16).
MOST_TOKENS = 10**9


@dataclass(frozen=True, slots=True)
class Script:
    """One script: its text as sent to the server, and the SHA-1 by which it is called."""

    name: str
    text: str
    sha: str


@cache
def script(name: str) -> Script:
    """Load a script of this package, with what it uses of `queue.lua` in front of it."""
    folder = resources.files("llmq.scheduler") / "lua"
    own = _without_comments((folder / f"{name}.lua").read_text())
    text = _used(_without_comments((folder / "queue.lua").read_text()), own) + own
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def _without_comments(lua: str) -> str:
    """Take out the lines that are comments: the server would only store them."""
    return re.sub(r"^\s*--.*\n", "", lua, flags=re.MULTILINE)


def _used(prelude: str, script: str) -> str:
    """Return the statements of a prelude that a script comes to use.

    Redis runs the whole text at each call: to make all functions of `queue.lua` takes 4 of the 45 us of a submit. Each
    of its statements begins at the left margin with `local`, and names what it makes.
    """
    used, words = "", set(_WORD.findall(script))
    for statement in reversed(_STATEMENT.findall(prelude)):
        made = _WORD.findall(statement.partition("(" if statement.startswith("local function ") else "=")[0])
        if not words.isdisjoint(set(made) - {"local", "function"}):
            used = statement + used
            words.update(_WORD.findall(statement))
    return used


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One call of a script that has not been made yet."""

    script: Script
    keys: tuple[str, ...]
    argv: Sequence[Any]
    read: Callable[[Any], T]


async def run(redis: Redis, call: Call[T]) -> T:
    """Make one call. Loads the script where the server does not know it (a restart, SCRIPT FLUSH, a failover)."""
    try:
        reply = await cast(Any, redis).evalsha(call.script.sha, len(call.keys), *call.keys, *call.argv)
    except NoScriptError:
        reply = await cast(Any, redis).eval(call.script.text, len(call.keys), *call.keys, *call.argv)
    return call.read(reply)


class Caller(Protocol):
    """What calls scripts and blocks its thread: a synchronous client."""

    def evalsha(self, sha: str, numkeys: int, *keys_and_args: Any) -> Any:
        """Call a script by its SHA-1."""

    def eval(self, script: str, numkeys: int, *keys_and_args: Any) -> Any:
        """Call a script by its text."""


def run_sync(redis: Caller, call: Call[T]) -> T:
    """Make one call, and block this thread until it is answered."""
    try:
        reply = redis.evalsha(call.script.sha, len(call.keys), *call.keys, *call.argv)
    except NoScriptError:
        reply = redis.eval(call.script.text, len(call.keys), *call.keys, *call.argv)
    return call.read(reply)


async def run_all(redis: Redis, calls: Sequence[Call[Any]]) -> list[Any]:
    """Make several calls in one trip. A reply may be an exception: one that fails does not undo the others."""
    if len(calls) == 1:
        return [await run(redis, calls[0])]
    pipe = redis.pipeline(transaction=False)
    for call in calls:
        pipe.evalsha(call.script.sha, len(call.keys), *call.keys, *call.argv)
    replies: list[Any] = list(await pipe.execute(raise_on_error=False))
    for position, (call, reply) in enumerate(zip(calls, replies, strict=True)):
        if isinstance(reply, NoScriptError):  # it did not run: sending it again is safe
            replies[position] = await run(redis, call)
        elif not isinstance(reply, Exception):
            replies[position] = call.read(reply)
    return replies


def text(value: bytes | str) -> str:
    """Return a reply's text."""
    return value.decode() if isinstance(value, bytes) else value


# --- submit ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """A script's answer of a word and a value, such as `ok` and the next line, or `full` and the cap."""

    word: str
    value: str = ""

    @property
    def number(self) -> int:
        """The value as a number."""
        return int(self.value)


def _verdict(reply: list[Any]) -> Verdict:
    value = reply[1] if len(reply) > 1 else ""
    return Verdict(text(reply[0]), text(value) if isinstance(value, bytes | str) else str(value))


def submit_job(
    keys: QueueKeys,
    job_id: str,
    *,
    lane: str,
    cls: TrafficClass,
    tenant: str,
    data: bytes,
    cost: int,
    ttl_ms: int | None,
    client: str,
    digest: str = "",
) -> Call[Verdict]:
    """Put one single job into its tenant's lane. Answers ok | exists (entry) | differs (entry) | full (cap)."""
    ttl = "" if ttl_ms is None else ttl_ms
    argv = [job_id, lane, cls.letter, tenant, data, cost, ttl, client, digest]
    return Call(script("submit_job"), (*keys.shared, keys.lane(lane), keys.job(job_id)), argv, _verdict)


def open_batch(
    keys: QueueKeys,
    batch_id: str,
    *,
    lane: str,
    tenant: str,
    window_ms: int,
    need: int,
    record: Mapping[str, str | int],
) -> Call[Verdict]:
    """Make a batch that lines can be submitted to. Answers ok | exists (next line) | full (cap)."""
    fields = [part for pair in record.items() for part in pair]
    argv = [batch_id, lane, tenant, window_ms, need, *fields]
    return Call(script("open_batch"), (*keys.shared, keys.batch(batch_id)), argv, _verdict)


@dataclass(frozen=True, slots=True)
class SubmitLine:
    """A line as `submit_lines` takes it: encoded, or (`data` empty) bad with its `fault`."""

    number: int
    key: str
    data: bytes
    cost: int = 0
    fault: str = ""


def submit_lines(
    keys: QueueKeys, batch_id: str, *, lane: str, first: int, after: int, lines: Sequence[SubmitLine]
) -> Call[Verdict]:
    """Append a chunk of lines. Answers ok | skip (next line) | full (room) | closed (status)."""
    argv: list[Any] = [lane, first, after]
    for line in lines:
        argv += (line.number, line.key, line.data, line.cost if line.data else line.fault)
    touched = (*keys.shared, keys.lane(lane), keys.batch(batch_id), keys.results(batch_id))
    return Call(script("submit_lines"), touched, argv, _verdict)


def seal_batch(keys: QueueKeys, batch_id: str, *, lane: str, next_line: int) -> Call[Verdict]:
    """Say that no line comes any more. Answers ok (total) | open (next line) | closed (status)."""
    return Call(script("seal_batch"), (*keys.shared, *keys.of_batch(batch_id)), [lane, next_line], _verdict)


# --- claim and what ends a lease ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Doomed:
    """A job that was claimed only to be ended: why, and the lease that allows it."""

    lease: Lease
    verdict: str


@dataclass(frozen=True, slots=True)
class Claimed:
    """What a claim gave: leases; jobs to end; else why nothing more, and seconds until that may change.

    `candidates` are the lanes to give next time; None where those given were right. `protects` says that the youngest
    line that was named may not be preempted any more.
    """

    leases: list[Lease]
    doomed: list[Doomed]
    reason: str
    wait: float
    candidates: list[str] | None
    protects: bool = False


def _lease(row: list[Any], why: Why) -> Lease:
    lane, entry, delivery, _, cls, tenant, attempts, crashes, preemptions, flat, *kept = row
    # Whoever can write to Redis can add an entry; one that llmq did not write has no data, and ends as malformed.
    fields: dict[bytes, bytes] = dict(zip(flat[::2], flat[1::2], strict=False))
    queued_ms = fields.get(b"t", entry.partition(b"-")[0])
    return Lease(
        Fence(text(lane), text(entry), int(delivery)),
        TrafficClass.INTERACTIVE if cls == b"i" else TrafficClass.BATCH,
        why,
        tenant.decode(errors="replace"),
        fields.get(b"k", entry).decode(errors="replace"),
        fields.get(b"d", b""),
        min(_number(fields.get(b"c", b"1")), MOST_TOKENS),
        int(attempts),
        int(crashes),
        int(preemptions),
        fields.get(b"r", b"").decode(errors="replace"),
        _number(queued_ms) / 1000,
        *kept,
    )


def _number(value: bytes) -> int:
    return int(value) if value.isdigit() and len(value) <= _MOST_DIGITS else 0


def _doomed(rows: list[list[Any]]) -> list[Doomed]:
    return [Doomed(_lease(row, Why.CHAT if row[4] == b"i" else Why.BUCKET), text(row[3])) for row in rows]


def _claimed(reply: list[Any]) -> Claimed:
    jobs, ended, reason, wait_ms, candidates, protects = reply
    return Claimed(
        [_lease(row, Why(text(row[3]))) for row in jobs],
        _doomed(ended),
        text(reason),
        int(wait_ms) / 1000,
        [text(lane) for lane in candidates] if reason == b"lanes" else None,
        protects == 1,
    )


def claim(
    keys: QueueKeys,
    consumer: str,
    *,
    room: int,
    free: int,
    reserve: int,
    suspects: int,
    candidates: Sequence[str],
    youngest: Fence | None = None,
) -> Call[Claimed]:
    """Take the next jobs for one worker under the policy."""
    lanes = candidates[:MAX_CANDIDATES]
    touched = [key for lane in lanes for key in keys.of_lane(lane)]
    line = f"{youngest.lane}|{youngest.entry}" if youngest else ""
    argv = [consumer, room, free, reserve, suspects, line, *lanes]
    return Call(script("claim"), (*keys.shared, *touched), argv, _claimed)


@dataclass(frozen=True, slots=True)
class Renewed:
    """Fences whose lease belongs to another delivery, and fences of jobs that somebody cancelled."""

    lost: list[Fence]
    cancelled: list[Fence]


def renew(keys: QueueKeys, consumer: str, fences: Sequence[Fence]) -> Call[Renewed]:
    """Keep the leases of jobs that this worker still runs."""
    lanes = list(dict.fromkeys(fence.lane for fence in fences))
    number = {lane: position for position, lane in enumerate(lanes, 1)}
    argv: list[Any] = [consumer]
    for fence in fences:
        argv += (fence.lane, number[fence.lane], fence.entry, fence.delivery)

    def read(reply: list[list[int]]) -> Renewed:
        lost, cancelled = reply
        return Renewed([fences[int(i) - 1] for i in lost], [fences[int(i) - 1] for i in cancelled])

    return Call(script("renew"), (*keys.shared, *(keys.lane(lane) for lane in lanes)), argv, read)


def first_delta(keys: QueueKeys, consumer: str, lease: Lease, *, inbox: str, data: bytes) -> Call[bool]:
    """Send the first delta of an interactive job; False where the lease is lost."""
    fence = lease.fence
    argv = [consumer, fence.lane, fence.entry, fence.delivery, lease.key, data]
    return Call(script("first_delta"), (*keys.shared, keys.lane(fence.lane), inbox), argv, lambda reply: reply == 1)


#: What an ended job's record says, by the error code of its end; all else is `failed`.
_STATES = {
    ErrorCode.EXPIRED: "expired",
    ErrorCode.TIMEOUT: "expired",
    ErrorCode.CANCELLED: "cancelled",
    ErrorCode.INTERRUPTED: "interrupted",
}


@dataclass(frozen=True, slots=True)
class Finish:
    """A job that ends: its lease, and how."""

    lease: Lease
    outcome: Answered | Ended


def _ending(finish: Finish) -> list[Any]:
    lease, outcome = finish.lease, finish.outcome
    kind = "line" if lease.batch_id else "job"
    head = [lease.fence.lane, lease.fence.entry, lease.fence.delivery, kind, lease.key]
    match outcome:
        case Answered(status_code, body, request_id, usage, dead):
            state = "completed" if status_code < 400 else "failed"
            used = [max(0, min(tokens, MOST_TOKENS)) for tokens in (usage.prompt_tokens, usage.completion_tokens)]
            tail = [state, status_code, request_id, body, "", "", *used]
            return [*head, *tail, lease.cost, int(dead), f"HTTP {status_code}" if dead else ""]
        case Ended(code, message, dead):
            tail = [_STATES.get(code, "failed"), "", "", b"", code.value, message, 0, 0]
            return [*head, *tail, lease.cost, int(dead), message if dead else ""]


def finish(keys: QueueKeys, consumer: str, host: str, endings: Sequence[Finish]) -> Call[list[Fence]]:
    """End jobs. Answers the fences that were refused: their lease belongs to another delivery."""
    touched = [
        key for item in endings for key in keys.of_ending(item.lease.fence.lane, item.lease.key, item.lease.reply_to)
    ]
    argv: list[Any] = [consumer, host]
    for item in endings:
        argv += _ending(item)
    fences = [item.lease.fence for item in endings]
    return Call(script("finish"), (*keys.shared, *touched), argv, lambda reply: [fences[int(i) - 1] for i in reply])


def retry(keys: QueueKeys, consumer: str, fence: Fence, outcome: Retry) -> Call[bool]:
    """Spend an attempt (or count a crash) and let the job wait until it is due; False where the lease is lost."""
    delay_ms = round(outcome.delay * 1000)
    argv = [consumer, fence.lane, fence.entry, fence.delivery, delay_ms, int(outcome.crashed)]
    return Call(script("retry"), (*keys.shared, *keys.of_lane(fence.lane)), argv, lambda reply: reply == 1)


def hand_back(keys: QueueKeys, consumer: str, returned: Sequence[tuple[Fence, HandedBack]]) -> Call[list[Fence]]:
    """Return unfinished jobs without spending an attempt. Answers the fences that were refused."""
    argv: list[Any] = [consumer]
    for fence, outcome in returned:
        preempted = int(outcome.reason is Reason.PREEMPTED)
        argv += (fence.lane, fence.entry, fence.delivery, round(outcome.delay * 1000), preempted, outcome.kept)
    touched = [key for fence, _ in returned for key in keys.of_lane(fence.lane)]
    fences = [fence for fence, _ in returned]
    return Call(script("hand_back"), (*keys.shared, *touched), argv, lambda reply: [fences[int(i) - 1] for i in reply])


def settle(
    keys: QueueKeys,
    consumer: str,
    host: str,
    settled: Sequence[tuple[Lease, Outcome]],
) -> list[Call[Any]]:
    """Return the calls that write outcomes: jobs that end in one call, those handed back in one, each retry in one."""
    endings = [Finish(lease, out) for lease, out in settled if isinstance(out, Answered | Ended)]
    returned = [(lease.fence, out) for lease, out in settled if isinstance(out, HandedBack)]
    calls: list[Call[Any]] = []
    if endings:
        calls.append(finish(keys, consumer, host, endings))
    if returned:
        calls.append(hand_back(keys, consumer, returned))
    calls += [retry(keys, consumer, lease.fence, out) for lease, out in settled if isinstance(out, Retry)]
    return calls


# --- sweep, reap, cancel --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Swept:
    """One step of a sweep: where to go on, jobs that wait again, jobs to end, entries that somebody deleted."""

    cursor: str
    reclaimed: int
    doomed: list[Doomed]
    deleted: list[str]


def sweep(
    keys: QueueKeys,
    consumer: str,
    *,
    lane: str,
    lease_ms: int,
    cursor: str,
    count: int = 100,
    not_after_ms: int = FAR_AWAY_MS,
) -> Call[Swept]:
    """Reclaim the jobs of one lane whose lease ran out; nothing where Redis comes to it after `not_after_ms`."""

    def read(reply: list[Any]) -> Swept:
        cursor, again, to_end, deleted = reply
        return Swept(text(cursor), int(again), _doomed(to_end), [text(entry) for entry in deleted])

    argv = [consumer, lane, lease_ms, cursor, count, not_after_ms]
    return Call(script("sweep"), (*keys.shared, *keys.of_lane(lane)), argv, read)


def lose(keys: QueueKeys, *, lane: str, entries: Sequence[str]) -> Call[int]:
    """Account for entries that a sweep found deleted. Answers how many."""
    batch_id = batch_of(lane)
    record = batch_id or "-"
    touched = (*keys.shared, *keys.of_lane(lane), keys.batch(record), keys.results(record))
    return Call(script("lose"), touched, [lane, "line" if batch_id else "job", *entries], int)


def recount(keys: QueueKeys, *, lanes: Sequence[str]) -> Call[int]:
    """Set right the counts that the caps compare with. Answers by how many jobs they were wrong."""
    return Call(script("recount"), (*keys.shared, *(keys.lane(lane) for lane in lanes)), lanes, int)


def reap(keys: QueueKeys, batch_id: str, *, lane: str, cursor: str, count: int = 500) -> Call[tuple[str, int]]:
    """End waiting lines of a batch that was cancelled or whose window is over. Answers next cursor and how many."""
    return Call(
        script("reap"),
        (*keys.shared, *keys.of_batch(batch_id)),
        [lane, cursor, count],
        lambda reply: (text(reply[0]), int(reply[1])),
    )


def cancel_job(
    keys: QueueKeys, job_id: str, *, lane: str, client: str, state: str, code: ErrorCode, message: str
) -> Call[Verdict]:
    """End a waiting single job, or mark a running one. Answers unknown | ended | cancelled | signalled | running."""
    touched = (*keys.shared, *keys.of_lane(lane), keys.job(job_id), keys.inbox(client))
    return Call(script("cancel_job"), touched, [job_id, lane, state, code.value, message], _verdict)


@dataclass(frozen=True, slots=True)
class BatchCancel:
    """What cancelling a batch found: `unknown`, `ended`, or `cancelling` with the consumers that run lines of it."""

    word: str
    status: str = ""
    consumers: tuple[str, ...] = ()


def cancel_batch(keys: QueueKeys, batch_id: str, *, lane: str) -> Call[BatchCancel]:
    """Let no line of the batch start any more."""

    def read(reply: list[Any]) -> BatchCancel:
        if reply[0] == b"cancelling":
            return BatchCancel("cancelling", "cancelling", tuple(text(name) for name in reply[1]))
        return BatchCancel(text(reply[0]), text(reply[1]) if len(reply) > 1 else "")

    return Call(script("cancel_batch"), (*keys.shared, *keys.of_batch(batch_id)), [lane], read)


def pause_batch(keys: QueueKeys, batch_id: str, *, lane: str, paused: bool) -> Call[Verdict]:
    """Take a batch out of its tenant's order, or put it back. Answers ok | ended (status) | unknown."""
    argv = [lane, "-" if paused else "+"]
    return Call(script("pause_batch"), (*keys.shared, keys.batch(batch_id)), argv, _verdict)


def collect(keys: QueueKeys, batch_id: str, *, collector: str, cursor: str) -> Call[int]:
    """Say how far a collector has written and synced. Answers how many results were trimmed."""
    touched = (*keys.shared, keys.batch(batch_id), keys.results(batch_id))
    return Call(script("collect"), touched, [collector, cursor], int)


def delete_batch(keys: QueueKeys, batch_id: str, *, lane: str) -> Call[Verdict]:
    """Remove a batch that has ended, with its results. Answers ok | open (status) | unknown."""
    touched = (*keys.shared, keys.batch(batch_id), keys.results(batch_id))
    return Call(script("delete_batch"), touched, [batch_id, lane], _verdict)


def delete_job(keys: QueueKeys, job_id: str) -> Call[Verdict]:
    """Remove the record of a single job that has ended. Answers ok | open | unknown."""
    return Call(script("delete_job"), (*keys.shared, keys.job(job_id)), [job_id], _verdict)


# --- settings, heartbeats -------------------------------------------------------------------------------------------


def configure(keys: QueueKeys, changes: Mapping[str, str]) -> Call[int]:
    """Change live settings; an empty value is the default again."""
    return Call(script("configure"), keys.shared, [part for pair in changes.items() for part in pair], int)


@dataclass(frozen=True, slots=True)
class Beat:
    """What a heartbeat brings back: the format of the queue's data, Redis' time in ms, the live settings."""

    format: int
    now_ms: int
    config: dict[bytes, bytes]


def beat(
    keys: QueueKeys,
    worker_id: str,
    *,
    ttl_ms: int,
    fields: Mapping[str, str | int],
    totals: Mapping[str, int] | None = None,
    told: Mapping[str, int] | None = None,
) -> Call[Beat]:
    """Write a worker's heartbeat. `told` are the totals that Redis is known to have counted."""

    def read(reply: list[Any]) -> Beat:
        form, now_ms, flat = reply
        return Beat(whole(form), int(now_ms), dict(zip(flat[::2], flat[1::2], strict=True)))

    argv: list[Any] = [worker_id, ttl_ms]
    for name, value in fields.items():
        argv += (name, value, "")
    for name, total in (totals or {}).items():
        argv += (TOTALS_PREFIX + name, total, (told or {}).get(name, 0))
    return Call(script("beat"), (*keys.shared, keys.worker(worker_id), keys.totals), argv, read)


@dataclass(frozen=True, slots=True)
class Lead:
    """Whether the caller sweeps now; the lanes that are being ended; all lanes (lane -> what is known); Redis' time."""

    leads: bool
    ending: list[str]
    lanes: dict[str, str]
    now_ms: int


def lead(keys: QueueKeys, consumer: str, *, interval_ms: int) -> Call[Lead]:
    """Become the sweeper for one interval, unless somebody is it already."""

    def read(reply: list[Any]) -> Lead:
        flat = [text(part) for part in reply[2]]
        lanes = dict(zip(flat[::2], flat[1::2], strict=True))
        return Lead(reply[0] == 1, [text(lane) for lane in reply[1]], lanes, int(reply[3]))

    return Call(script("lead"), (*keys.shared, keys.sweeper), [consumer, interval_ms], read)


def hold(keys: QueueKeys, name: str, *, token: str, ttl_ms: int, renew: bool) -> Call[bool]:
    """Take what only one process may do at a time, or (`renew`) keep it; answers whether the caller is the holder."""
    argv = [token, ttl_ms, int(renew)]
    return Call(script("hold"), (*keys.shared, keys.hold(name)), argv, lambda reply: reply == 1)


def let_go(keys: QueueKeys, name: str, *, token: str) -> Call[bool]:
    """Give up a hold."""
    return Call(script("let_go"), (*keys.shared, keys.hold(name)), [token], lambda reply: reply == 1)


def forget(keys: QueueKeys, consumer: str, *, lane: str) -> Call[bool]:
    """Remove a consumer of a lane whose worker is gone and which has nothing pending."""
    touched = (*keys.shared, keys.lane(lane), keys.worker(consumer))
    return Call(script("forget"), touched, [consumer], lambda reply: reply == 1)
