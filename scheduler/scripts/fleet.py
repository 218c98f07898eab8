"""The calls of settings and workers: configure, heartbeat, who leads, who holds a name, who is gone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.scripts.call import Call, script, text
from llmq.scheduler.stored_number import whole
from llmq.scheduler.totals import PREFIX as TOTALS_PREFIX


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
