"""Continuing: a batch line that was cut off keeps its text, and the next attempt goes on from there.

`continuable` says for which requests that is faithful, `continued` makes the request for the rest, `joined` one answer
of both parts. How a chat answer is continued differs by engine, and is probed, never assumed (`engines/probing.py`).
Pure functions; what they lose is made again, so every doubt means: begin anew.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from llmq.scheduler.job import Job
from llmq.scheduler.kept import Kept
from llmq.scheduler.lease import Usage
from llmq.workers.engines.asking import wants_default_model
from llmq.workers.engines.base import Continues, EngineAnswer, EngineInfo
from llmq.workers.engines.merge import dump, load

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

#: Fields that make an answer more than its text, or its text more than one.
NOT_PLAIN = frozenset((
    "tools", "functions", "tool_choice", "function_call", "response_format", "structured_outputs", "guided_json",
    "guided_regex", "guided_choice", "guided_grammar", "json_schema", "grammar", "logprobs", "top_logprobs",
    "prompt_logprobs", "best_of", "use_beam_search", "echo", "suffix", "audio", "modalities", "prediction",
    "add_generation_prompt", "continue_final_message",
))  # fmt: skip

#: Names of the limit on an answer.
LIMITS = ("max_completion_tokens", "max_tokens")

#: Chunks without text that are put aside unread. A plain answer has few: its role, its reason to end, its usage.
MOST_WORDLESS = 16

#: Of an echo shorter than this nobody can tell whether the model has just said the same again.
LEAST_ECHO = 16


def continuable(job: Job) -> bool:
    """Whether the rest of an answer to this request, made after its beginning, is what would have followed."""
    body = job.body
    if any(body[name] not in (None, False) for name in body.keys() & NOT_PLAIN) or body.get("n") not in (None, 1):
        return False
    if job.url == COMPLETIONS:
        return isinstance(body.get("prompt"), str)
    messages = body.get("messages")
    if job.url != CHAT or not isinstance(messages, list) or not messages:
        return False
    last = messages[-1]
    return isinstance(last, dict) and last.get("role") != "assistant"


def continued(job: Job, kept: Kept, engine: EngineInfo) -> Job | None:
    """Return the request for the rest of the answer; None where this engine cannot be asked for it."""
    if not continuable(job) or not kept.text or kept.model != model_of(job, engine):
        return None
    body = dict(job.body)
    for name in LIMITS:
        if isinstance(limit := body.get(name), int):
            if limit <= kept.tokens:
                return None
            body[name] = limit - kept.tokens
    if isinstance(least := body.get("min_tokens"), int):
        body["min_tokens"] = max(0, least - kept.tokens)
    if job.url == COMPLETIONS:
        # A prompt that goes on is a prompt: no engine need be asked. The simulated one makes noise of the whole of it.
        return None if engine.simulated else replace(job, body={**body, "prompt": body["prompt"] + kept.text}, raw=b"")
    if engine.continues is None:
        return None
    body["messages"] = [*body["messages"], {"role": "assistant", "content": kept.text}]
    if engine.continues is Continues.FLAG:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    return replace(job, body=body, raw=b"")


def model_of(job: Job, engine: EngineInfo) -> str:
    """Return the model that answers a request, "" where that is not known."""
    if wants_default_model(job):
        return engine.models[0] if engine.models else ""
    return str(job.body.get("model"))


def joined(answer: EngineAnswer, kept: Kept) -> EngineAnswer:
    """Return one answer of both parts: the whole text, and the usage of an answer that was never cut off."""
    if answer.status_code >= 400:
        return answer
    tree = load(answer.body)
    choice = tree["choices"][0]
    if "text" in choice:
        choice["text"] = _join(kept.text, choice["text"])
    else:
        message = choice["message"]
        message["content"] = _join(kept.text, message.get("content"))
    usage = _usage(answer.usage, kept)
    if isinstance(tree.get("usage"), dict):
        tree["usage"] |= {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
        if "total_tokens" in tree["usage"]:
            tree["usage"]["total_tokens"] = usage.total
    return replace(answer, body=dump(tree), usage=usage)


def kept_of(before: Kept | None, text: str, tokens: int, model: str) -> Kept | None:
    """Return what is to be kept of an answer of `model`: what it was gone on from (`before`), and what came then.

    None where there is nothing, or where a token was no whole character: what the engine made of it is not known.
    """
    if before is not None:
        text, tokens = before.text + text, before.tokens + tokens
    return Kept(text, tokens, model) if text and "\ufffd" not in text else None


class Draft:
    """The pieces of an answer as they come, in case it is cut off: most are not, so what has no text is read late."""

    __slots__ = ("_pieces", "_plain", "_wordless")

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._wordless: list[bytes] = []
        self._plain = True

    def add(self, text: str, chunk: bytes) -> None:
        """Take the next piece."""
        if text:
            self._pieces.append(text)
        elif self._plain:
            self._wordless.append(chunk)
            if len(self._wordless) > MOST_WORDLESS:
                self._read()

    def text(self) -> str | None:
        """Return the text so far; None where the answer is more than its text, and nobody could go on from that."""
        self._read()
        return "".join(self._pieces) if self._plain else None

    def _read(self) -> None:
        self._plain = self._plain and all(map(is_plain, self._wordless))
        self._wordless.clear()


def is_plain(chunk: bytes) -> bool:
    """Whether a chunk without text holds nothing that a continued answer would lose: reasoning, tool calls."""
    try:
        tree = load(chunk)
    except ValueError:
        return False
    choices = tree.get("choices") if isinstance(tree, dict) else None
    return isinstance(choices, list) and all(_is_plain_choice(choice) for choice in choices)


def _is_plain_choice(choice: Any) -> bool:
    if not isinstance(choice, dict):
        return False
    delta = choice.get("delta")
    said = {key for key, value in delta.items() if value} if isinstance(delta, dict) else set()
    return said <= {"role", "content"} and not choice.get("logprobs")


def _join(before: str, after: str | None) -> str:
    after = after or ""
    if len(before) >= LEAST_ECHO and after.startswith(before):
        return after  # the engine says the beginning again
    return before + after


def _usage(usage: Usage, kept: Kept) -> Usage:
    """The engine has counted the beginning as part of the prompt."""
    if not usage.total:
        return usage
    return Usage(max(0, usage.prompt_tokens - kept.tokens), usage.completion_tokens + kept.tokens)
