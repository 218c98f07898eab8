"""One phase of a trial: the same chat arrivals, with batch beside them in one of several ways.

`straight` sends everything to the engine itself, as a program without a queue does; `queued` sends it through a queue
and a worker in this process. What came of it is a `Phase`: times and counts, no opinion (`figures.py` has those).

A phase can be measured in turns with others, so that an hour in which the machine is slow meets all of them: both are
generators that stop after each turn, with all that they have found so far, no batch running and their queue as it is.
What a worker makes of the pause is none of a phase's: batch comes back when chat has, or with the end of the warm-up.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

from llmq.scheduler import scripts
from llmq.scheduler.batches import Batches
from llmq.scheduler.client import AsyncClient
from llmq.scheduler.errors import LLMQError
from llmq.scheduler.job import Job, TrafficClass
from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.lines import InputLine
from llmq.scheduler.queue import Queue
from llmq.scheduler.totals import CUT_OFF, HANDED_BACK, read_totals
from llmq.workers.engines.base import EngineError
from llmq.workers.shutdown import Shutdown
from llmq.workers.traffic import Arrival
from llmq.workers.trial.metered import MeteredEngine
from llmq.workers.trial.requests import CHAT_URL, Requests
from llmq.workers.worker import WorkerOptions, serve

#: How long chat that has not ended at the end of a phase is waited for.
LAST_CHAT_S = 30.0

#: How long batch that still runs at the end of a turn is waited for.
LAST_BATCH_S = 300.0

#: Sends one chat request; calls back with its first token.
SendChat = Callable[[Arrival, Callable[[], None]], Awaitable[None]]


@dataclass(slots=True)
class Phase:
    """What came of one phase, so far. Times are seconds from its beginning; what others had in between is left out.

    It has its `seconds` in so many `turns` alike; the first `warmup` seconds of each do not count. `firsts` are (when a
    chat request came, seconds to its first token, None where none came), those that do not count too. `made` are the
    batch tokens in `counted_s`, the seconds that count; `chat_s` is how long chat requests were in flight, in all.
    """

    name: str
    seconds: float
    warmup: float
    turns: int = 1
    firsts: list[tuple[float, float | None]] = field(default_factory=list)
    made: int = 0
    counted_s: float = 0.0
    preempted: int = 0
    kept_tokens: int = 0
    wasted_tokens: int = 0
    objective_s: float | None = None
    all_made: int = 0
    chat_s: float = 0.0

    def counts(self, at: float) -> bool:
        """Whether this moment is after the warm-up of its turn."""
        return at % (self.seconds / self.turns) >= self.warmup

    @property
    def chat_in_flight(self) -> float:
        """How many chat requests were in flight on average."""
        return self.chat_s / self.seconds

    @property
    def batch_tps(self) -> float:
        """Batch tokens a second that were not made in vain."""
        return self.made / self.counted_s * (1 - self.wasted_share) if self.counted_s else 0.0

    @property
    def wasted_share(self) -> float:
        """Of the batch tokens made, those that preemption threw away."""
        return self.wasted_tokens / self.all_made if self.all_made else 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What all phases of a trial have in common; `seconds` are a phase's in all its `turns`."""

    arrivals: Sequence[Arrival]
    seconds: float
    warmup: float
    slots: int
    requests: Callable[[], Requests]
    turns: int = 1

    def phase(self, name: str) -> Phase:
        """Return a phase in which nothing has been seen yet."""
        return Phase(name, self.seconds, self.warmup, self.turns)


async def whole(turns: AsyncGenerator[Phase]) -> Phase:
    """Let a phase have all its turns, one after the other."""
    async with contextlib.aclosing(turns):
        phases = [phase async for phase in turns]
    return phases[-1]


