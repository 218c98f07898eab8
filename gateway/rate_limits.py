"""What a caller is told of its limits: the `x-ratelimit-*` headers, and the answer of a call that was not let in.

Names, units and shape are OpenAI's, so that its clients wait as they should. Values in, values out: the limits are
kept in Redis (`scheduler/key_scripts.py`).
"""

from __future__ import annotations

from llmq.gateway.errors import ApiError
from llmq.scheduler.api_key import KeyLimits
from llmq.scheduler.key_scripts import Entry

#: After how long to try again where calls run at their limit: nobody knows when one of them ends.
TRY_AGAIN_S = 1.0


def headers_of(limits: KeyLimits, entry: Entry) -> dict[str, str]:
    """Return the headers of an answer: limit, what remains, and when all of it is back; only of limits that are set."""
    headers: dict[str, str] = {}
    for name, limit, left, full_s in (
        ("requests", limits.requests, entry.requests_left, entry.requests_full_s),
        ("tokens", limits.tokens, entry.tokens_left, entry.tokens_full_s),
    ):
        if limit is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(left)
            headers[f"x-ratelimit-reset-{name}"] = go_duration(full_s)
    return headers


def refusal(limits: KeyLimits, entry: Entry, cost: int) -> ApiError:
    """Return the 429 of a call that was not let in; `cost` are the LLM tokens that it was expected to take."""
    headers = headers_of(limits, entry)
    if entry.again_s is not None and entry.again_s < 0:
        return ApiError(
            429,
            f"this request is expected to take {cost:,} LLM tokens, more than this API key's whole limit of "
            f"{limits.tokens:,} a minute: make it shorter, or lower its max_tokens",
            code="rate_limit_exceeded",
            kind="tokens",
            headers=headers | {"x-should-retry": "false"},
        )
    again_s = TRY_AGAIN_S if entry.again_s is None else entry.again_s
    what, kind = {
        "requests": (f"its {limits.requests} requests a minute", "requests"),
        "tokens": (f"its {limits.tokens} LLM tokens a minute (this request is expected to take {cost:,})", "tokens"),
        "concurrency": (f"its {limits.concurrency} requests at one time", "requests"),
    }[entry.refused]
    return ApiError(
        429,
        f"Rate limit reached: this API key has used {what}. Please try again in {go_duration(again_s)}.",
        code="rate_limit_exceeded",
        kind=kind,
        retry_after=again_s,
        # OpenAI's clients read this one first: a whole second is long for a limit that is back in 20 ms.
        headers=headers | {"retry-after-ms": str(max(1, round(again_s * 1000)))},
    )


def go_duration(seconds: float) -> str:
    """Write a duration as OpenAI does, which is as Go does: `20ms`, `1.5s`, `6m0s`, `1h0m2s`."""
    milliseconds = max(0, round(seconds * 1000))
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    second = f"{rest / 1000:.3f}".rstrip("0").rstrip(".")
    if hours:
        return f"{hours}h{minutes}m{second}s"
    return f"{minutes}m{second}s" if minutes else f"{second}s"
