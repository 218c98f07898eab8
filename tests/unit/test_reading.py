"""Reading: when a batch prompt may be begun beside chat."""

from __future__ import annotations

from llmq.workers.reading import UNREAD, YIELD_S, Reading, makes_way


def test_long_prompts_are_read_one_at_a_time_and_short_ones_together() -> None:
    """What counts is how many tokens the engine has yet to read, with chat here or not."""
    reading = Reading()
    for chat in (True, False):
        assert reading.may_begin(0.0, unread=0, waiting=0, chat=chat)
        assert reading.may_begin(0.0, unread=UNREAD - 1, waiting=0, chat=chat)
        assert not reading.may_begin(0.0, unread=UNREAD, waiting=0, chat=chat)


def test_no_prompt_is_begun_while_chat_waits_but_for_a_second_only() -> None:
    """Chat comes first; a chat request that waits for long does not stop batch altogether."""
    reading = Reading()
    reading.begun(10.0, 100, chat=True)
    assert reading.may_begin(10.1, unread=0, waiting=0, chat=True)
    assert not reading.may_begin(10.1, unread=0, waiting=1, chat=True)
    assert reading.may_begin(10.0 + YIELD_S, unread=0, waiting=1, chat=True)


def test_prompts_keep_to_the_rate_that_was_measured_while_chat_is_here() -> None:
    """1,000 tokens at 500 a second: the next one two seconds later, however short it is. Without chat at once."""
    reading = Reading(tokens_a_second=500.0)
    reading.begun(0.0, 1000, chat=True)
    assert not reading.may_begin(1.9, unread=0, waiting=0, chat=True)
    assert reading.may_begin(1.9, unread=0, waiting=0, chat=False)
    assert reading.may_begin(2.0, unread=0, waiting=0, chat=True)


def test_a_long_prompt_makes_way_until_its_first_token() -> None:
    """What is read in one step is read before an abort could reach the engine; what has made tokens stays."""
    assert makes_way(UNREAD + 1, shown=0)
    assert not makes_way(UNREAD, shown=0)
    assert not makes_way(UNREAD + 1, shown=1)


def test_what_made_way_is_not_read_again_while_that_chat_waits() -> None:
    """However long it had been read: the second of patience begins with the chat that it made way for."""
    reading = Reading()
    reading.begun(0.0, 8000, chat=False)
    reading.interrupted(5.0)
    assert not reading.may_begin(5.1, unread=0, waiting=1, chat=True)
    assert reading.may_begin(5.1, unread=0, waiting=0, chat=True)
    assert reading.may_begin(5.0 + YIELD_S, unread=0, waiting=1, chat=True)


def test_what_made_way_is_not_counted_as_read() -> None:
    """At 1,000 tokens a second a prompt of 8,000 that was read for a moment holds back the next one for no longer."""
    reading = Reading(tokens_a_second=1000.0)
    reading.begun(0.0, 2000, chat=True)
    reading.begun(0.0, 8000, chat=True)
    reading.interrupted(0.2)
    reading.interrupted(0.2)  # once is enough
    assert not reading.may_begin(1.9, unread=0, waiting=0, chat=True)
    assert reading.may_begin(2.0, unread=0, waiting=0, chat=True)


def test_what_was_read_without_chat_is_no_debt() -> None:
    """An hour of batch alone, far above the rate that holds beside chat, holds back nothing when chat comes."""
    reading = Reading(tokens_a_second=100.0)
    for second in range(3600):
        reading.begun(float(second), 1000, chat=False)
    assert reading.may_begin(3600.0, unread=0, waiting=0, chat=True)


def test_what_was_not_billed_is_not_paid_back() -> None:
    """Begun without chat, a prompt that makes way leaves the debt of those before it as it was."""
    reading = Reading(tokens_a_second=1000.0)
    reading.begun(0.0, 2000, chat=True)
    reading.begun(0.1, 8000, chat=False)
    reading.interrupted(0.2)
    assert not reading.may_begin(1.9, unread=0, waiting=0, chat=True)
    assert reading.may_begin(2.0, unread=0, waiting=0, chat=True)
