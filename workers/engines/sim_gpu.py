"""A simulated GPU with continuous batching: when does which request get its next token?

Like a real engine it works in steps. A step gives one token to every sequence that decodes and works off up to
`PREFILL_CHUNK` prompt tokens, shared evenly by the requests that still read their prompts. It takes

    (1 + (sequences - 1) / parallel) / decode_tps   for the decoding sequences, if there are any
    + prompt tokens / prefill_tps                   for the prompts

so one sequence alone decodes at `decode_tps`, each of a full GPU at about half of that, and long prompts slow down
everybody's next token. (`parallel` is the number of slots, where nothing else is said: with less, more sequences make
hardly more.) Requests that find no slot, or no room in the KV memory for prompt and answer, wait inside, first come
first served. Steps in which nobody watches a token are computed ahead: one timer for all of them.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

#: Prompt tokens that one step works off at most, as vLLM's max_num_batched_tokens bounds it.
PREFILL_CHUNK = 512

#: Called with the number of tokens that each sequence of a request got in a step.
OnTokens = Callable[[int], None]


@dataclass(eq=False, slots=True)
class Work:
    """One request on the GPU: its prompt, and the tokens that each of its `sequences` shall get."""

    prompt_tokens: int
    answer_tokens: int
    sequences: int = 1
    on_tokens: OnTokens | None = None
    done: asyncio.Future[None] = field(init=False)
    prompt_left: int = field(init=False)
    answer_left: int = field(init=False)

    def __post_init__(self) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self.prompt_left = self.prompt_tokens
        self.answer_left = self.answer_tokens

    @property
    def kv_tokens(self) -> int:
        """KV memory that the request needs at its end."""
        return self.prompt_tokens + self.answer_tokens * self.sequences


@dataclass(slots=True)
class _Plan:
    """The steps that are under way: `steps` equal ones from `began`, with the timer of their end."""

    began: float
    seconds: float
    steps: int
    shares: list[tuple[Work, int]]
    timer: asyncio.TimerHandle


class SimGpu:
    """Serves `Work`; time is the running loop's, so that a loop with a virtual clock simulates in no time."""

    def __init__(
        self, slots: int, prefill_tps: float, decode_tps: float, kv_tokens: int, parallel: float | None = None
    ) -> None:
        self._slots = slots
        self._parallel = parallel or slots
        self._prefill_tps = prefill_tps
        self._decode_tps = decode_tps
        self._kv_tokens = kv_tokens
        self._running: list[Work] = []
        self._waiting: deque[Work] = deque()
        self._plan: _Plan | None = None

    @property
    def running(self) -> int:
        """Requests that have a slot."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that wait inside for a slot or for KV memory."""
        return len(self._waiting)

    async def serve(self, work: Work) -> None:
        """Return when the work is done; cancelling takes it off the GPU at once."""
        self._waiting.append(work)
        self._interrupt()
        try:
            await work.done
        finally:
            if work in self._running:
                self._running.remove(work)
                self._interrupt()
            elif work in self._waiting:
                self._waiting.remove(work)

    def kill(self, error: Callable[[], Exception]) -> None:
        """Die: all work, running and waiting, ends with an error of its own."""
        doomed = [*self._running, *self._waiting]
        self._running.clear()
        self._waiting.clear()
        if self._plan is not None:
            self._plan.timer.cancel()
            self._plan = None
        for work in doomed:
            if not work.done.done():
                work.done.set_exception(error())

    def _interrupt(self) -> None:
        """Something arrived or left: end what was computed ahead with the step that is under way."""
        if self._plan is None:
            self._begin()
            return
        loop = asyncio.get_running_loop()
        plan = self._plan
        under_way = max(1, math.floor((loop.time() - plan.began) / plan.seconds) + 1)
        if under_way < plan.steps:
            plan.steps = under_way
            plan.timer.cancel()
            plan.timer = loop.call_at(plan.began + plan.steps * plan.seconds, self._end)

    def _begin(self) -> None:
        """Start the next steps: as many at once as nobody looks at."""
        self._admit()
        if not self._running:
            self._plan = None
            return
        shares = self._prefill_shares()
        decoding = [work for work in self._running if work.prompt_left == 0]
        sequences = sum(work.sequences for work in decoding)
        seconds = sum(tokens for _, tokens in shares) / self._prefill_tps
        if sequences:
            seconds += (1 + (sequences - 1) / self._parallel) / self._decode_tps
        watched = shares or any(work.on_tokens for work in decoding)
        steps = 1 if watched else min(work.answer_left for work in decoding)
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._plan = _Plan(began, seconds, steps, shares, loop.call_at(began + steps * seconds, self._end))

    def _end(self) -> None:
        """Give out what the steps made, then start the next ones."""
        plan = self._plan
        assert plan is not None, "a timer without a plan"
        decoding = [work for work in self._running if work.prompt_left == 0]
        for work, tokens in plan.shares:
            work.prompt_left -= tokens
            if work.prompt_left == 0:
                # The step that ends a prompt makes the first token of its answer.
                self._give(work, 1)
        for work in decoding:
            self._give(work, plan.steps)
        self._begin()

    def _give(self, work: Work, tokens: int) -> None:
        if work.done.done():
            # Cancelled or dead since the step began.
            return
        tokens = min(tokens, work.answer_left)
        work.answer_left -= tokens
        try:
            if tokens and work.on_tokens is not None:
                work.on_tokens(tokens)
        except Exception as error:
            # The listener's fault ends its own request, not the timer that everybody lives on.
            self._running.remove(work)
            work.done.set_exception(error)
            return
        # A listener may have cancelled the very request that it was told of.
        if work.answer_left == 0 and not work.done.done():
            self._running.remove(work)
            work.done.set_result(None)

    def _admit(self) -> None:
        while self._waiting:
            sequences = sum(work.sequences for work in self._running)
            kv_tokens = sum(work.kv_tokens for work in self._running)
            first = self._waiting[0]
            fits = sequences + first.sequences <= self._slots and kv_tokens + first.kv_tokens <= self._kv_tokens
            # What fits no GPU must still end: it gets this one for itself.
            if not fits and self._running:
                return
            self._running.append(self._waiting.popleft())

    def _prefill_shares(self) -> list[tuple[Work, int]]:
        """Share out a chunk of prompt tokens evenly; what a short prompt leaves over goes to the longer ones."""
        prefilling = sorted((work for work in self._running if work.prompt_left), key=lambda work: work.prompt_left)
        shares: list[tuple[Work, int]] = []
        left = PREFILL_CHUNK
        for position, work in enumerate(prefilling):
            tokens = min(work.prompt_left, max(1, left // (len(prefilling) - position)))
            shares.append((work, tokens))
            left -= tokens
        return shares
