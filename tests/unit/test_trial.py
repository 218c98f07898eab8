"""Trials: how traffic is scaled, what is searched for, and what the figures make of what was seen. Pure values."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmq.scheduler.errors import EngineUnavailable, UsageError
from llmq.scheduler.job import Job
from llmq.scheduler.tuned import Tuned, field_of, tuned_for
from llmq.workers.engines.sim import SimEngine
from llmq.workers.traffic import Arrival, rate_for, recorded, recorded_in, scaled
from llmq.workers.trial.capacity import measure_pace
from llmq.workers.trial.figures import bursts, p95_alone, quantile, rows_of, windows
from llmq.workers.trial.metered import MeteredEngine
from llmq.workers.trial.phase import Phase, Plan, straight
from llmq.workers.trial.requests import Requests, Wording
from llmq.workers.trial.tuning import most_that_holds


@given(st.integers(1, 100), st.integers(0, 110))
async def test_the_search_finds_what_holds(most: int, limit: int) -> None:
    """At most an eighth below the limit, never above it, and in few trials."""
    tried: list[int] = []

    async def holds(number: int) -> bool:
        tried.append(number)
        return number <= limit

    found = await most_that_holds(most, holds)
    limit = min(limit, most)
    assert limit - max(1, limit / 8) < found <= limit
    assert len(tried) == len(set(tried)) <= 2 * math.ceil(math.log2(most + 1)) + 2


@pytest.mark.parametrize("a_second", [0.5, 3.0, 20.0])
def test_the_rate_gives_as_many_requests_as_were_asked_for(a_second: float) -> None:
    """To a request or two: the recording has bursts."""
    rate = rate_for(list(recorded()), 60.0, a_second)
    assert len(scaled(60.0, rate=rate)) == pytest.approx(60 * a_second, abs=3)


def test_more_than_the_recording_holds_uses_all_of_it_up() -> None:
    """No arrival is made up."""
    trace = list(recorded())
    assert len(trace) - 1 <= len(scaled(10.0, rate=rate_for(trace, 10.0, 1e6), arrivals=trace)) <= len(trace)


def test_traffic_of_the_user_is_read_in_both_forms(tmp_path: Path) -> None:
    """Milliseconds, or date and time as in the Azure traces; it begins at 0."""
    plain, dated = tmp_path / "plain.csv", tmp_path / "dated.csv"
    plain.write_text("# ours\n1500,10,5\n2000,20,6\n")
    dated.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,10,5\n2023-11-16 18:15:47.1805900,20,6\n"
    )
    for file in (plain, dated):
        first, second = recorded_in(file)
        assert (Arrival(0.0, 10, 5), 20) == (first, second.prompt)
        assert second.at == pytest.approx(0.5)


def test_a_bad_line_of_traffic_is_named(tmp_path: Path) -> None:
    """With its number and what was expected."""
    bad = tmp_path / "bad.csv"
    bad.write_text("1,2,3\nnonsense\n")
    with pytest.raises(UsageError, match="line 2: expected time, prompt tokens, answer tokens, got 'nonsense'"):
        recorded_in(bad)


def test_bursts_begin_where_many_come_after_few() -> None:
    """One burst of 20 in a minute of one request a second."""
    even = [float(second) for second in range(60)]
    burst = [30 + n / 10 for n in range(20)]
    assert [] == bursts(even)
    (found,) = bursts(sorted(even + burst))
    assert 25 <= found <= 30


def test_rows_compare_with_chat_alone() -> None:
    """A request that never got a token is slower than all; what was before the warm-up does not count."""
    alone = Phase("alone", 20, 5, firsts=[(1.0, 9.0), *((5 + n / 10, 0.1) for n in range(100))])
    other = Phase("both", 20, 5, firsts=[(5 + n / 10, 0.2 if n < 90 else None) for n in range(100)], made=300)
    other.counted_s = 15.0
    other.all_made, other.wasted_tokens = 400, 40
    first, second = rows_of([alone, other])
    assert (100, 0.1, 1.0, 1.0) == (first.requests, first.p95_s, first.ratio, first.within)
    assert (0.2, math.inf, math.inf) == (second.p50_s, second.p95_s, second.ratio)
    assert second.batch_tps == pytest.approx(300 / 15 * 0.9)
    assert json.loads(json.dumps(second.to_json()))["p95_s"] is None


def test_the_warm_up_of_each_turn_does_not_count() -> None:
    """Three turns of 20 s: the first 5 s of each are left out, and bursts are found among all arrivals."""
    firsts: list[tuple[float, float | None]] = [(second + 0.5, 9.0 if second % 20 < 5 else 0.1) for second in range(60)]
    burst: list[tuple[float, float | None]] = [(24 + n / 10, 0.3) for n in range(60)]
    (row,) = rows_of([Phase("alone", 60, 5, 3, firsts=firsts + burst)])
    assert 3 * 15 + 50 == row.requests
    assert (0.3, 0.3) == (row.p50_s, row.burst_p95_s)


def test_the_p95_alone_of_several_phases_is_that_of_all_their_requests() -> None:
    """Each without its own warm-ups."""
    once = Phase("alone", 40, 5, firsts=[(n / 10, 9.0 if n < 50 else 0.1) for n in range(250)])
    turns = Phase("alone", 40, 5, 2, firsts=[(n / 10, 9.0 if n % 200 < 50 else 0.3) for n in range(400)])
    assert (0.1, 0.3) == (p95_alone([once]), p95_alone([once, turns]))
    assert p95_alone([once, Phase("alone", 40, 5, firsts=[(9.0, 0.3)] * 5)]) == 0.1
    assert math.isnan(p95_alone([]))


def test_nothing_is_compared_with_chat_that_got_no_token() -> None:
    """One in 20 without: its p95 alone is infinite, and everything would hold."""
    some: list[tuple[float, float | None]] = [(n, 0.1 if n else None) for n in range(20)]
    assert 0.1 == p95_alone([Phase("alone", 40, 0, firsts=some)])
    with pytest.raises(EngineUnavailable, match="one in 20"):
        p95_alone([Phase("alone", 40, 0, firsts=some[:19])])


async def test_phases_take_turns() -> None:
    """Each has its own arrivals of a turn, and while others have theirs it runs no batch."""
    engine = MeteredEngine(SimEngine.from_url("sim://?slots=8&prefill_tps=1000000&decode_tps=2000"))
    arrivals = [Arrival(n / 50, 5, 5) for n in range(20)]
    plan = Plan(arrivals, 0.4, 0.1, 8, lambda: Requests(Wording(), 0.1, 4000), turns=2)
    alone, beside = straight("alone", plan, engine, 0), straight("beside", plan, engine, 3)
    seen = []
    for _ in range(plan.turns):
        for part in (alone, beside):
            phase = await anext(part)
            assert engine.meter.quiet.is_set()
            seen.append((phase.name, len(phase.firsts), bool(phase.made)))
    assert [("alone", 10, False), ("beside", 10, True), ("alone", 20, False), ("beside", 20, True)] == seen
    assert [at for at, _ in sorted(phase.firsts)] == [arrival.at for arrival in arrivals]
    assert phase.counted_s == pytest.approx(0.2, abs=0.05)
    assert phase.all_made > phase.made
    for part in (alone, beside):
        assert await anext(part, None) is None


def test_quantiles_are_values_that_were_seen() -> None:
    """The value that 95 of 100 are at most."""
    assert (95, 1) == (quantile(range(1, 101), 0.95), quantile([1], 0.95))
    assert [(0.0, 2.0), (10.0, 3.0)] == windows([(0.0, 1.0), (4.9, 2.0), (10.0, 3.0)])


async def test_requests_have_as_many_tokens_as_they_shall() -> None:
    """Measured with the engine's own count; and no two prompts begin alike."""
    engine = MeteredEngine(SimEngine.from_url("sim://?instant=1"))
    requests = Requests((await measure_pace(engine)).wording, 1.0, 4000)
    bodies = [requests.chat(Arrival(0.0, 700, 3)) for _ in range(3)]
    for body in bodies:
        answer = await engine.run(Job("/v1/chat/completions", body))
        assert answer.usage.prompt_tokens == pytest.approx(700, rel=0.15)
        assert 3 == answer.usage.completion_tokens
    starts = [body["messages"][0]["content"].split()[0] for body in bodies]
    assert 3 == len(set(starts))


