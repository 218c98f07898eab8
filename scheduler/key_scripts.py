"""The Lua scripts of API keys, one typed function each, without logic (as `scripts/`, for the queue)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llmq.scheduler.api_key import KeyLimits
from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.scripts import Call, Verdict, script, text


def keep_key(keys: QueueKeys, key_id: str, *, record: bytes, before: bytes, most: int) -> Call[Verdict]:
    """Make an API key, or change the one that was read as `before`. Answers ok | changed | full (most)."""
    return Call(
        script("keep_key"),
        (*keys.shared, keys.api_keys),
        [key_id, record, before, most],
        lambda reply: Verdict(*(text(part) for part in reply)),
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """What came of asking to be let in, and what the key has left.

    `refused` is the limit that stands in the way ("requests", "tokens", "concurrency"; "": the call is in), `again_s`
    the seconds after which to try again: None where nobody knows, negative where it never helps, because the call
    costs more than a minute gives. `requests_full_s` and `tokens_full_s` are the seconds until all are back.
    """

    refused: str
    again_s: float | None
    requests_left: int
    requests_full_s: float
    tokens_left: int
    tokens_full_s: float
    running: int


def enter(keys: QueueKeys, key_id: str, *, call_id: str, limits: KeyLimits, cost: int, lease_ms: int) -> Call[Entry]:
    """Let one call in within all limits of its key, or refuse it and take nothing."""

    def read(reply: list[Any]) -> Entry:
        refused, again, requests, requests_ms, tokens, tokens_ms, running = reply
        return Entry(
            text(refused),
            int(again) / 1000 if again else None,
            int(requests),
            int(requests_ms) / 1000,
            int(tokens),
            int(tokens_ms) / 1000,
            int(running),
        )

    argv = [call_id, _given(limits.requests), _given(limits.tokens), _given(limits.concurrency), cost, lease_ms]
    return Call(script("enter"), (*keys.shared, keys.limit(key_id), keys.passes(key_id)), argv, read)


def stay(keys: QueueKeys, key_id: str, *, call_ids: Sequence[str], lease_ms: int) -> Call[bool]:
    """Keep the places of calls that are still served."""
    return Call(
        script("stay"), (*keys.shared, keys.passes(key_id)), [lease_ms, *call_ids], lambda reply: bool(reply == 1)
    )


def leave(keys: QueueKeys, key_id: str, *, call_id: str, limits: KeyLimits, more: int) -> Call[bool]:
    """Free a call's place; `more` are the LLM tokens that it took on top of what was expected."""
    argv = [call_id, _given(limits.requests), _given(limits.tokens), more]
    touched = (*keys.shared, keys.limit(key_id), keys.passes(key_id))
    return Call(script("leave"), touched, argv, lambda reply: bool(reply == 1))


def _given(limit: int | None) -> int | str:
    return "" if limit is None else limit
