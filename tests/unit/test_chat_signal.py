"""The chat signal: what the governor is told of first tokens, gaps and waits."""

from __future__ import annotations

from llmq.workers.chat_signal import BLIND_AFTER, GAPS_A_SAMPLE, ChatSignal, Evidence, Objective

TTFT = Objective(ttft_p95_s=0.1)
ITL = Objective(itl_p95_s=0.05)


def stream(signal: ChatSignal, name: str, came: float, first: float, gaps: list[float]) -> float:
    """Let one request come, begin, go on with these gaps, and end; return when."""
    signal.taken(name, came, 0.0)
    at = came + first
    begun = signal.begun(name, at)
    for gap in gaps:
        at += gap
        signal.token(begun, at)
    signal.ended(name, at)
    return at


def test_first_tokens_are_counted_once() -> None:
    """One good and one slow request; asked again, there is nothing new."""
    signal = ChatSignal(TTFT)
    stream(signal, "a", 0.0, 0.05, [])
    stream(signal, "b", 1.0, 0.20, [])
    assert Evidence(2, 1) == signal.fresh()
    assert Evidence() == signal.fresh()


def test_the_wait_in_the_queue_belongs_to_the_time_to_first_token() -> None:
    """Users state what they see: from submit, not from the claim."""
    signal = ChatSignal(TTFT)
    signal.taken("a", 10.0, 0.08)
    signal.begun("a", 10.05)
    assert Evidence(1, 1) == signal.fresh()


def test_a_request_that_still_waits_counts_when_it_is_over_the_limit() -> None:
    """A burst is seen while it lasts."""
    signal = ChatSignal(TTFT)
    signal.taken("a", 0.0, 0.0)
    signal.taken("b", 0.0, 0.0)
    assert Evidence() == signal.since(0.0, 0.05)
    assert Evidence(2, 2) == signal.since(0.0, 0.15)


def test_what_came_before_is_no_evidence() -> None:
    """A request that was submitted before the last decision tells about the time before it."""
    signal = ChatSignal(TTFT)
    stream(signal, "a", 0.0, 0.5, [])
    signal.taken("b", 0.1, 0.0)
    assert Evidence() == signal.since(0.2, 1.0)
    assert Evidence(2, 2) == signal.since(-1.0, 1.0)


def test_gaps_are_counted_by_twenties() -> None:
    """One slow gap of twenty is what a p95 allows; two are slow. First tokens are not asked about here."""
    signal = ChatSignal(ITL)
    even = [0.01] * (GAPS_A_SAMPLE - 2)
    stream(signal, "a", 0.0, 9.0, [*even, 0.01, 0.2])
    stream(signal, "b", 10.0, 9.0, [*even, 0.2, 0.2])
    stream(signal, "c", 20.0, 9.0, even)
    assert Evidence(2, 1) == signal.fresh()


def test_a_stream_that_falls_silent_is_evidence() -> None:
    """Three times the limit without a token: it is not only the end that is missing."""
    signal = ChatSignal(ITL)
    signal.taken("a", 0.0, 0.0)
    signal.begun("a", 0.1)
    assert Evidence() == signal.since(0.0, 0.2)
    assert Evidence(1, 1) == signal.since(0.0, 0.3)


def test_presence_and_idleness() -> None:
    """Never there, there, gone for a while."""
    signal = ChatSignal(TTFT)
    assert (False, None) == (signal.present, signal.idle_s(5.0))
    signal.taken("a", 5.0, 0.0)
    assert (True, 0.0, 1) == (signal.present, signal.idle_s(9.0), signal.waiting)
    signal.ended("a", 10.0)
    assert (False, 2.0) == (signal.present, signal.idle_s(12.0))


def test_chat_without_tokens_cannot_be_measured() -> None:
    """Embeddings, and engines that do not stream: the governor must not take silence for speed."""
    signal = ChatSignal(TTFT)
    for name in range(BLIND_AFTER):
        assert not signal.blind
        signal.taken(name, 0.0, 0.0)
        signal.ended(name, 1.0)
    assert signal.blind
    stream(signal, "a", 2.0, 0.1, [])
    assert not signal.blind


def test_chat_that_fails_is_no_chat_without_tokens() -> None:
    """An engine that dies with ten chat requests in it is no engine whose chat cannot be measured."""
    signal = ChatSignal(TTFT)
    for name in range(2 * BLIND_AFTER):
        signal.taken(name, 0.0, 0.0)
        signal.ended(name, 1.0, answered=False)
    assert not signal.blind


def test_chat_that_its_client_gave_up_was_slow() -> None:
    """Nobody waits for an answer for ever: where all give up, all were slow. Before the limit nothing is known."""
    signal = ChatSignal(TTFT)
    for name, waited_s, given_up in (("a", 5.0, True), ("b", 0.05, True), ("c", 5.0, False)):
        signal.taken(name, 0.0, 0.0)
        signal.ended(name, waited_s, answered=False, given_up=given_up)
    assert Evidence(1, 1) == signal.fresh()
    assert 5.0 == signal.ttft_p95(5.0, 10.0)


def test_an_objective_is_far_looser_where_it_is_in_one_and_tighter_in_none() -> None:
    """A few milliseconds more are no reason to search anew; no objective is the loosest."""
    assert Objective(0.2).far_looser_than(TTFT)
    assert Objective(0.2).far_looser_than(Objective(0.1, 0.05))
    assert Objective(None, 0.05).far_looser_than(Objective(0.1, 0.05))
    assert not Objective(0.11).far_looser_than(TTFT)
    assert not Objective(0.2, 0.05).far_looser_than(TTFT)
    assert not TTFT.far_looser_than(TTFT)
    assert not Objective().far_looser_than(Objective())


def test_percentiles_are_of_the_window() -> None:
    """What is older than the window is forgotten."""
    signal = ChatSignal(TTFT)
    stream(signal, "old", 0.0, 3.0, [])
    for number in range(19):
        stream(signal, f"n{number}", 20.0 + number, 0.05, [])
    assert 0.05 == round(signal.ttft_p95(40.0, 30.0) or 0, 3)
    assert 3.0 == signal.ttft_p95(39.5, 60.0)
    assert None is signal.ttft_p95(200.0, 10.0)
