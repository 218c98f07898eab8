"""The deltas of one job, put in order: what a stream yields, and what it yields when some of them did not come.

Deltas are told through a bounded inbox, so that some may be trimmed; and a job may be begun by more than one worker.
What a stream gives is nonetheless always a beginning of the one answer that counts: pieces of the newest delivery in
order of their place, and after a gap nothing until the end, when the rest of the text comes in one piece. Of an answer
that is more than its text, a rest is not guessed at. Decides only: no Redis, no waiting.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import orjson

from llmq.scheduler.inbox import Delta
from llmq.scheduler.result import read_body, text_of

#: Bytes of deltas kept for a job whose stream nobody reads; above it the answer's rest comes from its record.
MAX_KEPT_BYTES = 2**20

#: Chunks that are looked at for the end of an answer: what engines send after it are its usage and timings.
LAST_CHUNKS = 4

#: Fields of a message that come before its text, and are over where that has begun.
_BEFORE_TEXT = frozenset({"reasoning_content", "reasoning"})

_CHUNK, _TEXT = attrgetter("chunk"), attrgetter("text")

#: Events with which an answer of /v1/responses ends.
_LAST_EVENTS = ("response.completed", "response.incomplete")


@dataclass(frozen=True, slots=True)
class DeltaView:
    """A piece of an answer: its text ("" for chunks without any), and the engine's chunk as it came."""

    text: str
    raw: bytes = field(repr=False)

    @property
    def chunk(self) -> Any:
        """The engine's chunk, read."""
        return read_chunk(self.raw)


def read_chunk(raw: bytes) -> Any:
    """Return a chunk as its engine meant it: some write NaN, and half of a surrogate pair. Raises ValueError."""
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return json.loads(raw)


class DeltaOrder:
    """The deltas of one job: `add` what comes, `take` what may be shown, and at the end ask for the `rest`."""

    __slots__ = (
        "_delivery", "_early", "_first", "_gave_up", "_kept_bytes", "_last", "_next", "_ready", "_shown", "_shown_any",
    )  # fmt: skip

    def __init__(self) -> None:
        self._delivery = 0
        self._next = 0
        self._early: dict[int, Delta] = {}
        self._first = b""
        self._ready: list[Delta] = []
        self._shown: list[str] = []
        self._shown_any = False
        self._last: deque[Delta] = deque(maxlen=LAST_CHUNKS)
        self._kept_bytes = 0
        self._gave_up = False

    def add(self, delta: Delta) -> None:
        """Take in a delta; older deliveries, and what came before, are passed over."""
        if delta.seq == self._next and delta.delivery == self._delivery and self._next and not self._early:
            # What every token of a stream does; pieces that are not in order are few.
            if not self._gave_up:
                self._ready.append(delta)
                self._next += 1
                self._hold(delta)
            return
        if delta.delivery < self._delivery or self._gave_up:
            return
        if delta.delivery > self._delivery:
            self._begin(delta.delivery)
        if delta.seq < self._next or delta.seq in self._early or self._gave_up:
            # Begun again under the same number: Redis had forgotten the first claim (a failover). Which of the two a
            # later piece is of, nobody can tell.
            if not delta.seq and delta.chunk != self._first:
                self.give_up()
            return
        if not delta.seq:
            self._first = delta.chunk
        if delta.seq != self._next:
            self._early[delta.seq] = delta
        else:
            self._ready.append(delta)
            self._next += 1
            while self._early and (following := self._early.pop(self._next, None)) is not None:
                self._ready.append(following)
                self._next += 1
        self._hold(delta)

    def _hold(self, delta: Delta) -> None:
        self._kept_bytes += len(delta.chunk) + len(delta.text)
        if self._kept_bytes > MAX_KEPT_BYTES:
            self.give_up()

    def take(self) -> list[DeltaView]:
        """Return what may be shown now, each piece once."""
        return [DeltaView(delta.text, delta.chunk) for delta in self._take()]

    def take_chunks(self) -> list[bytes]:
        """Return the same, for who wants the engine's chunks only: the way of every token through a gateway."""
        return list(map(_CHUNK, self._take()))

    def _take(self) -> list[Delta]:
        ready = self._ready
        if ready:
            self._ready = []
            self._shown_any = True
            self._last.extend(ready)
            self._shown.extend(map(_TEXT, ready))
            self._kept_bytes = (
                sum(len(delta.chunk) + len(delta.text) for delta in self._early.values()) if self._early else 0
            )
        return ready

    def give_up(self) -> None:
        """Keep no deltas any more: the rest of the answer will come from its record."""
        self._ready.clear()
        self._early.clear()
        self._kept_bytes = 0
        self._gave_up = True

    def rest(self, body: bytes) -> DeltaView | None:
        """Return what an answer, now whole, has beyond what was shown; None where nothing is missing.

        Raises ValueError where the answer is not the one that was shown (another worker began it again), and where
        what is missing is more than text: who has seen a part of a tool call cannot be given the rest.
        """
        if self._ready:
            raise AssertionError("take() comes before rest()")
        shown, answer = "".join(self._shown), read_body(body)
        self._shown = [shown]
        text = text_of(answer)
        if self._shown_any and self._is_whole(shown, text):
            return None
        if not text.startswith(shown):
            raise ValueError("the answer is not the one that was shown")
        if self._shown_any and not _is_only_text(answer, begun=bool(shown)):
            raise ValueError("what is missing of the answer is more than a text")
        view = _closing(answer, text[len(shown) :], begun=self._shown_any)
        self._shown, self._shown_any, self._gave_up = [text], True, False
        self._last.clear()
        self._early.clear()
        return view

    def _is_whole(self, shown: str, text: str) -> bool:
        """Whether nothing is missing of an answer of which something was shown, as far as its chunks tell."""
        gap = self._gave_up or bool(self._early)
        ended = _has_ended(self._last)
        if ended is None:  # its engine does not say so with each chunk: its text has to tell
            return text == shown or not (gap or text.startswith(shown))
        return ended and (text == shown or not gap)

    def _begin(self, delivery: int) -> None:
        """A newer delivery makes the answer: nothing of an older one counts, but what was shown was shown."""
        self._delivery = delivery
        self._next = 0
        self._early.clear()
        self._ready.clear()
        if self._shown_any:
            self.give_up()