async def straight(
    name: str, plan: Plan, engine: MeteredEngine, batch: int, read_tps: tuple[float, int] | None = None
) -> AsyncGenerator[Phase]:
    """Send chat and `batch` batch requests at a time straight to the engine; yield after each turn.

    `read_tps` sends prompts of so many tokens instead, as many as make that many prompt tokens a second.
    """
    requests, phase = plan.requests(), plan.phase(name)

    async def chat(arrival: Arrival, first: Callable[[], None]) -> None:
        pieces = 0

        def on_delta(text: str, chunk: bytes) -> None:
            nonlocal pieces
            pieces += 1
            if text or pieces == 2:
                first()

        await engine.run(Job(CHAT_URL, requests.chat(arrival)), on_delta)

    async def endless() -> None:
        while True:
            await _run_one(engine, Job(CHAT_URL, requests.batch()))

    for turn in range(plan.turns):
        beside = [asyncio.create_task(endless()) for _ in range(batch)]
        if read_tps is not None:
            beside.append(asyncio.create_task(_read(engine, requests, *read_tps)))
        try:
            await _measure(phase, plan, turn, engine, chat)
        finally:
            await _ended(beside)
        yield phase


async def queued(
    name: str,
    plan: Plan,
    engine: MeteredEngine,
    queue: Queue,
    url: str,
    *,
    lines: int = 0,
    objective: Callable[[], float] | None = None,
    batch_cap: int | None = None,
    config: Mapping[str, str] = MappingProxyType({}),
) -> AsyncGenerator[Phase]:
    """Send chat, and `lines` batch lines as one batch, through a queue of its own; yield after each turn.

    `objective` says before each turn what `ttft_p95` shall be, in seconds; `config` are fields of the queue's config
    hash, as `llmq tune` stores them. After the last turn all of the queue is gone.
    """
    requests, phase, last = plan.requests(), plan.phase(name), plan.turns - 1

    async def prepare() -> None:
        if objective is not None:
            phase.objective_s = objective()
            await queue.set("ttft_p95", f"{max(1, round(phase.objective_s * 1000))}ms")

    try:
        if config:
            await scripts.run(queue.redis, scripts.configure(queue.keys, config))
        if lines:
            await queue.pause(TrafficClass.BATCH)  # until the first turn
            await _feed(queue, requests, lines)
        await prepare()
        async with AsyncClient(url, queue=queue.name) as client, _worker(plan, engine, queue, url, batch_cap):
            chat_is_back = asyncio.Event()

            async def chat(arrival: Arrival, first: Callable[[], None]) -> None:
                job = await client.submit(requests.chat(arrival))
                pieces = 0
                async for delta in job.stream():
                    pieces += 1
                    if delta.text or pieces == 2:  # a token may be half a character, and have no text
                        first()
                        chat_is_back.set()

            async def batch_beside() -> None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(chat_is_back.wait(), plan.warmup)
                await queue.resume(TrafficClass.BATCH)

            for turn in range(plan.turns):
                if not turn:
                    chat_is_back.set()  # before the first there was no pause
                beside = [asyncio.create_task(batch_beside())] if lines else []
                try:
                    await _measure(phase, plan, turn, engine, chat)
                    await asyncio.gather(*beside)
                finally:
                    await _ended(beside)
                chat_is_back.clear()
                if turn < last:
                    await queue.pause(TrafficClass.BATCH)
                    phase.all_made += await _left_to_end(engine)
                    await _count(phase, queue)
                    yield phase
                    await prepare()
        await _count(phase, queue)
    finally:
        await remove(queue)
    yield phase


@contextlib.asynccontextmanager
async def _worker(
    plan: Plan, engine: MeteredEngine, queue: Queue, url: str, batch_cap: int | None
) -> AsyncIterator[None]:
    """Serve the queue meanwhile."""
    shutdown, ready = Shutdown(), asyncio.Event()
    options = WorkerOptions(
        queue=queue.name, concurrency=plan.slots, batch_cap=batch_cap, grace=0.0, announce=lambda line: ready.set()
    )
    serving: asyncio.Task[object] = asyncio.create_task(serve(url, engine, options, shutdown))
    try:
        await asyncio.wait({serving, waiting := asyncio.create_task(ready.wait())}, return_when="FIRST_COMPLETED")
        waiting.cancel()
        yield
    finally:
        shutdown.request_at_once()
        await asyncio.wait([serving])
    await serving


