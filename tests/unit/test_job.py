"""The job: what it is estimated to cost, and how it is stored."""

from __future__ import annotations

import pytest

from llmq.scheduler.errors import EncodingError
from llmq.scheduler.job import MAX_DEPTH, MEDIA_TOKENS, MOST_TOKENS, Job


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


def test_a_picture_costs_what_an_engine_makes_of_it() -> None:
    """Its bytes are no text: 4 MiB of base64 are not a million tokens."""
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 2**22}}
    message = {"role": "user", "content": [picture]}
    assert MEDIA_TOKENS <= job(messages=[message], max_tokens=0).cost() <= MEDIA_TOKENS + 10


class TestOfJson:
    """A job whose body came as bytes."""

    RAW = b'{"b" : 18446744073709551616, "a": 1e400, "a": "\\ud800", "messages":[]}'

    def test_it_is_stored_as_it_came(self) -> None:
        """Byte for byte, whatever no value could hold."""
        stored = Job.of_json("/v1/chat/completions", self.RAW).encode()
        assert self.RAW == Job.decode(stored).raw
        assert [] == Job.decode(stored).body["messages"]

    def test_what_is_no_object_is_refused(self) -> None:
        """As everywhere, with the field at fault."""
        with pytest.raises(EncodingError, match="body: expected a JSON object, got an array"):
            Job.of_json("/v1/chat/completions", b"[]")

    @pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b'{"a":', b"}")])
    def test_what_is_too_deep_is_refused(self, opening: bytes, closing: bytes) -> None:
        """Recursion must end somewhere; a wide body is not a deep one."""
        depth = MAX_DEPTH + 1
        with pytest.raises(EncodingError, match="nested deeper"):
            Job.of_json("/v1/responses", b'{"input":' + opening * depth + b"1" + closing * depth + b"}")
        Job.of_json("/v1/responses", b'{"input":[' + b"[]," * 1000 + b"0]}")

    def test_a_stored_one_that_is_broken_is_told_so(self) -> None:
        """Nobody but `encode` writes it; what else is there is refused."""
        stored = Job.of_json("/v1/chat/completions", self.RAW).encode().replace(b'"b" :', b'"b" ;')
        with pytest.raises(EncodingError):
            Job.decode(stored)
