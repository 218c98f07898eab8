"""What the conformance suite asks of every engine, and in which words it says what came of it.

    QUESTIONS["logprobs"] is asked as   said = await observe(engine)   and answers "yes", "left out", "400", ...

An answer is one cell of the table in `docs/engines.md`. A refusal is its status; it must hold the engine's own words.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from llmq.scheduler.job import Job
from llmq.workers.engines.base import Engine, EngineAnswer, EngineUnclear
from tests.engine.fake import body_of, chat

Observe = Callable[[Engine], Awaitable[str]]

#: A call of it is three words long.
SAIL = {
    "type": "function",
    "function": {
        "name": "sail",
        "parameters": {
            "type": "object",
            "properties": {"to": {"enum": ["north", "south"]}},
            "required": ["to"],
            "additionalProperties": False,
        },
    },
}

COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}

#: Tokens of the tiny model (`tiny_model.py`), made certain: the one that begins a call, and a word.
CALLS = {"tool_choice": "required", "logit_bias": [[269, 100]], "max_tokens": 400}
A_WORD = {"logit_bias": [[259, 100]], "ignore_eos": True}

#: A real engine of random weights says these words, where it would else say half of a character; a simulation does not.
WORDS = {"max_tokens": 12, "grammar": 'root ::= "red green blue"'}

MESSAGE = {"role": "user", "content": "hi"}


def asking(job: Job, judge: Callable[[Any], str]) -> Observe:
    """Return the question whose answer is judged by its body; a refusal is judged here."""

    async def observe(engine: Engine) -> str:
        try:
            answer = await engine.run(job, lambda text, chunk: None)
        except EngineUnclear as error:
            return f"{error.status_code}: retried"
        return refusal(answer) if answer.status_code >= 400 else judge(body_of(answer))

    return observe


def refusal(answer: EngineAnswer) -> str:
    """Return the status of a refusal, which says why."""
    body = body_of(answer)
    said = body["error"]["message"] if "error" in body else body["detail"]
    assert said, body
    return str(answer.status_code)


def _content(body: Any) -> str:
    content = body["choices"][0]["message"]["content"]
    assert isinstance(content, str)
    return content


def _choices(body: Any) -> str:
    choices = body["choices"]
    assert list(range(len(choices))) == [choice["index"] for choice in choices]
    assert all(choice["finish_reason"] and choice["message"]["content"] for choice in choices)
    return {1: "gives one", 2: "yes"}[len(choices)]


def _logprobs(body: Any) -> str:
    given = body["choices"][0].get("logprobs")
    if not given:
        return "left out"
    assert all(len(token["top_logprobs"]) == 2 and token["logprob"] <= 0 for token in given["content"])
    return "yes"


def _tools(body: Any) -> str:
    message = body["choices"][0]["message"]
    if not message.get("tool_calls"):
        return "answers in text" if message["content"] else "says nothing"
    call = message["tool_calls"][0]["function"]
    assert "sail" == call["name"]
    assert json.loads(call["arguments"])["to"] in ("north", "south")
    return "yes"


def _schema(body: Any) -> str:
    said = _content(body)
    if not said.lstrip().startswith("{"):
        return "ignored"
    # The recorded one was cut off: that it was going to be an object is all there is.
    cut_off = body["choices"][0]["finish_reason"] == "length"
    return "yes" if cut_off or json.loads(said)["colour"] in ("red", "green") else "another form"


def _usage(body: Any) -> str:
    usage = body["usage"]
    assert 12 == usage["completion_tokens"]
    assert 0 < usage["prompt_tokens"] == usage["total_tokens"] - 12
    return "yes"


def _vectors(body: Any) -> str:
    assert [0, 1] == [item["index"] for item in body["data"]]
    return "yes" if all(item["embedding"] for item in body["data"]) else "empty"


def _response(body: Any) -> str:
    assert "response" == body["object"]
    return "yes" if body["output"][0]["content"][0]["text"] and body["usage"]["output_tokens"] == 4 else "empty"


def _message(body: Any) -> str:
    # llama.cpp leaves out the start of a message, with its type, whose first token is only part of a character.
    assert "message" == body.get("type", "message")
    assert all(part["text"] for part in body["content"])
    return "yes" if body["usage"]["output_tokens"] == 4 else "empty"


def _completion(body: Any) -> str:
    assert "text_completion" == body["object"]
    return "yes" if "length" == body["choices"][0]["finish_reason"] else "another end"


def _answered(body: Any) -> str:
    assert body["choices"][0]["finish_reason"]
    return "answered"


def _odd(**fields: Any) -> Observe:
    return asking(chat(**{"max_tokens": 4, **fields}), _answered)


QUESTIONS: dict[str, Observe] = {
    "usage": asking(chat(max_tokens=12, ignore_eos=True), _usage),
    "several choices (`n`)": asking(chat(**WORDS, n=2), _choices),
    "`logprobs`": asking(chat(**WORDS | {"max_tokens": 2}, logprobs=True, top_logprobs=2), _logprobs),
    "tools, one required": asking(chat(tools=[SAIL], **CALLS), _tools),
    "JSON schema (`response_format`)": asking(
        chat(
            max_tokens=200,
            response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": COLOUR}},
        ),
        _schema,
    ),
    "`/v1/completions`": asking(
        Job("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 4, "ignore_eos": True}), _completion
    ),
    "`/v1/embeddings`": asking(Job("/v1/embeddings", {"input": ["the sea", "a ship"]}), _vectors),
    "`/v1/responses`": asking(Job("/v1/responses", {"input": "hi", "max_output_tokens": 4, **A_WORD}), _response),
    "`/v1/messages`": asking(
        Job("/v1/messages", {"messages": [MESSAGE], "max_tokens": 4, "ignore_eos": True}), _message
    ),
    "prompt too long": asking(chat(messages=[{**MESSAGE, "content": "the sea " * 4000}]), _answered),
    "no messages": asking(Job("/v1/chat/completions", {"max_tokens": 4}), _answered),
    "`max_tokens` a text": _odd(max_tokens="lots"),
    "`max_tokens` negative": _odd(max_tokens=-5),
    "`temperature` negative": _odd(temperature=-3),
    "unknown role": _odd(messages=[{"role": "wizard", "content": "hi"}]),
    "unknown model": _odd(model="no-such-model"),
}
