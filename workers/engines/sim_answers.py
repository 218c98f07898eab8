"""What the simulated engine says: noise words in the forms of real answers, whole and as chunks.

Answers are deterministic: the same body and seed give the same words. Every form names the model `sim`, and has the
system fingerprint `simulated` where there is one. When a token is due is decided by `sim_gpu.py`.
"""

from __future__ import annotations

import random
import time
import zlib
from dataclasses import dataclass
from typing import Any

import orjson

from llmq.scheduler.job import CHARACTERS_PER_TOKEN, Job
from llmq.scheduler.lease import Usage
from llmq.workers.engines.merge import Tree

MODEL = "sim"
FINGERPRINT = "simulated"
EMBEDDING_SIZE = 8

_WORDS = ("sea", "wind", "star", "ship", "wave", "light", "stone", "river", "cloud", "field", "glass", "north")

#: A long text to cut answers from: cutting costs nothing, drawing each word would.
_NOISE = tuple(f" {word}" for word in random.Random(0).choices(_WORDS, k=4096))

#: Names of the limit on an answer, by what endpoints call it.
_LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


@dataclass(frozen=True, slots=True)
class Script:
    """What is to be said in answer to one job: how many tokens, in how many choices, from which place in the noise."""

    url: str
    number: int
    created_at: int
    prompt_tokens: int
    answer_tokens: int
    choices: int
    cut_off: bool
    start: int
    said: int = 0
    """Words that the answer begins behind: they are in the request, to be gone on from."""

    @property
    def usage(self) -> Usage:
        """The tokens that the answer counts."""
        return Usage(self.prompt_tokens, self.answer_tokens * self.choices)

    def text(self, choice: int, first: int, count: int) -> str:
        """Return `count` words of a choice, from its word `first`."""
        first += self.said
        begin = (self.start + 97 * choice + first) % len(_NOISE)
        piece = _NOISE[begin : begin + count]
        while len(piece) < count:
            piece += _NOISE[: count - len(piece)]
        text = "".join(piece)
        return text[1:] if first == 0 else text


