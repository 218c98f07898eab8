"""Read what an engine answered with success, streamed or whole, into one `EngineAnswer`.

A status of 200 alone is no success: a stream counts when every choice has finished and no chunk carried an error, and
so does a body that came whole. Opening and closing the connection is the business of `http.py`.
"""

from __future__ import annotations

import orjson

from llmq.workers.engines.assembly import BROKEN_OFF, Assembler, usage_of
from llmq.workers.engines.base import AnswerTooLarge, EngineAnswer, EngineError, EngineUnclear, OnDelta
from llmq.workers.engines.merge import Tree, load, whole_characters
from llmq.workers.engines.sorting import as_json, excerpt, sort_error_chunk
from llmq.workers.engines.sse import EventParser, EventTooLarge

#: An event may be this much larger than the answer it belongs to: the last one of an endpoint may repeat it whole.
EVENT_SLACK = 2**20

#: The least that must come before the size of an answer is measured again.
MEASURE_EVERY = 64 * 2**10


#: What an assembler raises for chunks that are JSON, and nothing that an engine means: it does not look at each field.
NONSENSE = (AttributeError, TypeError, ValueError, LookupError, RecursionError)


class StreamReader:
    """Reads one streamed answer to its end: `feed` it what comes, and `close` it where the stream ends."""

    def __init__(self, assembler: Assembler, max_bytes: int, request_id: str, on_delta: OnDelta | None) -> None:
        self._assembler = assembler
        self._again = assembler.again
        self._max_bytes = max_bytes
        self._request_id = request_id
        self._on_delta = on_delta
        self._received = 0
        self._measure_at = max_bytes
        self._first_id = ""
        self._half = ""
        """Half of a surrogate pair, which waits for the other one."""
        self._parser = EventParser(max_bytes + EVENT_SLACK)

    def feed(self, data: bytes) -> EngineAnswer | None:
        """Take the stream as it comes; return the whole answer with its end. Raises EngineError."""
        try:
            events = self._parser.feed(data)
        except EventTooLarge:
            raise too_large(self._max_bytes) from None
        for event in events:
            # What every token of every answer takes: most chunks are the one before but for their text.
            if (text := self._again(event)) is not None:
                if self._on_delta is not None:
                    self._on_delta(text, event)
            elif (answer := self._take(event)) is not None:
                return answer
        self._received += len(data)
        if self._received >= self._measure_at:
            self._check_size()
        return None

    def close(self) -> EngineAnswer:
        """Take the end of the stream; return the whole answer. Raises EngineError."""
        for event in self._parser.close():
            if (answer := self._take(event)) is not None:
                return answer
        # transformers serve sends no [DONE]; what counts is that every choice has finished.
        return self._finish()

    def _take(self, data: bytes) -> EngineAnswer | None:
        if data == b"[DONE]":
            return self._finish()
        chunk = self._parse(data)
        if chunk is None:
            return None
        self._first_id = self._first_id or _id_of(chunk)
        try:
            text = self._assembler.feed(chunk)
        except NONSENSE as error:
            raise self._garbage(data) from error
        if self._assembler.error is not None:
            return raised(sort_error_chunk(self._assembler.error, data, self._id()))
        self._assembler.learn(data, chunk)
        if self._on_delta is not None:
            self._on_delta(self._sayable(text), data)
        return self._finish() if self._assembler.last else None

    def _sayable(self, text: str) -> str:
        """Return the text of a chunk as it can be said: engines that cut UTF-16 write halves of surrogate pairs."""
        if not self._half and text.isascii():
            return text
        text, self._half = self._half + text, ""
        if "\ud800" <= text[-1:] <= "\udbff" and not self._assembler.finished:
            text, self._half = text[:-1], text[-1]
        return whole_characters(text)

    def _parse(self, data: bytes) -> Tree | None:
        try:
            chunk = load(data)
        except ValueError as error:
            raise self._garbage(data) from error
        # llama.cpp sends `null` where a slot has nothing to say.
        if chunk is not None and not isinstance(chunk, dict):
            raise self._garbage(data)
        return chunk

    def _finish(self) -> EngineAnswer:
        body = self._body()
        if not self._assembler.finished:
            raise EngineUnclear("the stream ended before the answer had finished (no finish_reason)", 200, body)
        if len(body) > self._max_bytes:
            raise too_large(self._max_bytes)
        return EngineAnswer(200, body, self._id(), self._assembler.usage())

    def _body(self) -> bytes:
        try:
            return self._assembler.body()
        except NONSENSE as error:
            raise EngineUnclear(f"the engine's chunks make no answer ({type(error).__name__})", 200) from error

    def _check_size(self) -> None:
        """Measure the answer, not the stream: its chunks repeat their envelope with every token.

        Measuring is as dear as the answer is long, so it is done only when enough has come to make a difference.
        """
        size = len(self._body())
        if size > self._max_bytes:
            raise too_large(self._max_bytes)
        self._measure_at = self._received + max(self._max_bytes - size, MEASURE_EVERY)

    def _garbage(self, data: bytes) -> EngineUnclear:
        return EngineUnclear(f"the engine's stream holds what is no chunk: {excerpt(data)}", 200, as_json(data))

    def _id(self) -> str:
        return self._request_id or self._first_id


