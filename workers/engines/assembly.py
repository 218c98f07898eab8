"""Put a streamed answer together: chunks in, the body that the engine would have sent whole out.

llmq always streams upstream, since engines abort on disconnect only then; callers who did not ask for a stream get
the assembled body. One assembler an endpoint (`assembler_for`); each is fed the parsed chunks in order and says with
every chunk what text it added. How fields merge is in `merge.py`. Nothing here knows of bytes on the wire, and nothing
here judges an error: `error` holds the chunk that carried one.
"""

from __future__ import annotations

from typing import Any, Protocol

import orjson

from llmq.scheduler.lease import NO_USAGE, Usage
from llmq.workers.engines.merge import Fragments, Tree, dump, merge_delta, merge_fields
from llmq.workers.engines.repetition import Repetition

#: Finish reasons that say that the answer was cut off by the engine, not by the model or a limit.
BROKEN_OFF = frozenset({"error", "abort"})


class Assembler(Protocol):
    """Puts the answer of one request together."""

    error: Tree | None
    """The chunk that carried an error; nothing after it counts."""

    @property
    def finished(self) -> bool:
        """Whether the answer is complete: every choice has said why it finished."""
        ...

    @property
    def last(self) -> bool:
        """Whether nothing can follow, so that the stream need not be read to its end."""
        ...

    def feed(self, chunk: Tree) -> str:
        """Take the next chunk; return the text that it adds to the first choice, "" for none."""
        ...

    def again(self, data: bytes) -> str | None:
        """Take the next chunk unread, if it repeats the last one but for its text, and return that; else None."""
        ...

    def learn(self, data: bytes, chunk: Tree) -> None:
        """Look at a chunk that was fed: the next one may repeat it."""
        ...

    def body(self) -> bytes:
        """Return the whole answer as it stands, as JSON."""
        ...

    def usage(self) -> Usage:
        """Return the LLM tokens that the engine counted so far."""
        ...


def assembler_for(url: str) -> Assembler:
    """Return a new assembler for the streamed answers of an endpoint."""
    match url:
        case "/v1/completions":
            return CompletionAssembler()
        case "/v1/responses":
            return ResponsesAssembler()
        case "/v1/messages":
            return MessagesAssembler()
        case _:
            return ChatAssembler()


class ChatAssembler:
    """Chat completions: the `delta` of each choice grows into its `message`."""

    #: The field of a chunk that holds its text.
    grows = "content"

    def __init__(self) -> None:
        self.error: Tree | None = None
        self._fields: Tree = {}
        self._choices: dict[int, Tree] = {}
        self._repetition = Repetition(self.grows)
        self._parts: list[str] = []

    @property
    def finished(self) -> bool:
        """Whether every choice that began has a finish reason, and not one that means that it broke off."""
        reasons = [choice.get("finish_reason") for choice in self._choices.values()]
        return bool(reasons) and all(isinstance(reason, str) and reason not in BROKEN_OFF for reason in reasons)

    @property
    def last(self) -> bool:
        """Never known: usage and timings come after the last finish reason."""
        return False

    def feed(self, chunk: Tree) -> str:
        """Take the next chunk; return the text that it adds to choice 0."""
        if chunk.get("error") is not None:
            self.error = chunk
            return ""
        text = ""
        for key, value in chunk.items():
            if key == "choices":
                text = self._take_choices(value or [])
            elif value is not None or key not in self._fields:
                self._fields[key] = value
        return text

    def again(self, data: bytes) -> str | None:
        """Take a chunk that adds its text to choice 0, and nothing else that is new."""
        text = self._repetition.text_of(data)
        if text is not None:
            self._parts.append(text)
        return text

    def learn(self, data: bytes, chunk: Tree) -> None:
        """Look at a chunk that was fed."""
        if self._repetition.learn(data, chunk):
            self._parts = self._text(self._choices[0]).parts

    def body(self) -> bytes:
        """Return the completion as the engine would have sent it whole."""
        choices = [self._whole(choice) for _, choice in sorted(self._choices.items())]
        return dump({**self._fields, "object": self._object(), "choices": choices})

    def usage(self) -> Usage:
        """Return what the last `usage` said."""
        return usage_of(self._fields)

    def _object(self) -> str:
        return "chat.completion"

    def _text(self, choice: Tree) -> Fragments:
        text: Fragments = choice["message"]["content"]
        return text

    def _take_choices(self, choices: list[Tree]) -> str:
        text = ""
        for position, piece in enumerate(choices):
            index = piece.get("index", position)
            choice = self._choices.get(index)
            if choice is None:
                choice = self._choices[index] = self._new_choice(index)
            added = self._take_piece(choice, piece)
            if index == 0:
                text += added
        return text

    def _new_choice(self, index: int) -> Tree:
        # An answer of tool calls only has no content, and says so.
        return {"index": index, "message": {"role": "", "content": None}}

    def _take_piece(self, choice: Tree, piece: Tree) -> str:
        delta = piece.get("delta") or {}
        merge_delta(choice["message"], delta)
        merge_fields(choice, {key: value for key, value in piece.items() if key != "delta"})
        content = delta.get("content")
        return content if isinstance(content, str) else ""

    def _whole(self, choice: Tree) -> Tree:
        message = choice["message"]
        whole = {**message, "role": message["role"] or "assistant"}
        if calls := message.get("tool_calls"):
            whole["tool_calls"] = _without_index(calls)
        return {**choice, "message": whole}


