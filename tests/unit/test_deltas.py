"""Deltas in order: whatever comes in whatever order, a stream is a beginning of the one answer that counts."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq.scheduler.deltas import MAX_KEPT_BYTES, DeltaOrder, DeltaView
from llmq.scheduler.inbox import Delta
from tests.chat_worker import chat, chunk


def delta(seq: int, text: str, delivery: int = 1) -> Delta:
    """Return a delta."""
    return Delta("j", delivery, seq, text, chunk(text))


def shown(order: DeltaOrder) -> str:
    """Take what may be shown, as one text."""
    return "".join(view.text for view in order.take())


def rest(order: DeltaOrder, body: bytes) -> str | None:
    """Return the text of the rest."""
    view = order.rest(body)
    return None if view is None else view.text


@given(st.lists(st.text(max_size=5), max_size=8), st.data())
def test_a_stream_is_the_answer_whatever_was_lost_or_came_late(texts: list[str], data: st.DataObject) -> None:
    """Deltas come in any order, twice or never; what was shown and the rest are always the whole answer."""
    places = list(range(len(texts)))
    arrivals = data.draw(st.lists(st.sampled_from(places), max_size=20)) if places else []
    order, seen = DeltaOrder(), ""
    for seq in arrivals:
        order.add(delta(seq, texts[seq]))
        if data.draw(st.booleans()):
            seen += shown(order)
    seen += shown(order)
    assert "".join(texts).startswith(seen)
    assert "".join(texts) == seen + (rest(order, chat("".join(texts))) or "")
    assert not rest(order, chat("".join(texts)))


def test_pieces_are_shown_in_order_and_once() -> None:
    """One that comes early waits for those before it."""
    order = DeltaOrder()
    order.add(delta(1, "lo"))
    assert "" == shown(order)
    order.add(delta(0, "Hel"))
    order.add(delta(0, "Hel"))
    assert "Hello" == shown(order)
    assert "" == shown(order)


def test_chunks_come_as_the_engine_made_them() -> None:
    """Those without text as well: they may hold a tool call."""
    order = DeltaOrder()
    order.add(Delta("j", 1, 0, "", b'{"choices": [{"delta": {"tool_calls": []}}]}'))
    (view,) = order.take()
    assert {"choices": [{"delta": {"tool_calls": []}}]} == view.chunk


def test_a_newer_delivery_replaces_what_was_not_shown() -> None:
    """And what an older one still sends is passed over."""
    order = DeltaOrder()
    order.add(delta(0, "old"))
    order.add(delta(0, "new", delivery=2))
    order.add(delta(1, "old"))
    assert "new" == shown(order)
    assert None is rest(order, chat("new"))


def test_an_answer_begun_again_after_it_was_shown_is_not_mixed() -> None:
    """Unless the second begins as the first did: then it goes on."""
    order = DeltaOrder()
    order.add(delta(0, "Hel"))
    assert "Hel" == shown(order)
    order.add(delta(0, "Bye", delivery=2))
    assert "" == shown(order)
    with pytest.raises(ValueError, match="not the one that was shown"):
        order.rest(chat("Bye"))
    assert "lo" == rest(order, chat("Hello"))


def test_an_answer_begun_again_under_the_same_number_is_not_mixed() -> None:
    """G18, F-088: after a failover that forgot the first claim, the second has its number, and its places."""
    order = DeltaOrder()
    order.add(delta(0, "Hel"))
    assert "Hel" == shown(order)
    order.add(delta(0, "Good"))
    order.add(delta(1, "bye"))
    assert "" == shown(order)
    with pytest.raises(ValueError, match="not the one that was shown"):
        order.rest(chat("Goodbye"))


def test_an_answer_begun_again_before_it_was_shown_comes_whole() -> None:
    """G18: nobody has seen the first."""
    order = DeltaOrder()
    order.add(delta(0, "Hel"))
    order.add(delta(0, "Good"))
    order.add(delta(1, "lo"))
    assert "" == shown(order)
    assert "Goodbye" == rest(order, chat("Goodbye"))


def test_an_answer_of_several_choices_needs_no_rest() -> None:
    """Its pieces are mixed, so that they begin no choice's text; all of them came."""
    order = DeltaOrder()
    for seq, text in enumerate(("a1", "b1", "a2")):
        order.add(delta(seq, text))
    assert "a1b1a2" == shown(order)
    assert None is rest(order, chat("a1a2"))


def test_what_nobody_reads_is_not_kept_for_ever() -> None:
    """Above a megabyte the deltas are dropped; the answer comes from the record."""
    order = DeltaOrder()
    order.add(delta(0, "x" * MAX_KEPT_BYTES))
    assert "" == shown(order)
    assert "whole" == rest(order, chat("whole"))


