"""What callers are told of their limits: headers, refusals and durations, as OpenAI writes them."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest

from llmq.gateway.rate_limits import go_duration, headers_of, refusal
from llmq.scheduler.api_key import KeyLimits
from llmq.scheduler.key_scripts import Entry

ALL = KeyLimits(60, 1000, 4)
IN = Entry("", None, 59, 1.0, 400, 36.0, 1)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (-1, "0s"),
        (0.0004, "0s"),
        (0.02, "20ms"),
        (0.9996, "1s"),
        (1, "1s"),
        (8.64, "8.64s"),
        (60, "1m0s"),
        (360, "6m0s"),
        (72.5, "1m12.5s"),
        (3602, "1h0m2s"),
        (90_000, "25h0m0s"),
    ],
)
def test_a_duration_reads_as_go_writes_it(seconds: float, text: str) -> None:
    """OpenAI's clients and dashboards parse this form."""
    assert text == go_duration(seconds)


def test_the_headers_are_openai_s() -> None:
    """Three for requests, three for LLM tokens."""
    assert {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "400",
        "x-ratelimit-reset-tokens": "36s",
    } == headers_of(ALL, IN)


def test_a_limit_that_is_not_set_is_not_told() -> None:
    """A key without limits has no headers."""
    assert {} == headers_of(KeyLimits(concurrency=4), IN)
    assert {"x-ratelimit-limit-tokens"} == {
        name for name in headers_of(KeyLimits(tokens=9), IN) if name.startswith("x-ratelimit-limit")
    }


@pytest.mark.parametrize(
    ("refused", "again_s", "kind", "words", "retry_after", "retry_after_ms"),
    [
        ("requests", 0.02, "requests", "60 requests a minute. Please try again in 20ms", "1", "20"),
        ("tokens", 1.2, "tokens", "1000 LLM tokens a minute (this request is expected to take 700)", "2", "1200"),
        ("concurrency", None, "requests", "4 requests at one time", "1", "1000"),
    ],
)
def test_a_refusal_has_openai_s_shape(
    refused: str, again_s: float | None, kind: str, words: str, retry_after: str, retry_after_ms: str
) -> None:
    """429, code, type, and when to come again, in both headers that its clients read."""
    error = refusal(ALL, replace(IN, refused=refused, again_s=again_s), 700)
    body = orjson.loads(error.body())["error"]
    assert (429, "rate_limit_exceeded", kind, None) == (error.status, body["code"], body["type"], body["param"])
    assert words in body["message"]
    assert (retry_after, retry_after_ms) == (error.headers["retry-after"], error.headers["retry-after-ms"])
    assert headers_of(ALL, IN).items() <= error.headers.items()


def test_what_can_never_get_in_is_not_tried_again() -> None:
    """The official clients repeat every 429, unless they are told not to."""
    error = refusal(ALL, replace(IN, refused="tokens", again_s=-0.001), 5000)
    assert "false" == error.headers["x-should-retry"]
    assert "retry-after" not in error.headers
    assert "5,000 LLM tokens" in error.message