class CompletionAssembler(ChatAssembler):
    """Plain completions: the `text` of each choice grows."""

    grows = "text"

    def _object(self) -> str:
        return "text_completion"

    def _text(self, choice: Tree) -> Fragments:
        text: Fragments = choice["text"]
        return text

    def _new_choice(self, index: int) -> Tree:
        return {"index": index, "text": Fragments("")}

    def _take_piece(self, choice: Tree, piece: Tree) -> str:
        text = str(piece.get("text") or "")
        choice["text"].parts.append(text)
        merge_fields(choice, {key: value for key, value in piece.items() if key != "text"})
        return text

    def _whole(self, choice: Tree) -> Tree:
        return choice


class _ReadInFull:
    """Of whose chunks none is only a text."""

    def again(self, data: bytes) -> str | None:
        """Take none."""
        return None

    def learn(self, data: bytes, chunk: Tree) -> None:
        """Learn nothing."""


class ResponsesAssembler(_ReadInFull):
    """Responses: the last event holds the answer whole; items are kept for engines whose last event omits them."""

    def __init__(self) -> None:
        self.error: Tree | None = None
        self.finished = False
        self._response: Tree = {}
        self._items: list[Tree] = []

    @property
    def last(self) -> bool:
        """Whether the closing event has come."""
        return self.finished

    def feed(self, chunk: Tree) -> str:
        """Take the next event; return its text."""
        kind = chunk.get("type")
        match kind:
            case "response.output_text.delta":
                return str(chunk.get("delta") or "")
            case "response.output_item.done":
                self._items.append(chunk.get("item") or {})
            case "error" | "response.failed":
                self.error = {"error": (chunk.get("response") or chunk).get("error") or chunk}
            case "response.completed" | "response.incomplete":
                self._close(chunk)
            case _ if chunk.get("error") is not None:
                self.error = chunk
            case _ if chunk.get("response"):
                self._response = dict(chunk["response"])
        return ""

    def body(self) -> bytes:
        """Return the response object."""
        return dump(self._response or {"output": self._items})

    def usage(self) -> Usage:
        """Return what the response says."""
        return usage_of(self._response)

    def _close(self, chunk: Tree) -> None:
        response = dict(chunk.get("response") or {})
        if not response.get("output") and self._items:
            response["output"] = self._items
        # What engines add beside the response (llama.cpp: timings) is part of the answer too.
        for key, value in chunk.items():
            if key not in ("type", "response", "sequence_number"):
                response.setdefault(key, value)
        self._response = response
        self.finished = True


