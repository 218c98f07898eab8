"""Chunks that repeat the last one are cut, not parsed: what comes of a stream is the same either way."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq.workers.engines.answering import StreamReader
from llmq.workers.engines.assembly import ChatAssembler, CompletionAssembler, assembler_for
from llmq.workers.engines.merge import load
from llmq.workers.engines.repetition import MOST_IN_VAIN, Repetition

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chat(content: str | None, *, finish: str | None = None, delta: Any = None, choice: Any = None, **top: Any) -> Any:
    """Return a chunk of a chat completion."""
    holder = {"content": content, **(delta or {})}
    choices = [{"index": 0, "delta": holder, "finish_reason": finish, **(choice or {})}]
    return {"id": "c1", "object": "chat.completion.chunk", "model": "m", "choices": choices, **top}


def plain(text: str, **choice: Any) -> Any:
    """Return a chunk of a completion."""
    return {"id": "c1", "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": None, **choice}]}


def written(chunk: Any, compact: bool = True) -> bytes:
    """Return a chunk as an engine writes it."""
    return orjson.dumps(chunk) if compact else json.dumps(chunk).encode()


def read_in_full(url: str, chunks: list[bytes]) -> tuple[list[str], bytes]:
    """Return texts and answer of a stream of which every chunk is parsed."""
    assembler = assembler_for(url)
    return [assembler.feed(load(data)) for data in chunks], assembler.body()


def read(url: str, chunks: list[bytes]) -> tuple[list[str], bytes, int]:
    """Return the same as it is read, and how many chunks were only cut."""
    assembler, texts, cut = assembler_for(url), [], 0
    for data in chunks:
        text = assembler.again(data)
        if text is None:
            text = assembler.feed(chunk := load(data))
            assembler.learn(data, chunk)
        else:
            cut += 1
        texts.append(text)
    return texts, assembler.body(), cut


odd = ["a", " b", "\n", '"', "\\", "é", "\U0001f600", "\u2028", "\x7f", "~", '":"', "}", ""]
words = st.sampled_from(odd) | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
chat_chunks = st.builds(
    chat,
    words | st.none(),
    finish=st.sampled_from([None, None, None, "stop"]),
    delta=st.sampled_from(
        [{}, {}, {"role": "assistant"}, {"reasoning_content": "r"}, {"tool_calls": [{"index": 0, "id": "t"}]},
         {"refusal": None}]
    ),
    choice=st.sampled_from(
        [{}, {}, {"logprobs": None}, {"logprobs": {"content": [1]}}, {"index": 1}, {"token_ids": [5]}]
    ),
    created=st.sampled_from([1, 1, 2]),
    note=st.sampled_from([None, "content", {"content": "a"}]),
)  # fmt: skip
plain_chunks = st.builds(plain, words, finish_reason=st.sampled_from([None, None, "length"]), logprobs=st.none())


@given(st.lists(st.tuples(chat_chunks, st.booleans()), max_size=12))
def test_a_chat_is_read_as_if_every_chunk_was_parsed(stream: list[tuple[Any, bool]]) -> None:
    """Whatever changes from one chunk to the next, texts and answer come out the same."""
    chunks = [written(chunk, compact) for chunk, compact in stream]
    assert read_in_full(CHAT, chunks) == read(CHAT, chunks)[:2]


@given(st.lists(plain_chunks, max_size=12))
def test_so_is_a_completion(stream: list[Any]) -> None:
    """Whose text stands elsewhere."""
    chunks = [written(chunk) for chunk in stream]
    assert read_in_full(COMPLETIONS, chunks) == read(COMPLETIONS, chunks)[:2]


@pytest.mark.parametrize("compact", [True, False])
def test_most_chunks_are_only_cut(compact: bool) -> None:
    """All but those that change something; the text may hold anything that JSON can."""
    texts = ["Hello", " wörld", "!\n", '"quoted"', "\\", "\U0001f600", " end"]
    chunks = [written(chat("", delta={"role": "assistant"}), compact), *(written(chat(t), compact) for t in texts)]
    told, body, cut = read(CHAT, [*chunks, written(chat(None, finish="stop"), compact)])
    assert "".join(texts) == "".join(told) == json.loads(body)["choices"][0]["message"]["content"]
    assert len(texts) - 1 == cut


@pytest.mark.parametrize(
    "data",
    [b'{"choices":[{"index":0,"delta":{"content":"a\\"}}]}', b"\xff", b"a\x00", b'a","x":"b'],
)
def test_what_is_no_text_is_left_to_who_parses(data: bytes) -> None:
    """A cut is not taken for a text only because its edges are right."""
    repetition = Repetition("content")
    first = written(chat("word"))
    repetition.learn(first, load(first))
    head, _, tail = first.partition(b"word")
    assert repetition.text_of(head + b"next" + tail) == "next"
    assert repetition.text_of(head + data + tail) is None


def test_an_engine_that_numbers_its_chunks_is_given_up() -> None:
    """Proving what will not repeat costs more than it gives."""
    repetition = Repetition("content")
    for number in range(MOST_IN_VAIN):
        repetition.learn(data := written(chat("x", number=number)), load(data))
    again = written(chat("x", number=number))
    assert repetition.text_of(again) == "x"
    for number in range(MOST_IN_VAIN + 1):
        repetition.learn(data := written(chat("x", number=number)), load(data))
    assert repetition.text_of(data) is None


def test_the_texts_of_repeated_chunks_are_handed_on_with_their_bytes() -> None:
    """Byte for byte, as the engine wrote them."""
    told: list[tuple[str, bytes]] = []
    reader = StreamReader(ChatAssembler(), 1000, "", lambda text, chunk: told.append((text, chunk)))
    chunks = [written(chat(text)) for text in ("a", "b", "c")] + [written(chat(None, finish="stop"))]
    for chunk in chunks:
        assert reader.feed(b"data: " + chunk + b"\n\n") is None
    answer = reader.feed(b"data: [DONE]\n\n")
    assert answer is not None
    assert "abc" == json.loads(answer.body)["choices"][0]["message"]["content"]
    assert list(zip(["a", "b", "c", ""], chunks, strict=True)) == told


def test_a_completion_of_one_choice_repeats() -> None:
    """As chat does."""
    assembler = CompletionAssembler()
    first, second = written(plain("a")), written(plain("b"))
    assembler.feed(chunk := load(first))
    assembler.learn(first, chunk)
    assert "b" == assembler.again(second)
    assert "ab" == json.loads(assembler.body())["choices"][0]["text"]
