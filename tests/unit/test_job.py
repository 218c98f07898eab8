"""The job: what it is estimated to cost."""

from __future__ import annotations

import pytest

from llmq.scheduler.job import MOST_TOKENS, Job


def job(**fields: object) -> Job:
    """Return a chat job that says nothing, with these fields."""
    return Job("/v1/chat/completions", {"messages": [], **fields})


@pytest.mark.parametrize(
    ("fields", "cost"),
    [
        ({}, 256),
        ({"max_tokens": 10}, 10),
        ({"max_tokens": 10, "n": 3}, 30),
        ({"max_tokens": -1}, 256),
        ({"messages": [{"role": "user", "content": "x" * 400}], "max_completion_tokens": 1}, 102),
    ],
)
def test_a_cost_is_the_text_and_the_limit_of_the_answer(fields: dict[str, object], cost: int) -> None:
    """Four characters a token; 256 tokens where the body names no limit."""
    assert cost == job(**fields).cost()


@pytest.mark.parametrize("fields", [{"max_tokens": 2**63}, {"max_tokens": 10**6, "n": 10**6}])
def test_no_job_costs_what_would_stop_all_others(fields: dict[str, object]) -> None:
    """The engine refuses such a line at once; until the bucket had paid for it, no other would start (G16)."""
    assert MOST_TOKENS == job(**fields).cost()
