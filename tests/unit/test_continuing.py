"""Continuing an answer that was cut off: for which requests, how it is asked for, and what comes out."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq.scheduler.job import Job
from llmq.scheduler.kept import MAX_KEPT_BYTES, Kept
from llmq.scheduler.lease import Usage
from llmq.workers.continuing import MOST_WORDLESS, Draft, continuable, continued, is_plain, joined, kept_of
from llmq.workers.engines.base import Continues, EngineAnswer, EngineInfo

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASKED = [{"role": "user", "content": "Tell me."}]
KEPT = Kept("Once upon a time there", 5, "m")


def chat(**fields: Any) -> Job:
    """Return a chat request."""
    return Job(CHAT, {"model": "m", "messages": ASKED, **fields})


def engine(continues: Continues | None = Continues.PREFILL, *models: str) -> EngineInfo:
    """Return an engine that goes on in this way."""
    return EngineInfo("e", "", models or ("m",), 4, continues=continues)


def answer(text: str | None, usage: Usage = Usage(25, 7), url: str = CHAT) -> EngineAnswer:  # noqa: B008
    """Return the answer to the rest of a request."""
    said = {"text": text} if url == COMPLETIONS else {"message": {"role": "assistant", "content": text}}
    counts = {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
    body = {
        "id": "x",
        "choices": [{"index": 0, **said, "finish_reason": "stop"}],
        "usage": {**counts, "total_tokens": usage.total, "other": 1},
    }
    return EngineAnswer(200, orjson.dumps(body), "x", usage)


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 2**40), st.text(max_size=40))
def test_what_is_kept_comes_back(text: str, tokens: int, model: str) -> None:
    """Any text, as it is stored and read."""
    kept = Kept(text, tokens, model)
    assert kept == Kept.decode(kept.encode())


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02\x03", b"\x91\xa1a", b"\x93\xa1a\xff\xa1m", b"x" * 2**20])
def test_what_cannot_be_read_is_nothing(data: bytes) -> None:
    """Whoever can write to Redis can write anything there: the answer begins anew."""
    assert Kept.decode(data) is None


def test_too_much_and_half_a_character_are_not_kept() -> None:
    """It lies in Redis while the line waits; half of a pair is no text."""
    assert Kept("x" * MAX_KEPT_BYTES, 1, "m").encode() == b""
    assert Kept("\ud83d", 1, "m").encode() == b""


@pytest.mark.parametrize(
    "field",
    [
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_object"}},
        {"logprobs": True},
        {"n": 2},
        {"messages": [*ASKED, {"role": "assistant", "content": "Once"}]},
        {"messages": []},
    ],
)
def test_what_is_more_than_its_text_begins_anew(field: dict[str, Any]) -> None:
    """JSON mode, tools, log probabilities, several choices, and what continues something already."""
    assert continuable(chat())
    assert not continuable(chat(**field))


def test_other_endpoints_begin_anew() -> None:
    """Only chat and completions of one text."""
    assert continuable(Job(COMPLETIONS, {"prompt": "One text"}))
    assert not continuable(Job(COMPLETIONS, {"prompt": ["two", "texts"]}))
    assert not continuable(Job("/v1/embeddings", {"input": "x"}))


def test_the_rest_is_asked_for_in_the_way_of_the_engine() -> None:
    """A last message of the assistant; vLLM wants to be told; the limit counts what is there already."""
    rest = continued(chat(max_tokens=50, min_tokens=9), KEPT, engine())
    assert rest is not None
    assert [*ASKED, {"role": "assistant", "content": KEPT.text}] == rest.body["messages"]
    assert (45, 4) == (rest.body["max_tokens"], rest.body["min_tokens"])
    assert "continue_final_message" not in rest.body
    told = continued(chat(), KEPT, engine(Continues.FLAG))
    assert told is not None
    assert (True, False) == (told.body["continue_final_message"], told.body["add_generation_prompt"])
    more = continued(Job(COMPLETIONS, {"model": "m", "prompt": "P: "}), KEPT, engine(None))
    assert more is not None
    assert "P: " + KEPT.text == more.body["prompt"]


def test_in_doubt_it_begins_anew() -> None:
    """An engine that was not seen to continue, another model, an answer that is at its limit, nothing kept."""
    assert continued(chat(), KEPT, engine(None)) is None
    assert continued(chat(model="other"), KEPT, engine(Continues.PREFILL, "m", "other")) is None
    assert continued(chat(model="default"), KEPT, engine(Continues.PREFILL, "other")) is None
    assert continued(chat(max_tokens=5), KEPT, engine()) is None
    assert continued(chat(), Kept("", 0, "m"), engine()) is None


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
def test_both_parts_are_one_answer(url: str) -> None:
    """The whole text, and the usage of an answer that was never cut off; unknown fields stay."""
    whole = joined(answer(" was a king.", url=url), KEPT)
    body = orjson.loads(whole.body)
    text = body["choices"][0]["text"] if url == COMPLETIONS else body["choices"][0]["message"]["content"]
    assert "Once upon a time there was a king." == text
    assert {"prompt_tokens": 20, "completion_tokens": 12, "total_tokens": 32, "other": 1} == body["usage"]
    assert Usage(20, 12) == whole.usage


def test_an_engine_that_says_the_beginning_again_is_heard_once() -> None:
    """Some send the whole text; a few words that come again are the model's own."""
    whole = joined(answer(KEPT.text + " was"), KEPT)
    assert KEPT.text + " was" == orjson.loads(whole.body)["choices"][0]["message"]["content"]
    short = joined(answer(" and and"), Kept(" and", 1, "m"))
    assert " and and and" == orjson.loads(short.body)["choices"][0]["message"]["content"]
    assert KEPT.text == orjson.loads(joined(answer(None), KEPT).body)["choices"][0]["message"]["content"]