def test_batch_prompts_are_as_long_as_they_shall() -> None:
    """Between the two numbers, as much scaled as chat is."""
    requests = Requests(Wording(), 0.5, 100_000, batch_prompt=(2000, 8000))
    words = [len(requests.batch()["messages"][0]["content"].split()) for _ in range(50)]
    assert 1000 <= min(words) < 2000 < 3000 < max(words) <= 4000


async def test_the_meter_counts_batch_and_only_batch() -> None:
    """One token a piece of a batch answer; chat passes uncounted."""
    engine = MeteredEngine(SimEngine.from_url("sim://?prefill_tps=1000000&decode_tps=10000"))
    requests = Requests(Wording(), 1.0, 4000)
    await engine.run(Job("/v1/chat/completions", requests.chat(Arrival(0.0, 10, 20))))
    assert 0 == engine.meter.tokens
    body = requests.batch()
    answer = await engine.run(Job("/v1/chat/completions", body), lambda text, chunk: None)
    assert engine.meter.tokens == pytest.approx(answer.usage.completion_tokens, abs=2)


def test_what_was_tuned_is_read_for_its_engine_and_model_only() -> None:
    """What somebody wrote by hand, or another version, is as if nothing were there."""
    text = b'{"batch": 5, "prefill_tps": 900.0, "alone_s": 0.1, "chat_rate": 2.0, "at": 1.0}'
    config = {field_of("vllm", ["m"]).encode(): text}
    assert Tuned(5, 900.0, 0.1, 2.0, 1.0) == tuned_for(config, "vllm", ("m", "other"))
    assert tuned_for(config, "vllm", ("other",)) is None
    for wrong in (b"", b"[]", b"{}", text.replace(b"5", b'"x"', 1), text.replace(b"5", b"-5", 1)):
        assert tuned_for({field_of("vllm", ["m"]).encode(): wrong}, "vllm", ("m",)) is None


def test_what_is_stored_without_chat_in_flight_is_read_all_the_same() -> None:
    """An earlier version did not store it; what held is then taken to be batch alone."""
    text = b'{"batch": 5, "prefill_tps": 900.0, "alone_s": 0.1, "chat_rate": 2.0, "at": 1.0'
    for rest, in_flight in ((b"}", 6.0), (b', "chat": 2.5}', 8.5)):
        found = tuned_for({field_of("vllm", ["m"]).encode(): text + rest}, "vllm", ("m",))
        assert found is not None
        assert found.in_flight == in_flight
    assert Tuned(0, 0.0, 0.1, 2.0, 1.0, chat=2.5).in_flight == 0
