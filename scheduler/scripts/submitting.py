"""The calls that put jobs in: single ones, and batches in chunks of lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llmq.scheduler.job import TrafficClass
from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.scripts.call import Call, script, text


@dataclass(frozen=True, slots=True)
class Verdict:
    """A script's answer of a word and a value, such as `ok` and the next line, or `full` and the cap."""

    word: str
    value: str = ""

    @property
    def number(self) -> int:
        """The value as a number."""
        return int(self.value)


def verdict_of(reply: list[Any]) -> Verdict:
    """Read the reply of a script that says yes or no."""
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
    return Call(script("submit_job"), (*keys.shared, keys.lane(lane), keys.job(job_id)), argv, verdict_of)


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
    return Call(script("open_batch"), (*keys.shared, keys.batch(batch_id)), argv, verdict_of)


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
    return Call(script("submit_lines"), touched, argv, verdict_of)


def seal_batch(keys: QueueKeys, batch_id: str, *, lane: str, next_line: int) -> Call[Verdict]:
    """Say that no line comes any more. Answers ok (total) | open (next line) | closed (status)."""
    return Call(script("seal_batch"), (*keys.shared, *keys.of_batch(batch_id)), [lane, next_line], verdict_of)
