"""Chat through the gateway, beside the same engine asked directly, and LiteLLM's proxy where one is given.

All of them are asked in turn within one run, a second each: whatever else this machine is doing, it does to all. What a
proxy adds to a time is that time less the median of the engine's own.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import aiohttp

from bench.processes import stream_engine
from bench.proxies import Target, litellm_front, llmq_front
from bench.row import Figures, Setting
from bench.stream_engine import PACE_S

#: Requests a second; and a rate that LiteLLM's proxy keeps up with on one core, so that no line of waiting is compared.
RATE, LOW_RATE = 50.0, 10.0

#: Seconds of one turn.
TURN_S = 1.0
FIRST_TOKENS = 8
SLOTS = 256

#: Tokens of one of many streams: six seconds.
MANY_TOKENS = 150

#: All streams are there from the first second on, and none has ended before the sixth.
STEADY = (2.0, 5.0)


@dataclass(frozen=True, slots=True)
class Held:
    """What many streams were: tokens a second, how late each came in seconds, and what they cost each process.

    `cpu_us_a_token` is of the time in which all streams run, `cpu_us_in_all` of all tokens with all that their requests
    cost.
    """

    tokens_a_second: float
    late: Sequence[float]
    cpu_us_a_token: Sequence[float]
    cpu_us_in_all: Sequence[float]


async def first_token_at_low_rate(setting: Setting) -> Figures:
    """Ask 10 times a second."""
    return await first_token(setting, LOW_RATE)


async def first_token(setting: Setting, rate: float = RATE) -> Figures:
    """Ask at a rate, `count` times each; return what is added to the time to the first token."""
    turn = round(rate * TURN_S)
    with _targets(setting) as targets:
        async with _session() as session:
            for target in targets.values():
                await asyncio.gather(*(_ask(session, target, 2) for _ in range(10)))  # connections, and code that loads
            times: dict[str, list[float]] = {name: [] for name in targets}
            for done in range(0, setting.count, turn):
                for name, target in targets.items():
                    times[name] += await _turn(session, target, rate, min(turn, setting.count - done))
    own = statistics.median(times["engine"])
    figures = {"engine itself p50": own * 1000}
    for name, label in (("llmq", "added"), ("litellm", "LiteLLM added")):
        if name in times:
            figures[f"{label} p50"] = 1000 * (statistics.median(times[name]) - own)
            figures[f"{label} p99"] = 1000 * (_percentile(times[name], 0.99) - own)
    if "litellm" in times:
        figures["part of LiteLLM's, p50"] = figures["added p50"] / figures["LiteLLM added p50"]
        figures["part of LiteLLM's, p99"] = figures["added p99"] / figures["LiteLLM added p99"]
    return figures


async def many_streams(setting: Setting) -> Figures:
    """Hold `count` streams at a time; return how late their tokens come, and what a token costs."""
    with _targets(setting) as targets:
        async with _session() as session:
            for name in targets.keys() - {"engine"}:
                await asyncio.gather(*(_ask(session, targets[name], 2) for _ in range(10)))
            own = await _hold(session, targets["engine"], setting.count)
            llmq = targets["llmq"]
            held = await _hold(session, Target(llmq.url, (*llmq.pids, setting.server.process.pid)), setting.count)
            gateway, worker, redis = held.cpu_us_a_token
            figures = {
                "tokens": held.tokens_a_second,
                "late p50": 1000 * _percentile(held.late, 0.5),
                "late p99": 1000 * _percentile(held.late, 0.99),
                "engine itself late p99": 1000 * _percentile(own.late, 0.99),
                "gateway": gateway,
                "worker": worker,
                "both": gateway + worker,
                "Redis": redis,
                "both, with requests": sum(held.cpu_us_in_all[:2]),
                "streams a core": _streams_a_core(sum(held.cpu_us_in_all)),
            }
            if "litellm" in targets:
                other = await _hold(session, targets["litellm"], setting.count)
                figures["LiteLLM"] = sum(other.cpu_us_a_token)
                figures["LiteLLM, with requests"] = sum(other.cpu_us_in_all)
                figures["LiteLLM late p99"] = 1000 * _percentile(other.late, 0.99)
                figures["LiteLLM streams a core"] = _streams_a_core(sum(other.cpu_us_in_all))
                figures["times LiteLLM's streams a core"] = (
                    figures["streams a core"] / figures["LiteLLM streams a core"]
                )
    return figures


@contextmanager
def _targets(setting: Setting) -> Iterator[dict[str, Target]]:
    """Start everything; return the places to ask, by name."""
    with (
        stream_engine() as engine,
        llmq_front(setting, engine, SLOTS) as llmq,
        litellm_front(setting, engine) if setting.litellm else nullcontext() as litellm,
    ):
        others = {} if litellm is None else {"litellm": litellm}
        yield {"engine": Target(engine), "llmq": llmq, **others}


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), read_bufsize=2**20)


async def _turn(session: aiohttp.ClientSession, target: Target, rate: float, count: int) -> list[float]:
    """Ask `count` times at the rate, whatever comes back when; return the times to the first tokens."""
    began, asked = time.monotonic(), []
    for number in range(count):
        await asyncio.sleep(began + number / rate - time.monotonic())
        asked.append(asyncio.create_task(_ask(session, target, FIRST_TOKENS)))
    return [first for first, _ in await asyncio.gather(*asked)]


async def _hold(session: aiohttp.ClientSession, target: Target, streams: int) -> Held:
    """Hold streams that begin within a second; return how their tokens came, and what they cost."""
    began, begun = time.monotonic(), target.cpu_s()

    async def one(number: int) -> Sequence[tuple[float, float]]:
        await asyncio.sleep(number / streams)
        return (await _ask(session, target, MANY_TOKENS))[1]

    async def spent_at(moment: float) -> list[float]:
        await asyncio.sleep(began + moment - time.monotonic())
        return target.cpu_s()

    asked = asyncio.gather(*map(one, range(streams)))
    before, after = await asyncio.gather(*map(spent_at, STEADY))
    came = [token for tokens in await asked for token in tokens]
    first, last = STEADY
    steady = sum(1 for _, arrived in came if first <= arrived - began < last)
    return Held(
        tokens_a_second=steady / (last - first),
        late=[arrived - sent for sent, arrived in came],
        cpu_us_a_token=[1e6 * (end - begin) / steady for begin, end in zip(before, after, strict=True)],
        cpu_us_in_all=[1e6 * (end - begin) / len(came) for begin, end in zip(begun, target.cpu_s(), strict=True)],
    )


async def _ask(session: aiohttp.ClientSession, target: Target, tokens: int) -> tuple[float, list[tuple[float, float]]]:
    """Stream one answer; return the time to its first token, and when each token was sent and came."""
    body = {"model": "bench", "messages": [{"role": "user", "content": "x" * 300}], "max_tokens": tokens}
    came: list[tuple[float, float]] = []
    began = time.monotonic()
    async with session.post(f"{target.url}/v1/chat/completions", json=body | {"stream": True}) as response:
        rest = b""
        async for data in response.content.iter_any():
            *events, rest = (rest + data).split(b"\n\n")
            now = time.monotonic()
            for event in events:
                _, marked, text = event.partition(b'"content":')
                # Before LiteLLM's text there is none; after it others have more fields.
                if marked and (sent := text.lstrip(b' "').partition(b" ")[0]):
                    came.append((float(sent), now))
    if len(came) != tokens:
        raise RuntimeError(
            f"{target.url}: expected {tokens} tokens, got {len(came)} (HTTP {response.status}): {rest!r}"
        )
    return came[0][1] - began, came


def _streams_a_core(us_a_token: float) -> float:
    return 1e6 * PACE_S / us_a_token


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]
