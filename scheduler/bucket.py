"""The bucket as it is now: which limit is in force, what it holds, how often batch found it empty.

Reads what the claim script wrote, with the same arithmetic, for `llmq rate` and `llmq status`. It pays nothing and
refills nothing: only the claim script does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llmq.scheduler.limit import Limit
from llmq.scheduler.stored_number import finite, whole
from llmq.scheduler.windows import PlanState, plan_state


@dataclass(frozen=True, slots=True)
class Bucket:
    """The bucket at one moment.

    `limit` of None is no limit, and then `tokens` is None too. `open` is False while a window is closed, and windows
    change what is in force at `changes_at_ms`. `exhausted` counts the times batch found the bucket empty, `wait_s` is
    how long it then waited, on average (None: never), `waited_s` all of it together; `dry_s` is how long it has been
    waiting now (None: it is not).
    """

    limit: Limit | None
    tokens: float | None
    exhausted: int
    wait_s: float | None
    dry_s: float | None
    waited_s: float = 0.0
    open: bool = True
    changes_at_ms: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the `bucket` of `status --json`: rate in jobs or LLM tokens a second, null where there is no limit."""
        limit = self.limit
        return {
            "rate": limit.rate.per_second if limit else None,
            "unit": limit.rate.unit if limit else None,
            "burst": limit.burst if limit else None,
            "tokens": None if self.tokens is None else round(self.tokens, 3),
            "exhausted": self.exhausted,
            "wait_s": None if self.wait_s is None else round(self.wait_s, 3),
            "dry_s": self.dry_s,
            "open": self.open,
            "changes_at": None if self.changes_at_ms is None else self.changes_at_ms / 1000,
        }


def plain_limit(config: Mapping[bytes, bytes]) -> Limit | None:
    """Return the limit that `llmq rate` set, whatever windows say now."""
    rate, burst, unit = (config.get(name, b"").decode(errors="replace") for name in (b"rate", b"burst", b"unit"))
    return Limit.stored(rate, burst, unit)


def bucket_of(config: Mapping[bytes, bytes], bucket: Mapping[bytes, bytes], now_ms: int) -> Bucket:
    """Return the bucket as the next claim would find it."""
    plan = plan_state(config.get(b"plan", b"").decode(errors="replace"), now_ms)
    limit = _in_force(plan, config)
    exhausted = whole(bucket.get(b"exhausted"))
    dry_ms = finite(bucket.get(b"dry_ms"), 0)
    dry_since = finite(bucket.get(b"dry"), 0)
    return Bucket(
        limit,
        _tokens(limit, bucket, now_ms),
        exhausted,
        dry_ms / exhausted / 1000 if exhausted else None,
        max(0, now_ms - dry_since) / 1000 if dry_since else None,
        dry_ms / 1000,
        plan.action != "closed",
        plan.changes_at_ms,
    )


def _in_force(plan: PlanState, config: Mapping[bytes, bytes]) -> Limit | None:
    match plan.action:
        case Limit():
            return plan.action
        case "off":
            return None
        case "open" | "closed":
            return plain_limit(config)


def _tokens(limit: Limit | None, bucket: Mapping[bytes, bytes], now_ms: int) -> float | None:
    if limit is None:
        return None
    held = finite(bucket.get(b"tokens"), limit.burst)
    if bucket.get(b"unit", limit.rate.unit.encode()) != limit.rate.unit.encode():
        held = max(0.0, held)
    elapsed_ms = max(0.0, now_ms - finite(bucket.get(b"at"), now_ms))
    return min(limit.burst, held + elapsed_ms * limit.rate.per_second / 1000)
