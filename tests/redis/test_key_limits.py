"""The limits of an API key: what `enter`, `stay` and `leave` give and take, held against a model."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest
from redis.asyncio import Redis

from llmq.scheduler.api_key import KeyLimits
from llmq.scheduler.key_scripts import Entry, enter, leave, stay
from tests.scripted_queue import ScriptedQueue

KEY = "k1"
LEASE_MS = 30_000


async def let_in(queue: ScriptedQueue, limits: KeyLimits, *, call: str = "c", cost: int = 0) -> Entry:
    """Ask to be let in."""
    return await queue.call(enter(queue.keys, KEY, call_id=call, limits=limits, cost=cost, lease_ms=LEASE_MS))


async def let_out(queue: ScriptedQueue, limits: KeyLimits, *, call: str = "c", more: int = 0) -> None:
    """Leave."""
    await queue.call(leave(queue.keys, KEY, call_id=call, limits=limits, more=more))


@dataclass
class Model:
    """The same limits in plain Python: exact, without Redis, one key."""

    limits: KeyLimits
    requests: float = math.inf
    tokens: float = math.inf
    at: int = 0
    places: dict[str, int] = field(default_factory=dict)

    def refill(self, now: int) -> None:
        """Let time pass; a clock that went back gives nothing."""
        elapsed = max(0, now - self.at) if self.at else 0
        for name in ("requests", "tokens"):
            minute = getattr(self.limits, name)
            if minute is not None:
                setattr(self, name, min(minute, getattr(self, name) + elapsed * minute / 60_000))
        self.at = max(self.at, now)

    def enter(self, now: int, call: str, cost: int) -> str:
        """Return which limit refuses a call; "" lets it in."""
        self.refill(now)
        self.places = {name: min(ends, now + LEASE_MS) for name, ends in self.places.items() if ends > now}
        if self.limits.tokens is not None and self.tokens < cost:
            if cost <= self.limits.tokens and self.limits.requests is not None and self.requests < 1:
                by_tokens = math.ceil((cost - self.tokens) * 60_000 / self.limits.tokens)
                by_requests = math.ceil((1 - self.requests) * 60_000 / self.limits.requests)
                return "requests" if by_requests > by_tokens else "tokens"
            return "tokens"
        if self.limits.requests is not None and self.requests < 1:
            return "requests"
        if self.limits.concurrency is not None and len(self.places) >= self.limits.concurrency:
            return "concurrency"
        self.requests -= 1
        self.tokens -= cost
        self.places[call] = now + LEASE_MS
        return ""

    def leave(self, now: int, call: str, more: int) -> None:
        """Give a place back and set the LLM tokens right."""
        self.places.pop(call, None)
        if self.limits.tokens is not None and more:
            self.refill(now)
            self.tokens = max(-60 * self.limits.tokens, min(self.limits.tokens, self.tokens - more))


@pytest.mark.parametrize("seed", range(6))
async def test_any_history_is_as_the_model_has_it(queue: ScriptedQueue, seed: int) -> None:
    """Random calls, ends, corrections, renewals and a clock that jumps both ways: the same verdicts (F-097, F-101)."""
    choose = random.Random(seed)
    limits = KeyLimits(
        choose.choice((None, 2, 30, 600)), choose.choice((None, 500, 6_000)), choose.choice((None, 1, 4, 20))
    )
    model, inside, verdicts = Model(limits), list[str](), list[tuple[str, str]]()
    for step in range(400):
        await queue.pass_time(choose.choice((0, 0, 1, 7, 100, 900, 5_000, 40_000, -300, -20_000)))
        what = choose.random()
        if what < 0.6 or not inside:
            call, cost = f"c{step}", choose.choice((0, 1, 20, 90, 700))
            entry = await let_in(queue, limits, call=call, cost=cost)
            verdicts.append((model.enter(queue.now, call, cost), entry.refused))
            if not entry.refused:
                inside.append(call)
        elif what < 0.9:
            call, more = inside.pop(choose.randrange(len(inside))), choose.choice((0, -20, 5, 300))
            await let_out(queue, limits, call=call, more=more)
            model.leave(queue.now, call, more)
        elif limits.concurrency is not None:
            await queue.call(stay(queue.keys, KEY, call_ids=inside, lease_ms=LEASE_MS))
            model.places |= dict.fromkeys(inside, queue.now + LEASE_MS)
    assert [] == [pair for pair in verdicts if pair[0] != pair[1]]


async def test_a_minute_s_worth_at_once_and_then_at_the_rate(queue: ScriptedQueue) -> None:
    """Any span holds at most rate * span + burst (G8's form); what is told of the rest is true."""
    limits = KeyLimits(requests=60)
    counts = []
    for ms in (0, 999, 1, 30_000, 600_000):
        await queue.pass_time(ms)
        entries = [await let_in(queue, limits) for _ in range(70)]
        counts.append(sum(1 for entry in entries if not entry.refused))
    assert [60, 0, 1, 30, 60] == counts
    last = entries[-1]
    assert ("requests", 1.0, 0, 60.0) == (last.refused, last.again_s, last.requests_left, last.requests_full_s)


async def test_a_call_takes_all_or_nothing(queue: ScriptedQueue) -> None:
    """Refused for its place or its LLM tokens, it has cost no request (F-103)."""
    limits = KeyLimits(requests=10, tokens=1_000, concurrency=1)
    assert (9, 900) == _left(await let_in(queue, limits, call="a", cost=100))
    assert "concurrency" == (await let_in(queue, limits, call="b", cost=100)).refused
    await let_out(queue, limits, call="a")
    assert "tokens" == (await let_in(queue, limits, call="b", cost=950)).refused
    assert (8, 900) == _left(await let_in(queue, limits, call="b", cost=0))


async def test_what_costs_more_than_a_minute_gives_never_gets_in(queue: ScriptedQueue) -> None:
    """To wait would be of no use, and the answer says so."""
    entry = await let_in(queue, KeyLimits(tokens=1_000), cost=1_001)
    assert ("tokens", -1) == (entry.refused, math.floor(entry.again_s or 0))


async def test_real_usage_corrects_the_estimate(queue: ScriptedQueue) -> None:
    """Less than expected comes back at once, more is debt; none of it goes beyond a full bucket."""
    limits = KeyLimits(tokens=1_000)
    await let_in(queue, limits, cost=600)
    await let_out(queue, limits, more=-500)
    assert 900 == (await let_in(queue, limits)).tokens_left
    await let_out(queue, limits, more=1_900)
    entry = await let_in(queue, limits, cost=1)
    assert ("tokens", 60.06) == (entry.refused, entry.again_s)
    await queue.pass_time(60_060)
    assert "" == (await let_in(queue, limits, cost=1)).refused
    await let_out(queue, limits, more=-10_000)
    assert 1_000 == (await let_in(queue, limits)).tokens_left


async def test_a_full_bucket_pays_no_debt_from_what_it_had_no_room_for(queue: ScriptedQueue) -> None:
    """A long call's surplus counts from when it is known, not from when the bucket was last touched."""
    limits = KeyLimits(requests=60, tokens=1_000)
    await let_in(queue, limits, cost=10)
    await queue.pass_time(600_000)
    await let_out(queue, limits, more=800)
    assert (59, 200) == _left(await let_in(queue, limits))


async def test_debt_is_an_hour_s_worth_at_most(queue: ScriptedQueue) -> None:
    """One answer that ran away locks a key out for an hour, and not for days."""
    limits = KeyLimits(tokens=100)
    await let_in(queue, limits)
    await let_out(queue, limits, more=10**9)
    await queue.pass_time(3_600_000)
    assert "" == (await let_in(queue, limits, cost=0)).refused


async def test_the_places_of_a_gateway_that_was_killed_come_back(queue: ScriptedQueue) -> None:
    """Nobody renews them: after one lease they are free (F-042); those that are renewed are not."""
    limits = KeyLimits(concurrency=2)
    await let_in(queue, limits, call="dead")
    await let_in(queue, limits, call="alive")
    await queue.pass_time(LEASE_MS - 1)
    await queue.call(stay(queue.keys, KEY, call_ids=["alive"], lease_ms=LEASE_MS))
    assert "concurrency" == (await let_in(queue, limits, call="new")).refused
    await queue.pass_time(1)
    assert "" == (await let_in(queue, limits, call="new")).refused
    assert "concurrency" == (await let_in(queue, limits, call="newer")).refused


async def test_a_clock_that_was_set_back_holds_no_place_for_long(queue: ScriptedQueue) -> None:
    """A lease never ends later than one lease from now, whatever the clock was when it was given (F-042, F-097)."""
    limits = KeyLimits(concurrency=1)
    await let_in(queue, limits, call="dead")
    await queue.pass_time(-3_600_000)
    assert "concurrency" == (await let_in(queue, limits)).refused
    await queue.pass_time(LEASE_MS)
    assert "" == (await let_in(queue, limits)).refused


async def test_a_limit_that_is_changed_holds_from_the_next_call(queue: ScriptedQueue) -> None:
    """Lowered, what is left is cut to it; raised, it fills at the new rate; taken away, nothing counts."""
    await let_in(queue, KeyLimits(requests=100))
    assert (4, 0) == _left(await let_in(queue, KeyLimits(requests=5)))
    assert (3, 0) == _left(await let_in(queue, KeyLimits(requests=600)))
    await queue.pass_time(1_000)
    assert (12, 0) == _left(await let_in(queue, KeyLimits(requests=600)))
    assert "" == (await let_in(queue, KeyLimits(tokens=5), cost=5)).refused


async def test_what_is_kept_goes_when_it_says_nothing_any_more(queue: ScriptedQueue, redis: Redis) -> None:
    """Its TTL is the time until it is full, and a minute (F-102); a place's is two leases."""
    limits = KeyLimits(requests=60, tokens=600, concurrency=5)
    await let_in(queue, limits, cost=300)
    assert 60_000 < await redis.pttl(queue.keys.limit(KEY)) <= 60_000 + 30_000
    assert LEASE_MS < await redis.pttl(queue.keys.passes(KEY)) <= 2 * LEASE_MS
    await let_out(queue, limits, more=600)
    assert 90_000 < await redis.pttl(queue.keys.limit(KEY)) <= 120_000 + 90_000


async def test_places_are_given_back_on_a_server_that_is_full(queue: ScriptedQueue, redis: Redis) -> None:
    """A call can leave at maxmemory, and its key can be used again."""
    limits = KeyLimits(requests=60, tokens=600, concurrency=1)
    await let_in(queue, limits, cost=10)
    await redis.config_set("maxmemory", 1)
    try:
        await let_out(queue, limits, more=5)
        assert "" == (await let_in(queue, limits)).refused
    finally:
        await redis.config_set("maxmemory", 0)


def _left(entry: Entry) -> tuple[int, int]:
    assert "" == entry.refused
    return entry.requests_left, entry.tokens_left
