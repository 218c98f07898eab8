"""Server-sent events: bytes in, events out.

An engine streams its answer as `text/event-stream`; `HttpEngine` feeds what arrives to an `EventParser` and takes the
events from it, which are their data: engines that name them say the name in there once more. Lines end at LF, CR LF or
CR and nowhere else: U+2028, U+2029 and U+0085 are part of the text, and the line iterators of str, which split there,
break LLM answers. Nothing here knows of JSON or of the network.
"""

from __future__ import annotations

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

#: As numbers: to look for one in bytes takes a tenth of the time that looking for bytes does.
LF, CR = b"\n"[0], b"\r"[0]


class EventTooLarge(ValueError):
    """One event is larger than the parser may hold."""


class EventParser:
    """Splits a stream into the data of its events (lines joined with LF), however the network cut it.

    `max_event_bytes` bounds what is held of an event that has not ended; all fields but `data:` are dropped: llmq never
    reconnects to a stream.
    """

    def __init__(self, max_event_bytes: int) -> None:
        self._max_event_bytes = max_event_bytes
        self._tail: list[bytes] = []
        self._data: list[bytes] = []
        self._held = 0
        self._after_cr = False
        self._first_line = True
        self._between = False
        """Whether all that came has been handed on: what comes next begins an event."""

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes as they came; return the events that they end. Raises EventTooLarge."""
        if self._between and (events := _whole_events(data, self._max_event_bytes)) is not None:
            return events
        if self._after_cr and data:
            # The CR ended its line when it came; an LF that follows belongs to it.
            self._after_cr = False
            data = data.removeprefix(b"\n")
        self._between = False
        if LF not in data and CR not in data:
            # A long line in small pieces is joined once, at its end.
            self._tail.append(data)
            self._hold(self._held + len(data))
            return []
        text = b"".join((*self._tail, data))
        # Unlike str.splitlines, bytes.splitlines splits at LF, CR LF and CR only.
        lines = text.splitlines()
        self._after_cr = text.endswith(b"\r")
        self._tail = [] if text.endswith((b"\n", b"\r")) else [lines.pop()]
        events = [event for line in lines if (event := self._take_line(line)) is not None]
        for event in events:
            self._hold(len(event))
        self._hold(sum(map(len, self._tail)) + sum(map(len, self._data)) + len(self._data))
        self._between = not (self._tail or self._data or self._after_cr)
        return events

    def close(self) -> list[bytes]:
        """Say that the stream has ended; return an event that only misses its closing empty line."""
        tail = b"".join(self._tail)
        self._tail = []
        events = [self._take_line(tail) if tail else None, self._take_line(b"")]
        return [event for event in events if event is not None]

    def _take_line(self, line: bytes) -> bytes | None:
        if self._first_line:
            self._first_line = False
            line = line.removeprefix(BYTE_ORDER_MARK)
        if not line:
            return self._end_event()
        field, _, value = line.partition(b":")
        if field == b"data":
            self._data.append(value.removeprefix(b" "))
        return None

    def _end_event(self) -> bytes | None:
        event = b"\n".join(self._data) if self._data else None
        self._data = []
        return event

    def _hold(self, size: int) -> None:
        if size > self._max_event_bytes:
            raise EventTooLarge(f"an event of the stream is larger than {self._max_event_bytes:,} bytes")
        self._held = size


def _whole_events(data: bytes, most: int) -> list[bytes] | None:
    """Return the events of bytes that are whole events of one `data:` line each, as most are; None for others."""
    if not data.startswith(b"data: ") or not data.endswith(b"\n\n") or CR in data:
        return None
    if data.find(LF) == len(data) - 2:  # one, which is the rule
        return [data[6:-2]] if len(data) <= most else None
    lines = data[:-2].split(b"\n\n")
    whole = all(line.startswith(b"data: ") and LF not in line and len(line) <= most for line in lines)
    return [line[6:] for line in lines] if whole else None