def test_what_is_read_in_time_may_be_as_long_as_it_likes() -> None:
    """Only what is kept is bounded."""
    order = DeltaOrder()
    for seq in range(5):
        order.add(delta(seq, "x" * (MAX_KEPT_BYTES // 3)))
        assert MAX_KEPT_BYTES // 3 == len(shown(order))


def test_an_answer_without_deltas_has_a_chunk_that_an_engine_could_have_sent() -> None:
    """Tool calls get their places, and nulls are left out."""
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "t", "function": {"name": "f"}}]}
    body = {"object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}
    view = DeltaOrder().rest(orjson.dumps(body))
    assert view is not None
    assert {
        "index": 0,
        "delta": {"role": "assistant", "tool_calls": [{"index": 0, "id": "t", "function": {"name": "f"}}]},
        "finish_reason": "tool_calls",
    } == view.chunk["choices"][0]


def test_other_endpoints_come_whole() -> None:
    """Embeddings are no text and no chunks; completions have texts of their own."""
    view = DeltaOrder().rest(b'{"data": [{"embedding": [1]}]}')
    assert view is not None
    assert ("", {"data": [{"embedding": [1]}]}) == (view.text, view.chunk)
    order = DeltaOrder()
    order.add(delta(0, "on"))
    assert "on" == shown(order)
    last = order.rest(b'{"object": "text_completion", "choices": [{"index": 0, "text": "once"}]}')
    assert last is not None
    assert ("ce", [{"index": 0, "text": "ce"}]) == (last.text, last.chunk["choices"])


def part(seq: int, delta: dict[str, object], finish: str | None = None, text: str = "", index: int = 0) -> Delta:
    """Return a delta as an engine sends it, which says with each chunk whether the choice has finished."""
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return Delta("j", 1, seq, text, orjson.dumps({"object": "chat.completion.chunk", "choices": [choice]}))


def completion(*messages: dict[str, object]) -> bytes:
    """Return a whole chat completion."""
    choices = [{"index": i, "message": message, "finish_reason": "stop"} for i, message in enumerate(messages)]
    return orjson.dumps({"object": "chat.completion", "choices": choices})


USAGE = Delta("j", 1, 9, "", b'{"choices": [], "usage": {"total_tokens": 3}}')


def show(*deltas: Delta) -> DeltaOrder:
    """Return the order after it has shown these."""
    order = DeltaOrder()
    for arrived in deltas:
        order.add(arrived)
    order.take()
    return order


@pytest.mark.parametrize("end", [[], [part(4, {}, "stop")]])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_an_end_that_did_not_come_is_said_at_the_end(lost: int, end: list[Delta]) -> None:
    """A stream without a finish reason is a broken one to its client, however much of the text it has."""
    pieces = [part(seq, {"content": text}, text=text) for seq, text in enumerate("abc")]
    order = show(*pieces[: 3 - lost], *end)
    view = order.rest(completion({"role": "assistant", "content": "abc"}))
    assert view is not None
    choice = {"index": 0, "delta": {"content": "abc"[3 - lost :]}, "finish_reason": "stop"}
    assert [choice] == view.chunk["choices"]
    assert None is order.rest(completion({"role": "assistant", "content": "abc"}))


def test_an_end_that_came_is_not_said_again() -> None:
    """Also where the engine tells its usage after it."""
    order = show(part(0, {"content": "abc"}, text="abc"), part(1, {}, "stop"), USAGE._replace(seq=2))
    assert None is order.rest(completion({"role": "assistant", "content": "abc"}))


CALL = {"id": "t", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
CALLS = [part(0, {"role": "assistant", "content": None}), part(1, {"tool_calls": [{"index": 0, **CALL}]})]


@pytest.mark.parametrize(
    ("came", "messages"),
    [
        (CALLS, [{"role": "assistant", "content": None, "tool_calls": [CALL]}]),
        ([*CALLS, part(3, {}, "tool_calls")], [{"role": "assistant", "content": None, "tool_calls": [CALL]}]),
        ([part(0, {"reasoning_content": "thi"})], [{"content": "ab", "reasoning_content": "think"}]),
        (
            [part(0, {"content": "a"}, text="a"), part(1, {"content": "x"}, index=1)],
            [{"content": "ab"}, {"content": "xy"}],
        ),
    ],
    ids=["tool call, end lost", "tool call, part lost", "reasoning", "two choices"],
)
def test_an_answer_that_is_more_than_a_text_is_not_guessed_at(
    came: list[Delta], messages: list[dict[str, object]]
) -> None:
    """Where some of it did not come, who has seen its beginning is told so: half a tool call is no tool call."""
    with pytest.raises(ValueError, match="more than a text"):
        show(*came).rest(completion(*messages))


def test_what_came_before_the_text_was_shown_with_it() -> None:
    """Reasoning is over where the text has begun: only text is missing then."""
    order = show(part(0, {"reasoning_content": "think"}), part(1, {"content": "a"}, text="a"))
    assert "b" == rest(order, completion({"content": "ab", "reasoning_content": "think", "tool_calls": []}))


def test_a_last_event_that_did_not_come_is_made_of_the_answer() -> None:
    """Without `response.completed` a client has no answer, however much of its text it has seen."""
    answer = orjson.dumps({"output": [{"content": [{"type": "output_text", "text": "ab"}]}], "status": "completed"})
    said = Delta("j", 1, 0, "ab", b'{"type": "response.output_text.delta", "delta": "ab"}')
    view = show(said).rest(answer)
    assert view is not None
    assert ("", "completed") == (view.text, view.chunk["status"])
    last = Delta("j", 1, 1, "", b'{"type": "response.completed", "response": {}}')
    assert None is show(said, last).rest(answer)


def test_a_chunk_that_strict_parsers_refuse_can_be_read() -> None:
    """Engines write NaN, and halves of surrogate pairs."""
    view = DeltaView("", b'{"logprob": NaN, "choices": [{"delta": {"content": "\\ud83d"}}]}')
    assert "\ud83d" == view.chunk["choices"][0]["delta"]["content"]


def test_an_end_is_seen_in_a_chunk_that_strict_parsers_refuse() -> None:
    """Its finish reason counts like any other."""
    last = Delta("j", 1, 1, "", b'{"choices": [{"index": 0, "finish_reason": "stop", "logprob": NaN}]}')
    order = show(part(0, {"content": "abc"}, text="abc"), last)
    assert None is order.rest(completion({"role": "assistant", "content": "abc"}))