def script_for(job: Job, number: int, seed: int, answer_tokens: int) -> Script:
    """Decide what answers a job: at most its limit, exactly its limit where the end is to be ignored.

    `number` is the request's, for its id; `answer_tokens` is where an answer ends by itself.
    """
    body = job.body
    limit = next((body[name] for name in _LIMITS if _is_count(body.get(name))), None)
    wanted = limit if limit is not None and (body.get("ignore_eos") or limit < answer_tokens) else answer_tokens
    choices = body["n"] if _is_count(body.get("n")) and body["n"] else 1
    several = body.get("input") if job.url == "/v1/embeddings" else body.get("prompt")
    if isinstance(several, list) and several and isinstance(several[0], str | list):
        choices *= len(several)
    asked = body.get("messages") or body.get("prompt") or body.get("input")
    said = 0
    if body.get("continue_final_message") and isinstance(asked, list) and len(asked) > 1:
        said = len(str(asked[-1].get("content", "")).split())
        asked = asked[:-1]
    text = orjson.dumps(asked)
    return Script(
        url=job.url,
        number=number,
        created_at=int(time.time()),
        prompt_tokens=max(1, len(text) // CHARACTERS_PER_TOKEN) + said,
        answer_tokens=0 if job.url == "/v1/embeddings" else max(1, wanted if limit == wanted else wanted - said),
        choices=choices,
        cut_off=wanted == limit,
        start=zlib.crc32(text, seed) % len(_NOISE),
        said=said,
    )


def whole(script: Script) -> bytes:
    """Return the whole answer."""
    texts = [script.text(choice, 0, script.answer_tokens) for choice in range(script.choices)]
    match script.url:
        case "/v1/embeddings":
            return orjson.dumps(_embeddings(script))
        case "/v1/responses":
            return orjson.dumps(_response(script, texts[0]))
        case "/v1/messages":
            content = [{"type": "text", "text": texts[0]}]
            return orjson.dumps({**_message(script, script.answer_tokens), "content": content, **_stop(script)})
        case "/v1/completions":
            choices = [_choice(script, i, text=text) for i, text in enumerate(texts)]
            return orjson.dumps(_completion(script, "text_completion", choices, with_usage=True))
    choices = [_choice(script, i, message={"role": "assistant", "content": text}) for i, text in enumerate(texts)]
    return orjson.dumps(_completion(script, "chat.completion", choices, with_usage=True))


def opening(script: Script) -> list[bytes]:
    """Return the chunks that come before the first word."""
    match script.url:
        case "/v1/responses":
            return [_event("response.created", response={**_response_head(script), "status": "in_progress"})]
        case "/v1/messages":
            block = {"type": "text", "text": ""}
            return [
                _event("message_start", message=_message(script, 0)),
                _event("content_block_start", index=0, content_block=block),
            ]
        case "/v1/chat/completions":
            role = {"role": "assistant", "content": ""}
            return [_chunk(script, [{"index": i, "delta": role}]) for i in range(script.choices)]
    return []


def pieces(script: Script, first: int, count: int) -> list[tuple[str, bytes]]:
    """Return the chunks for the next words of every choice, each with its text (that of the first choice only)."""
    texts = [script.text(choice, first, count) for choice in range(script.choices)]
    match script.url:
        case "/v1/responses":
            place = {"item_id": f"msg_sim_{script.number}", "output_index": 0, "content_index": 0}
            return [(texts[0], _event("response.output_text.delta", **place, delta=texts[0]))]
        case "/v1/messages":
            delta = {"type": "text_delta", "text": texts[0]}
            return [(texts[0], _event("content_block_delta", index=0, delta=delta))]
        case "/v1/completions":
            contents: list[Tree] = [{"index": i, "text": text} for i, text in enumerate(texts)]
        case _:
            contents = [{"index": i, "delta": {"content": text}} for i, text in enumerate(texts)]
    return [("" if i else texts[0], _chunk(script, [content])) for i, content in enumerate(contents)]


def closing(script: Script) -> list[bytes]:
    """Return the chunks that come after the last word."""
    match script.url:
        case "/v1/responses":
            text = script.text(0, 0, script.answer_tokens)
            end = "response.incomplete" if script.cut_off else "response.completed"
            return [_event(end, response=_response(script, text))]
        case "/v1/messages":
            usage = {"output_tokens": script.answer_tokens}
            return [
                _event("content_block_stop", index=0),
                _event("message_delta", delta=_stop(script), usage=usage),
                _event("message_stop"),
            ]
        case "/v1/completions":
            ends: list[Tree] = [_choice(script, i, text="") for i in range(script.choices)]
        case _:
            ends = [_choice(script, i, delta={}) for i in range(script.choices)]
    usage_chunk = _completion(script, _chunk_object(script), [], with_usage=True)
    return [*(_chunk(script, [end]) for end in ends), orjson.dumps(usage_chunk)]


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _choice(script: Script, index: int, **content: Any) -> Tree:
    return {"index": index, **content, "logprobs": None, "finish_reason": "length" if script.cut_off else "stop"}


def _chunk(script: Script, choices: list[Tree]) -> bytes:
    finishing = [{"logprobs": None, "finish_reason": None, **choice} for choice in choices]
    return orjson.dumps(_completion(script, _chunk_object(script), finishing, with_usage=False))


def _chunk_object(script: Script) -> str:
    return "text_completion" if script.url == "/v1/completions" else "chat.completion.chunk"


def _completion(script: Script, kind: str, choices: list[Tree], *, with_usage: bool) -> Tree:
    completion: Tree = {
        "id": f"cmpl-sim-{script.number}",
        "object": kind,
        "created": script.created_at,
        "model": MODEL,
        "system_fingerprint": FINGERPRINT,
        "choices": choices,
    }
    if with_usage:
        usage = script.usage
        completion["usage"] = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.total,
        }
    return completion


def _embeddings(script: Script) -> Tree:
    data = []
    for index in range(script.choices):
        noise = random.Random(script.start + index)
        vector = [round(noise.uniform(-1, 1), 6) for _ in range(EMBEDDING_SIZE)]
        data.append({"object": "embedding", "index": index, "embedding": vector})
    usage = {"prompt_tokens": script.prompt_tokens, "total_tokens": script.prompt_tokens}
    return {"object": "list", "model": MODEL, "data": data, "usage": usage}


def _response_head(script: Script) -> Tree:
    return {"id": f"resp_sim_{script.number}", "object": "response", "created_at": script.created_at, "model": MODEL}


def _response(script: Script, text: str) -> Tree:
    content = [{"type": "output_text", "annotations": [], "text": text}]
    item = {"id": f"msg_sim_{script.number}", "type": "message", "role": "assistant", "status": "completed"}
    return {
        **_response_head(script),
        "status": "incomplete" if script.cut_off else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if script.cut_off else None,
        "output": [{**item, "content": content}],
        "usage": {
            "input_tokens": script.prompt_tokens,
            "output_tokens": script.answer_tokens,
            "total_tokens": script.prompt_tokens + script.answer_tokens,
        },
    }


def _message(script: Script, output_tokens: int) -> Tree:
    usage = {"input_tokens": script.prompt_tokens, "output_tokens": output_tokens}
    head = {"id": f"msg_sim_{script.number}", "type": "message", "role": "assistant", "model": MODEL, "content": []}
    return {**head, "stop_reason": None, "stop_sequence": None, "usage": usage}


def _stop(script: Script) -> Tree:
    return {"stop_reason": "max_tokens" if script.cut_off else "end_turn", "stop_sequence": None}


def _event(kind: str, **fields: Any) -> bytes:
    return orjson.dumps({"type": kind, **fields})
