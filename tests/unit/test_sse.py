"""Server-sent events: every split of the bytes gives the same events, and only real line ends end lines."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq.workers.engines.sse import EventParser, EventTooLarge

LIMIT = 10_000

LINE_ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])
LINES = st.sampled_from(
    [
        b"",
        b"",
        b"data: {}",
        b"data:no space",
        b"data:  two spaces",
        b"data:",
        b"data",
        b"data: a:b: c",
        b"event: message_start",
        b": keep-alive",
        b"id: 7",
        b"retry: 10",
        b"unknown: x",
        b"data: \xe2\x80\xa8\xe2\x80\xa9\xc2\x85\x0b\x0c\x1c\xff",
        b"\xef\xbb\xbfdata: marked",
    ]
)
STREAMS = st.lists(st.tuples(LINES, LINE_ENDS), max_size=30).map(lambda lines: b"".join(a + b for a, b in lines))


def events_of(*pieces: bytes) -> list[bytes]:
    parser = EventParser(LIMIT)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.close()


def events_by_the_letter(stream: bytes) -> list[bytes]:
    """Read a whole stream as the rules say, one after the other: what the parser is held against."""
    events, data = [], None
    for line in [*re.split(rb"\r\n|\n|\r", stream.removeprefix(b"\xef\xbb\xbf")), b""]:
        field, _, value = line.partition(b":")
        value = value[1:] if value[:1] == b" " else value
        if not line:
            if data is not None:
                events.append(data)
            data = None
        elif field == b"data":
            data = value if data is None else data + b"\n" + value
    return events


@given(STREAMS, st.lists(st.integers(0, 400), max_size=12))
def test_any_split_of_the_bytes_gives_the_events_that_the_rules_give(stream: bytes, cuts: list[int]) -> None:
    """F-135: what the network does to a stream changes nothing about its events."""
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    pieces = [stream[a:b] for a, b in itertools.pairwise(places)]

    assert events_by_the_letter(stream) == events_of(*pieces)


@given(STREAMS)
def test_one_byte_at_a_time_gives_the_same_events(stream: bytes) -> None:
    """F-135: the smallest pieces of all."""
    assert events_by_the_letter(stream) == events_of(*(bytes([byte]) for byte in stream))


def test_separators_of_unicode_are_part_of_the_text() -> None:
    """F-135: U+2028, U+2029 and U+0085 end no line, though str.splitlines says so."""
    text = "a\u2028b\u2029c\u0085d\x0b\x0c\x1ce".encode()

    assert [text] == events_of(b"data: " + text + b"\n\n")


def test_a_line_that_ends_with_cr_is_taken_at_once() -> None:
    """An event is not held back until it is known whether an LF follows its CR."""
    parser = EventParser(LIMIT)

    assert [b"1"] == parser.feed(b"data: 1\r\r")
    assert [b"2"] == parser.feed(b"\ndata: 2\n\n")


def test_several_data_lines_are_one_event() -> None:
    """Lines of data are joined with LF; names and comments do not end an event."""
    stream = b"event: delta\ndata: a\n: comment\ndata: b\n\n"

    assert [b"a\nb"] == events_of(stream)


def test_an_event_without_its_empty_line_is_taken_when_the_stream_ends() -> None:
    """A server that closes right after its last line loses nothing."""
    assert [b"[DONE]"] == events_of(b"data: [DONE]")


def test_a_line_that_never_ends_is_refused() -> None:
    """What is held stays bounded, whatever a server sends."""
    parser = EventParser(100)
    parser.feed(b"data: " + b"x" * 90)

    with pytest.raises(EventTooLarge):
        parser.feed(b"x" * 10)


def test_an_event_of_endless_lines_is_refused() -> None:
    """The bound is on the event, not on the line."""
    with pytest.raises(EventTooLarge):
        EventParser(100).feed(b"data: 123456\n" * 20)


def test_an_event_of_endless_empty_lines_is_refused() -> None:
    """Each of them is a line of its data, and held."""
    parser = EventParser(100)
    parser.feed(b"data\ndata:\n" * 50)
    with pytest.raises(EventTooLarge):
        parser.feed(b"data\n")


def test_many_events_in_one_piece_are_within_the_bound() -> None:
    """The bound is on the event, not on what the network delivers at once."""
    assert 50 == len(EventParser(100).feed(b"data: 123456\n\n" * 50))


ODD = [
    b"data: a\n\n", b"data: b\n", b"\n", b"data:c\n\n", b"event: x\n", b": hm\n\n", b"data: \xe2\x80\xa8\r\n\r\n",
    b"data: d\r", b"\ndata: e\n\n", b"\n\n", b"da", b"ta: f\n\n", b"data: g\n\ndata: h\n\n", b"data: i\ndata: j\n\n",
]  # fmt: skip


@given(st.lists(st.sampled_from(ODD), max_size=12))
def test_whole_events_are_read_as_if_they_came_byte_by_byte(pieces: list[bytes]) -> None:
    """The short way for what comes whole gives what the long one does, whatever stands before it."""
    whole, single = EventParser(1000), EventParser(1000)
    expected = [event for byte in b"".join(pieces) for event in single.feed(bytes([byte]))] + single.close()
    assert expected == [event for piece in pieces for event in whole.feed(piece)] + whole.close()
