"""The repetition: chunks of a stream that are their predecessor but for its text, which most of them are.

To read such a chunk, a cut at the right place is enough: its JSON need not be parsed, nor merged field by field, since
all of it but the text has been merged already. What it takes for one is proved when it is learned, not guessed; a chunk
that differs anywhere else is read in full by the assembler, and learned from anew.
"""

from __future__ import annotations

import sys

import orjson

from llmq.workers.engines.merge import NAMES, Tree, load

#: Chunks in a row of which each differs from the one before: an engine that numbers them. It is given up then.
MOST_IN_VAIN = 8

LONGER_THAN_ANY = sys.maxsize

#: As numbers: to look for one in bytes takes a tenth of the time that looking for bytes does.
QUOTE, BACKSLASH = b'"'[0], b"\\"[0]


class Repetition:
    """Knows the chunks that repeat the last one; `field` is where their text is: `content`, or `text`."""

    __slots__ = ("_begin", "_end", "_field", "_head", "_in_vain", "_least", "_tail")

    def __init__(self, field: str) -> None:
        self._field = field
        self._in_vain = 0
        self._forget()

    def text_of(self, data: bytes) -> str | None:
        """Return the text of a chunk that repeats the last one; None for any other."""
        if len(data) < self._least or not data.startswith(self._head) or not data.endswith(self._tail):
            return None
        middle = data[self._begin : self._end]
        try:
            text = middle.decode()
            # Of the rest some is escaped, and some no JSON; let who knows decide.
            if QUOTE in middle or BACKSLASH in middle or not text.isprintable():
                text = str(orjson.loads(b'"%b"' % middle))
        except ValueError:
            return None
        self._in_vain = 0
        return text

    def learn(self, data: bytes, chunk: Tree) -> bool:
        """Take a chunk that was read in full; return whether what comes next may repeat it."""
        self._forget()
        if self._in_vain >= MOST_IN_VAIN:
            return False
        self._in_vain += 1
        text = self._only_text(chunk)
        if not text or not text.isprintable() or '"' in text or "\\" in text:
            return False
        quoted = f'"{text}"'.encode()
        for name in (f'"{self._field}":', f'"{self._field}": '):
            before, found, after = data.partition(name.encode() + quoted)
            if found and self._is_text(head := before + name.encode() + b'"', tail := b'"' + after, chunk, text):
                self._head, self._tail, self._least = head, tail, len(head) + len(tail)
                self._begin, self._end = len(head), -len(tail)
        return self._least < LONGER_THAN_ANY

    def _only_text(self, chunk: Tree) -> str | None:
        """Return the text of a chunk to which a second one adds its text and nothing else; None for any other."""
        choices = chunk.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or choices[0].get("index", 0) != 0:
            return None
        fields = {name: value for name, value in choices[0].items() if name != "index"}
        holder = fields.pop("delta", None) if self._field == "content" else fields
        if not isinstance(holder, dict):
            return None
        text = holder.get(self._field)
        others = [name for name, value in holder.items() if value is not None and name != self._field]
        if holder is not fields:
            others = [name for name in others if name not in NAMES or not isinstance(holder[name], str)]
            others += [name for name, value in fields.items() if value is not None]
        return text if isinstance(text, str) and not others else None

    def _is_text(self, head: bytes, tail: bytes, chunk: Tree, text: str) -> bool:
        """Prove that what stands between them is the text: another one there makes the same chunk but for its text."""
        try:
            other = load(head + b"~" + tail)
            choice = other["choices"][0]
            holder = choice["delta"] if self._field == "content" else choice
            if holder[self._field] != "~":
                return False
            holder[self._field] = text
        except (ValueError, LookupError, TypeError):
            return False
        return bool(other == chunk)

    def _forget(self) -> None:
        self._head, self._tail, self._least = b"", b"", LONGER_THAN_ANY
        self._begin = self._end = 0