def whole_answer(status: int, body: bytes, request_id: str) -> EngineAnswer:
    """Sort a body that came whole with a status of success."""
    try:
        tree = load(body)
    except ValueError:
        tree = None
    if not isinstance(tree, dict):
        raise EngineUnclear(f"the engine answered with what is no JSON object: {excerpt(body)}", status, as_json(body))
    request_id = request_id or _id_of(tree)
    if tree.get("error") is not None:
        return raised(sort_error_chunk(tree, body, request_id))
    choices = tree.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        reason = choice.get("finish_reason") if isinstance(choice, dict) else None
        if not isinstance(reason, str) or reason in BROKEN_OFF:
            raise EngineUnclear(f"an answer is not finished (finish_reason {reason})", status, as_json(body))
    return EngineAnswer(status, as_json(body), request_id, usage_of(tree))


def as_chunks(tree: Tree) -> list[tuple[str, bytes]]:
    """Return a completion that came whole as the chunks that it would have been; none for other answers.

    Its usage is a chunk of its own, as it is in a stream that was asked for it.
    """
    choices = tree.get("choices")
    if not isinstance(choices, list):
        return []
    kind = {"object": "chat.completion.chunk"} if tree.get("object") == "chat.completion" else {}
    envelope = {**{key: value for key, value in tree.items() if key != "usage"}, **kind}
    pieces = [_as_piece(choice) for choice in choices]
    first: Tree = pieces[0] if pieces else {}
    delta = first.get("delta")
    text = first.get("text") or (delta.get("content") if isinstance(delta, dict) else None) or ""
    chunks = [(str(text), orjson.dumps({**envelope, "choices": pieces}))]
    if tree.get("usage"):
        chunks.append(("", orjson.dumps({**envelope, "choices": [], "usage": tree["usage"]})))
    return chunks


def _as_piece(choice: Tree) -> Tree:
    """Return a choice as a chunk holds it: only there do tool calls say which one they are."""
    piece = {("delta" if key == "message" else key): value for key, value in choice.items()}
    message = piece.get("delta")
    if isinstance(message, dict) and isinstance(calls := message.get("tool_calls"), list):
        numbered = [{"index": i, **call} if isinstance(call, dict) else call for i, call in enumerate(calls)]
        piece["delta"] = {**message, "tool_calls": numbered}
    return piece


def raised(sorted_answer: EngineAnswer | EngineError) -> EngineAnswer:
    if isinstance(sorted_answer, EngineError):
        raise sorted_answer
    return sorted_answer


def too_large(limit: int) -> AnswerTooLarge:
    return AnswerTooLarge(f"the answer is larger than {limit:,} bytes; the request was aborted: lower its max_tokens")


def _id_of(tree: Tree) -> str:
    """Return the id of an answer, which responses and messages carry one level down."""
    for source in (tree, tree.get("response"), tree.get("message")):
        found = source.get("id") if isinstance(source, dict) else None
        if isinstance(found, str) and found:
            return found
    return ""