def _has_ended(last: Iterable[Delta]) -> bool | None:
    """Return whether one of the last chunks that were shown is the end of the answer; None where they do not tell."""
    ends = [_is_end(delta.chunk) for delta in last]
    return True if True in ends else False if False in ends else None


def _is_end(chunk: bytes) -> bool | None:
    try:
        read = read_chunk(chunk)
    except ValueError:
        return None
    match read:
        case {"choices": [*_, {"finish_reason": reason}]}:
            return reason is not None
        case {"type": str(kind)} if kind.startswith("response."):
            return kind in _LAST_EVENTS
    return None


def _is_only_text(answer: Any, *, begun: bool) -> bool:
    """Whether what may be missing of an answer is the text of one choice; `begun`: some of that was shown."""
    if not isinstance(answer, dict) or "choices" not in answer:
        return True  # it comes whole
    match answer["choices"]:
        case [dict() as choice] if not choice.get("logprobs"):
            message = choice.get("message")
            said = {name for name, value in message.items() if value} if isinstance(message, dict) else set()
            return said <= {"role", "content"} | (_BEFORE_TEXT if begun else frozenset())
    return False


def _closing(answer: Any, rest: str, *, begun: bool) -> DeltaView:
    """Return the rest of an answer as one chunk, in the form in which an engine would have sent it."""
    if not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
        return DeltaView(rest, orjson.dumps(answer))
    choices = []
    for position, choice in enumerate(answer["choices"]):
        if not isinstance(choice, dict):
            continue
        piece = {name: value for name, value in choice.items() if name not in ("message", "text", "logprobs")}
        if "text" in choice:
            piece["text"] = rest if position == 0 else choice["text"]
        else:
            piece["delta"] = _delta(choice.get("message"), rest if position == 0 else None, begun=begun)
        choices.append(piece)
    chunk = {**answer, "choices": choices}
    if answer.get("object") == "chat.completion":
        chunk["object"] = "chat.completion.chunk"
    return DeltaView(rest, orjson.dumps(chunk))


def _delta(message: Any, rest: str | None, *, begun: bool) -> dict[str, Any]:
    """Return a message as a delta: all of it, or only the text that is missing where the rest has been shown."""
    if begun and rest is not None:
        return {"content": rest}
    delta = {name: value for name, value in message.items() if value is not None} if isinstance(message, dict) else {}
    if isinstance(calls := delta.get("tool_calls"), list):
        delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls) if isinstance(call, dict)]
    return delta