async def _left_to_end(engine: MeteredEngine) -> int:
    """Let batch that runs end; return how many tokens it still made."""
    before = engine.meter.tokens
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(engine.meter.quiet.wait(), LAST_BATCH_S)
    return engine.meter.tokens - before


async def remove(queue: Queue) -> None:
    """Delete everything of a queue that nobody else uses."""
    found = [
        key async for key in queue.redis.scan_iter(match=_literally(QueueKeys(queue.name).prefix) + "*", count=1000)
    ]
    for key in found:
        await queue.redis.unlink(key)


def _literally(text: str) -> str:
    return text.replace("[", "\\[").replace("*", "\\*").replace("?", "\\?")


async def _measure(phase: Phase, plan: Plan, turn: int, engine: MeteredEngine, send: SendChat) -> None:
    """Let the arrivals of a turn come, and count what they see and what batch makes meanwhile."""
    length = plan.seconds / plan.turns
    opens, closes = turn * length, (turn + 1) * length
    began = time.monotonic() - opens
    begun = engine.meter.tokens

    async def one(arrival: Arrival) -> None:
        seen: list[float] = []

        def first() -> None:
            if not seen:
                seen.append(time.monotonic() - began - arrival.at)

        try:
            await send(arrival, first)
        except (EngineError, LLMQError):
            pass  # without a first token it counts as one that never came
        finally:
            phase.firsts.append((arrival.at, seen[0] if seen else None))
            phase.chat_s += time.monotonic() - began - arrival.at

    async def count() -> None:
        await asyncio.sleep(plan.warmup)
        before, since = engine.meter.tokens, time.monotonic()
        await asyncio.sleep(began + closes - time.monotonic())
        phase.made += engine.meter.tokens - before
        phase.counted_s += time.monotonic() - since

    chats, counting = set[asyncio.Task[None]](), asyncio.create_task(count())
    try:
        for arrival in plan.arrivals:
            if opens <= arrival.at < closes:
                await asyncio.sleep(max(0.0, began + arrival.at - time.monotonic()))
                chats.add(asyncio.create_task(one(arrival)))
        await counting
        if chats:
            await asyncio.wait(chats, timeout=LAST_CHAT_S)
    finally:
        await _ended([counting, *chats])
    phase.all_made += engine.meter.tokens - begun


async def _run_one(engine: MeteredEngine, job: Job) -> None:
    try:
        await engine.run(job, lambda text, chunk: None)
    except EngineError:
        await asyncio.sleep(0.1)  # an engine that refuses everything at once would keep this process busy


async def _read(engine: MeteredEngine, requests: Requests, tps: float, prompt: int) -> None:
    """Send prompts of so many tokens, one after the other at this rate, whatever becomes of them."""
    async with asyncio.TaskGroup() as sending:
        while True:
            sending.create_task(_run_one(engine, Job(CHAT_URL, requests.reading(prompt))))
            await asyncio.sleep(prompt / tps)


async def _feed(queue: Queue, requests: Requests, count: int) -> None:
    batches = Batches(queue)
    record = await batches.open(name="trial", digest=queue.name)
    lines = (InputLine(n, f"line-{n}", job, n) for n, job in enumerate(requests.lines(count), 1))
    await batches.feed(record.id, lines)


async def _count(phase: Phase, queue: Queue) -> None:
    """Take what the worker has counted."""
    totals = read_totals(await cast(Any, queue.redis).hgetall(queue.keys.totals))
    phase.preempted = totals.get(HANDED_BACK.field("batch", "preempted"), 0)
    phase.kept_tokens = totals.get(CUT_OFF.field("kept"), 0)
    phase.wasted_tokens = totals.get(CUT_OFF.field("wasted"), 0)


async def _ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