def test_an_answer_may_be_cut_off_more_than_once() -> None:
    """What was kept before and what came then; a broken character keeps nothing."""
    assert Kept(KEPT.text + " was", 6, "m") == kept_of(KEPT, " was", 1, "m")
    assert Kept("Once", 1, "m") == kept_of(None, "Once", 1, "m")
    assert kept_of(None, "", 0, "m") is None
    assert kept_of(KEPT, " \ufffd", 1, "m") is None


def test_a_chunk_without_text_may_hold_what_would_be_lost() -> None:
    """The role, and a token that makes no text yet, lose nothing; reasoning and tool calls do."""
    assert is_plain(b'{"choices": [{"delta": {"role": "assistant", "content": ""}}]}')
    assert is_plain(b'{"choices": []}')
    assert not is_plain(b'{"choices": [{"delta": {"reasoning_content": "Hm"}}]}')
    assert not is_plain(b'{"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}')
    assert not is_plain(b"garbage")


ROLE = b'{"choices": [{"delta": {"role": "assistant", "content": ""}}]}'
REASONING = b'{"choices": [{"delta": {"reasoning_content": "Hm"}}]}'


def test_a_draft_is_the_text_of_its_pieces() -> None:
    """Chunks without text, of which a model that speaks in halves of characters says many, are no part of it."""
    draft = Draft()
    draft.add("", ROLE)
    for piece in ("one", " two"):
        draft.add(piece, b"not looked at")
        for _ in range(3 * MOST_WORDLESS):
            draft.add("", ROLE)
    assert "one two" == draft.text()
    draft.add(" three", b"")
    assert "one two three" == draft.text()


@pytest.mark.parametrize("others", [0, MOST_WORDLESS, 3 * MOST_WORDLESS])
def test_a_draft_of_more_than_text_is_not_gone_on_from(others: int) -> None:
    """Wherever the reasoning stands among chunks that hold nothing."""
    draft = Draft()
    draft.add("one", b"")
    for _ in range(others):
        draft.add("", ROLE)
    draft.add("", REASONING)
    for _ in range(others):
        draft.add("", ROLE)
    assert draft.text() is None