class MessagesAssembler(_ReadInFull):
    """Anthropic messages: blocks of content grow one after the other inside the message that began."""

    def __init__(self) -> None:
        self.error: Tree | None = None
        self.finished = False
        self._message: Tree = {}
        self._blocks: dict[int, Tree] = {}

    @property
    def last(self) -> bool:
        """Whether the message was closed."""
        return self.finished

    def feed(self, chunk: Tree) -> str:
        """Take the next event; return its text."""
        match chunk.get("type"):
            case "message_start":
                self._message = dict(chunk.get("message") or {})
            case "content_block_start":
                block: Tree = {}
                merge_delta(block, chunk.get("content_block") or {})
                self._blocks[chunk.get("index", len(self._blocks))] = block
            case "content_block_delta":
                return self._take_delta(chunk)
            case "message_delta":
                self._take_end(chunk)
            case "message_stop":
                self.finished = self._message.get("stop_reason") is not None
            case _ if chunk.get("error") is not None:
                self.error = chunk
        return ""

    def body(self) -> bytes:
        """Return the message."""
        blocks = [_whole_block(block) for _, block in sorted(self._blocks.items())]
        return dump({**self._message, "content": blocks or self._message.get("content", [])})

    def usage(self) -> Usage:
        """Return what start and end of the message said."""
        return usage_of(self._message)

    def _take_delta(self, chunk: Tree) -> str:
        delta = dict(chunk.get("delta") or {})
        kind = delta.pop("type", None)
        if kind == "citations_delta" and "citation" in delta:
            delta = {"citations": [delta["citation"]]}
        merge_delta(self._blocks.setdefault(chunk.get("index", 0), {}), delta)
        return str(delta.get("text") or "") if kind == "text_delta" else ""

    def _take_end(self, chunk: Tree) -> None:
        merge_fields(self._message, {key: value for key, value in chunk.items() if key not in ("type", "delta")})
        merge_fields(self._message, chunk.get("delta") or {})


def usage_of(body: Tree) -> Usage:
    """Read the LLM tokens that a body counts, in any of the three forms of `usage`."""
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return NO_USAGE
    # llama.cpp leaves a message's start out where its first token is part of a character; the end still has a count.
    if "input_tokens" not in usage and "output_tokens" not in usage:
        return Usage(_count(usage, "prompt_tokens"), _count(usage, "completion_tokens"))
    # Anthropic counts cached prompt tokens beside the others, OpenAI among them (in `input_tokens_details`).
    cached = _count(usage, "cache_read_input_tokens") + _count(usage, "cache_creation_input_tokens")
    return Usage(_count(usage, "input_tokens") + cached, _count(usage, "output_tokens"))


def _count(usage: Tree, name: str) -> int:
    value = usage.get(name)
    return value if isinstance(value, int) and value > 0 else 0


def _without_index(calls: list[Any]) -> list[Any]:
    """Return tool calls in order of their index, which only streams have."""
    ordered = sorted(calls, key=lambda call: call.get("index") or 0 if isinstance(call, dict) else 0)
    return [{k: v for k, v in call.items() if k != "index"} if isinstance(call, dict) else call for call in ordered]


def _whole_block(block: Tree) -> Tree:
    """Return a content block; the input of a tool call comes as pieces of JSON."""
    pieces = block.get("partial_json")
    if pieces is None:
        return block
    whole = {key: value for key, value in block.items() if key != "partial_json"}
    try:
        whole["input"] = orjson.loads(str(pieces)) if str(pieces) else block.get("input", {})
    except orjson.JSONDecodeError:
        # Cut off by max_tokens: kept as it came rather than lost.
        whole["input"] = str(pieces)
    return whole
