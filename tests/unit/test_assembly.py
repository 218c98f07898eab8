"""Streams put together: the whole answer has every field that the engine would have sent without a stream.

Recorded from llama.cpp, vLLM and transformers serve (tests/data/engine-samples). Ids, times and the state of the
prompt cache differ between two requests, and null is what vLLM writes for absent: they are left out on both sides.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmq.scheduler.lease import Usage
from llmq.workers.engines.assembly import Assembler, assembler_for
from llmq.workers.engines.sse import EventParser

SAMPLES = Path(__file__).parents[1] / "data" / "engine-samples"
ENGINES = ("llamacpp", "vllm", "transformers")
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"

#: Fields that differ between two requests with the same body.
OF_THE_REQUEST = ("id", "created", "created_at", "timings", "prompt_tokens_details", "system_fingerprint")

#: What transformers streams of it: it never sends the end of a text that is no whole character.
WHOLE_CHARACTERS = "se"


def sample(name: str) -> Any:
    return json.loads((SAMPLES / f"{name}.json").read_text(encoding="utf-8"))


def chunks_of(name: str) -> list[Any]:
    lines = (line for _, line in sample(name)["sse_lines"])
    events = EventParser(2**20).feed("".join(f"{line}\n\n" for line in lines).encode())
    return [json.loads(event) for event in events if event != b"[DONE]"]


def assembled(url: str, chunks: Iterable[Any]) -> tuple[Any, str, Assembler]:
    """Feed the chunks; return the whole body, the text that was told on the way, and the assembler."""
    assembler = assembler_for(url)
    text = "".join([assembler.feed(chunk) for chunk in chunks])
    return json.loads(assembler.body()), text, assembler


def comparable(value: Any) -> Any:
    """Leave out what belongs to one request only, and null."""
    if isinstance(value, dict):
        kept = {key: comparable(item) for key, item in value.items() if key not in OF_THE_REQUEST}
        return {key: item for key, item in kept.items() if item is not None}
    return [comparable(item) for item in value] if isinstance(value, list) else value


def split_into_chunks(body: Any) -> Iterator[Any]:
    """Cut a whole chat answer into the chunks that an engine would have streamed, a character or token at a time."""
    head = {key: value for key, value in body.items() if key not in ("choices", "usage", "timings", "object")}
    head["object"] = "chat.completion.chunk"
    for choice in body["choices"]:
        at = {"index": choice["index"]}
        message = dict(choice["message"])
        content = message.pop("content")
        yield {**head, "choices": [{**at, "delta": {**message, "content": ""}, "finish_reason": None}]}
        for character in content:
            yield {**head, "choices": [{**at, "delta": {"content": character}, "logprobs": None}]}
        for token in (choice.get("logprobs") or {}).get("content") or []:
            yield {**head, "choices": [{**at, "delta": {}, "logprobs": {"content": [token]}}]}
        rest = {key: value for key, value in choice.items() if key not in ("message", "logprobs")}
        yield {**head, "choices": [{**rest, "delta": {}}]}
    yield {**head, "choices": [], "usage": body["usage"], **({"timings": body["timings"]} if "timings" in body else {})}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_recorded_chat_stream_becomes_the_recorded_whole_answer(engine: str) -> None:
    """All three engines: the same request streamed and whole differ in nothing but ids and times."""
    whole = sample(f"{engine}-chat")["body"]
    if engine == "transformers":
        whole["choices"][0]["message"]["content"] = WHOLE_CHARACTERS

    body, text, assembler = assembled(CHAT, chunks_of(f"{engine}-chat-stream"))

    assert comparable(whole) == comparable(body)
    assert whole["choices"][0]["message"]["content"] == text
    assert assembler.finished
    assert Usage(whole["usage"]["prompt_tokens"], 12) == assembler.usage()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_recorded_completion_stream_becomes_a_whole_answer(engine: str) -> None:
    """The streams were recorded for half the tokens: their text is the beginning of the whole one."""
    whole = sample(f"{engine}-completions")["body"]
    expected_choice = {**whole["choices"][0], "text": ""}

    body, text, assembler = assembled(COMPLETIONS, chunks_of(f"{engine}-completions-stream"))

    choice = body["choices"][0]
    assert whole["choices"][0]["text"].startswith(choice["text"])
    assert text == choice["text"]
    assert comparable(expected_choice) == comparable({**choice, "text": ""})
    assert (whole["object"], whole["model"]) == (body["object"], body["model"])
    assert assembler.finished


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("what", ["chat-logprobs", "chat-n2", "chat-json-schema", "chat-stop"])
def test_a_recorded_answer_survives_being_streamed(engine: str, what: str) -> None:
    """Logprobs, two choices, and every field of each engine come back from chunks as they were, null included."""
    whole = sample(f"{engine}-{what}")["body"]

    body, text, _ = assembled(CHAT, split_into_chunks(whole))

    for choice in whole["choices"]:
        # A null in the whole answer and none at all in chunks say the same.
        choice.setdefault("logprobs", None)
    for choice in body["choices"]:
        choice.setdefault("logprobs", None)
    assert whole == body
    assert whole["choices"][0]["message"]["content"] == text


def test_tool_calls_are_put_together_from_fragments_by_index() -> None:
    """Fragments of two calls may alternate; names come once, arguments in pieces, the index is the stream's only."""

    def call(index: int, **function: Any) -> Any:
        return {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": index, **function}]}}]}

    chunks = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}]},
        call(0, id="call_a", type="function", function={"name": "search", "arguments": ""}),
        call(1, id="call_b", type="function", function={"name": "add", "arguments": '{"a"'}),
        call(0, id="", function={"name": "", "arguments": '{"q": '}),
        call(1, function={"arguments": ": 1}"}),
        call(0, function={"arguments": '"x"}'}),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
    ]
    expected = [
        {"id": "call_a", "type": "function", "function": {"name": "search", "arguments": '{"q": "x"}'}},
        {"id": "call_b", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
    ]

    body, text, assembler = assembled(CHAT, chunks)

    assert {"role": "assistant", "content": None, "tool_calls": expected} == body["choices"][0]["message"]
    assert text == ""
    assert assembler.finished


def test_tool_calls_that_share_an_index_but_not_an_id_are_different_calls() -> None:
    """Some engines number all their parallel calls 0."""
    calls = [{"index": 0, "id": name, "function": {"name": name, "arguments": "{}"}} for name in ("a", "b")]

    body, _, _ = assembled(CHAT, [{"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]} for call in calls])

    assert ["a", "b"] == [call["function"]["name"] for call in body["choices"][0]["message"]["tool_calls"]]


def test_fields_that_nobody_knows_are_kept() -> None:
    """Reasoning, refusals, token ids and inventions: texts grow, lists grow, the last of all else stays."""
    chunks = [
        {"id": "1", "new": {"a": 1}, "choices": [{"index": 0, "delta": {"reasoning_content": "th", "weird": "x"}}]},
        {
            "id": "1",
            "choices": [{"index": 0, "delta": {"reasoning_content": "ink", "refusal": "no"}, "token_ids": [1]}],
        },
        {
            "id": "1",
            "new": {"a": 2},
            "choices": [{"index": 0, "delta": {"weird": "y"}, "token_ids": [2], "score": 0.5}],
        },
        {"id": "1", "new": None, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": 7}]},
    ]

    body, _, _ = assembled(CHAT, chunks)

    assert {"a": 2} == body["new"]
    choice = body["choices"][0]
    assert {"role": "assistant", "content": None, "reasoning_content": "think", "weird": "xy", "refusal": "no"} == (
        choice["message"]
    )
    assert ([1, 2], 0.5, "stop", 7) == (
        choice["token_ids"],
        choice["score"],
        choice["finish_reason"],
        choice["stop_reason"],
    )


def test_the_old_function_call_and_legacy_logprobs_are_put_together() -> None:
    """Two forms that OpenAI has left behind and engines still speak."""
    function = [{"function_call": {"name": "f", "arguments": "{"}}, {"function_call": {"arguments": "}"}}]
    legacy: list[Any] = [
        {"tokens": [token], "token_logprobs": [-1.0], "top_logprobs": [{token: -1.0}]} for token in "ab"
    ]

    chat, _, _ = assembled(CHAT, [{"choices": [{"index": 0, "delta": delta}]} for delta in function])
    completion, _, _ = assembled(
        COMPLETIONS,
        [{"choices": [{"index": 0, "text": logprobs["tokens"][0], "logprobs": logprobs}]} for logprobs in legacy],
    )

    assert {"name": "f", "arguments": "{}"} == chat["choices"][0]["message"]["function_call"]
    assert {"tokens": ["a", "b"], "token_logprobs": [-1.0, -1.0], "top_logprobs": [{"a": -1.0}, {"b": -1.0}]} == (
        completion["choices"][0]["logprobs"]
    )


def test_halves_of_a_character_that_two_chunks_brought_become_one() -> None:
    """Engines that cut UTF-16 in two write half a surrogate pair into each chunk."""
    chunks = [{"choices": [{"index": 0, "delta": {"content": half}}]} for half in ("\ud83d", "\ude00", "!\ud83d")]

    body, _, _ = assembled(CHAT, chunks)

    assert "\U0001f600!\ufffd" == body["choices"][0]["message"]["content"]


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_an_answer_that_was_broken_off_is_not_finished(reason: str | None) -> None:
    """vLLM and SGLang finish with `abort` what they throw away at shutdown; one choice without a reason is enough."""
    ends = [{"index": 0, "delta": {}, "finish_reason": "stop"}, {"index": 1, "delta": {}, "finish_reason": reason}]

    _, _, assembler = assembled(CHAT, [{"choices": ends}])

    assert not assembler.finished


def test_a_recorded_responses_stream_becomes_its_last_event() -> None:
    """transformers streams responses whether asked to or not."""
    events = EventParser(2**20).feed(sample("transformers-responses")["body"].encode())
    chunks = [json.loads(event) for event in events]

    body, text, assembler = assembled(RESPONSES, chunks)

    assert chunks[-1]["response"] == body
    assert body["output"][0]["content"][0]["text"] == text
    assert assembler.finished
    assert assembler.last
    assert Usage(22, 4) == assembler.usage()


def test_items_of_a_response_are_kept_when_its_last_event_omits_them() -> None:
    """And what stands beside the response in that event is part of the answer."""
    item = {"id": "msg_1", "type": "message", "content": [{"type": "output_text", "text": "hi"}]}
    events = [
        {"type": "response.created", "response": {"id": "resp_1"}},
        {"type": "response.output_item.done", "item": item},
        {"type": "response.completed", "response": {"id": "resp_1", "output": []}, "timings": {"n": 1}},
    ]

    body, _, _ = assembled(RESPONSES, events)

    assert {"id": "resp_1", "output": [item], "timings": {"n": 1}} == body


@pytest.mark.parametrize(
    "event",
    [
        {"type": "response.failed", "response": {"id": "r", "error": {"code": "server_error", "message": "x"}}},
        {"type": "error", "code": "server_error", "message": "x"},
    ],
)
def test_a_response_that_failed_is_an_error(event: Any) -> None:
    """Both forms of failure are kept for sorting."""
    _, _, assembler = assembled(RESPONSES, [event])

    assert not assembler.finished
    assert assembler.error is not None
    assert "server_error" == assembler.error["error"]["code"]


def test_a_recorded_message_survives_being_streamed() -> None:
    """Text, stop reason and both halves of the usage come back."""
    whole = sample("llamacpp-anthropic-messages")["body"]
    start = {**whole, "content": [], "stop_reason": None, "usage": {**whole["usage"], "output_tokens": 0}}
    text = whole["content"][0]["text"]
    events = [
        {"type": "message_start", "message": start},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        *({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": c}} for c in text),
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 4}},
        {"type": "message_stop"},
    ]

    body, said, assembler = assembled(MESSAGES, events)

    assert whole == body
    assert text == said
    assert assembler.finished
    assert Usage(7 + 24, 4) == assembler.usage()


def test_a_message_without_its_start_is_still_counted() -> None:
    """llama.cpp leaves `message_start` out where the first token is part of a character."""
    events = [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}},
        {"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": 4}},
        {"type": "message_stop"},
    ]

    _, said, assembler = assembled(MESSAGES, events)

    assert ("a", Usage(0, 4)) == (said, assembler.usage())


def test_tool_use_and_thinking_of_a_message_are_put_together() -> None:
    """Input comes as pieces of JSON, thinking with its signature; what was cut off in mid-JSON is kept as text."""
    events = [
        {"type": "message_start", "message": {"id": "m", "content": []}},
        {
            "type": "content_block_start",
            "index": 0,
            "content_block": {"type": "thinking", "thinking": "", "signature": ""},
        },
        {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "s1"}},
        {
            "type": "content_block_start",
            "index": 1,
            "content_block": {"type": "tool_use", "id": "t", "name": "f", "input": {}},
        },
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"a":'}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": " 1}"}},
        {
            "type": "content_block_start",
            "index": 2,
            "content_block": {"type": "tool_use", "id": "u", "name": "g", "input": {}},
        },
        {"type": "content_block_delta", "index": 2, "delta": {"type": "input_json_delta", "partial_json": '{"b'}},
    ]

    body, _, _ = assembled(MESSAGES, events)

    assert [
        {"type": "thinking", "thinking": "hm", "signature": "s1"},
        {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}},
        {"type": "tool_use", "id": "u", "name": "g", "input": '{"b'},
    ] == body["content"]


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
def test_an_error_chunk_is_kept_for_sorting(url: str) -> None:
    """An `error` in a stream with status 200 is no answer, whatever came before."""
    chunk = {"error": {"message": "x", "code": 500}}

    _, _, assembler = assembled(url, [chunk])

    assert chunk == assembler.error
