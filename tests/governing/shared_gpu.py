"""One simulated GPU that chat and an endless batch share under a cap: what chat sees, and what batch gets.

Governor, signal, reserve and the choice of whom to preempt are a worker's own; the engine is the simulated GPU; the cap
is the governor's or a fixed one. Queue and network are left out: they cost the same with any cap.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from llmq.scheduler.job import TrafficClass
from llmq.scheduler.lease import Fence, Lease, Why
from llmq.scheduler.live import LiveSettings
from llmq.workers.allowance import Candidate, victims
from llmq.workers.engines.sim_gpu import SimGpu, Work
from llmq.workers.governing import STEP_S, Governing, Load
from llmq.workers.traffic import Arrival


@dataclass(frozen=True, slots=True)
class Gpu:
    """The scale of a simulated GPU, the slots kept for chat, and the tokens of batch lines (from, to).

    `parallel` is how many sequences more make a step twice as long (None: as many as there are slots).
    """

    slots: int
    prefill_tps: float
    decode_tps: float
    reserve: int
    prompt: tuple[int, int]
    answer: tuple[int, int]
    parallel: float | None = None


@dataclass(slots=True)
class Outcome:
    """What one run saw: (when, seconds) of first tokens, batch tokens made and thrown away, the cap at each step."""

    firsts: list[tuple[float, float]] = field(default_factory=list)
    made: int = 0
    wasted: int = 0
    preempted: int = 0
    caps: list[tuple[float, int]] = field(default_factory=list)
    states: Counter[str] = field(default_factory=Counter)

    @property
    def p95(self) -> float:
        """The p95 of all times to first token, in seconds."""
        values = sorted(seconds for _, seconds in self.firsts)
        return values[int(len(values) * 0.95)]

    @property
    def wasted_share(self) -> float:
        """Of the batch tokens made, those thrown away."""
        return self.wasted / max(1, self.made)

    def within(self, limit_s: float, window_s: float = 5.0) -> float:
        """Return the share of windows whose p95 is within a limit."""
        windows: dict[int, list[float]] = {}
        for came, seconds in self.firsts:
            windows.setdefault(int(came / window_s), []).append(seconds)
        good = [sorted(seen)[min(len(seen) - 1, int(len(seen) * 0.95))] <= limit_s for seen in windows.values()]
        return sum(good) / len(good)


@dataclass(slots=True, eq=False)
class _Line:
    """A batch request that runs."""

    lease: Lease
    started_at: float
    task: asyncio.Task[None] | None = None
    tokens: int = 0
    token: Callable[[], None] | None = None
    lengths: tuple[int, int] = (0, 0)
    """Tokens of its prompt and its answer: of what is left of it, where it was cut off before."""


class SharedGpu:
    """Runs chat arrivals and an endless batch on one GPU until the last chat request has ended.

    `cap` is a fixed batch cap; `ttft_p95_s` is an objective that the governor goes by. Preempted lines are the next to
    run; with `keeps` they go on from what they have, and read it again with their prompt.
    """

    def __init__(
        self,
        gpu: Gpu,
        arrivals: Sequence[Arrival],
        *,
        cap: int | None = None,
        ttft_p95_s: float | None = None,
        keeps: bool = False,
    ) -> None:
        self._gpu = gpu
        self._engine = SimGpu(gpu.slots, gpu.prefill_tps, gpu.decode_tps, 10_000_000, gpu.parallel)
        self._arrivals = arrivals
        self._cap = cap
        self._keeps = keeps
        self._back: list[tuple[tuple[int, int], int]] = []
        stated = {} if ttft_p95_s is None else {b"ttft_p95": str(round(ttft_p95_s * 1000)).encode()}
        settings = LiveSettings.from_hash(stated)
        self._governing = Governing(lambda: settings, self._load, self._act, lambda: self._loop.time())
        self._luck = random.Random(1)
        self._lines: list[_Line] = []
        self._chats = 0
        self._count = 0
        self.outcome = Outcome()

    async def run(self) -> Outcome:
        """Run to the end; return what was seen."""
        self._loop = asyncio.get_running_loop()
        watching = asyncio.create_task(self._watch())
        chats = []
        for arrival in self._arrivals:
            await asyncio.sleep(max(0.0, arrival.at - self._loop.time()))
            chats.append(asyncio.create_task(self._chat(arrival)))
        await asyncio.gather(*chats)
        left = [watching, *(line.task for line in self._lines if line.task is not None)]
        for task in left:
            task.cancel()
        for found in await asyncio.gather(*left, return_exceptions=True):
            if isinstance(found, Exception):
                raise found
        return self.outcome

    def _load(self) -> Load:
        unread = sum(line.lengths[0] for line in self._lines if not line.tokens)
        return Load(batch=len(self._lines), unread=unread, most=self._gpu.slots - self._gpu.reserve)

    def _allowed(self) -> int:
        free = self._gpu.slots - self._gpu.reserve - self._chats
        caps = (free, self._cap, self._governing.batch_cap(self._load()))
        return min(cap for cap in caps if cap is not None)

    def _act(self) -> None:
        self._preempt(self._governing.excess(self._load()))
        while len(self._lines) < self._allowed():
            lengths, preemptions = self._back.pop(0) if self._back else (self._new_lengths(), 0)
            lease = self._lease(TrafficClass.BATCH, lengths[0], preemptions)
            line = _Line(lease, self._loop.time(), lengths=lengths)
            self._lines.append(line)
            self._governing.taken(line.lease, 0.0)
            line.task = asyncio.create_task(self._line(line))

    def _preempt(self, count: int) -> None:
        candidates = [Candidate(line, line.started_at, line.lease.protected()) for line in self._lines]
        for line in victims(candidates, count):
            self._cut_off(line)

    def _cut_off(self, line: _Line) -> None:
        self._lines.remove(line)
        self.outcome.preempted += 1
        lengths, kept = line.lengths, line.tokens if self._keeps else 0
        self._back.append(((lengths[0] + kept, max(1, lengths[1] - kept)), line.lease.preemptions + 1))
        self.outcome.wasted += line.tokens - kept
        self._governing.cut_off(kept, line.tokens - kept)
        self._governing.ended(line.lease)
        assert line.task is not None
        line.task.cancel()
        self._loop.call_soon(self._act)  # a line that was handed back may be claimed at once

    async def _chat(self, arrival: Arrival) -> None:
        came, lease = self._loop.time(), self._lease(TrafficClass.INTERACTIVE, arrival.prompt)
        token: Callable[[], None] | None = None
        self._chats += 1
        self._governing.taken(lease, 0.0)
        self._preempt(self._chats + len(self._lines) - self._gpu.slots)
        for line in list(self._lines):
            if not line.lease.protected() and self._governing.interrupts(line.lease, line.tokens):
                self._cut_off(line)
                self._governing.interrupted()

        def on_tokens(count: int) -> None:
            nonlocal token
            if token is not None:
                token()
                return
            self.outcome.firsts.append((came, self._loop.time() - came))
            token = self._governing.begun(lease)

        await self._engine.serve(Work(arrival.prompt, arrival.answer, 1, on_tokens))
        self._governing.ended(lease)
        self._chats -= 1
        self._act()

    async def _line(self, line: _Line) -> None:
        def on_tokens(count: int) -> None:
            line.tokens += count
            self.outcome.made += count
            if line.token is None:
                line.token = self._governing.begun(line.lease)
            else:
                line.token()

        await self._engine.serve(Work(*line.lengths, 1, on_tokens))
        self._lines.remove(line)
        self._governing.ended(line.lease)
        self._act()

    async def _watch(self) -> None:
        while True:
            self._governing.step()
            self._act()
            self.outcome.caps.append((self._loop.time(), self._allowed()))
            self.outcome.states[self._governing.state.value] += 1
            await asyncio.sleep(STEP_S)

    def _new_lengths(self) -> tuple[int, int]:
        return self._luck.randint(*self._gpu.prompt), self._luck.randint(*self._gpu.answer)

    def _lease(self, cls: TrafficClass, prompt: int, preemptions: int = 0) -> Lease:
        self._count += 1
        return Lease(
            fence=Fence(cls.letter, f"{self._count}-0", 1),
            cls=cls,
            tenant="default",
            why=Why.CHAT if cls is TrafficClass.INTERACTIVE else Why.BUCKET,
            data=b"text" * prompt,
            cost=1,
            preemptions=preemptions,
            key="",
            reply_to="",
            queued_at=0.0,
        )
