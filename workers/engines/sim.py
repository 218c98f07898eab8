"""The simulated engine: a GPU that nobody has to own, for trying llmq out, for benchmarks and for tests.

    sim://?slots=32&prefill_tps=8000&decode_tps=40

It is used only when asked for by name, and says on every output that it is simulated. How time passes is in
`sim_gpu.py`, what it says in `sim_answers.py`; here are its settings and the faults that it can be told to have.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, fields
from urllib.parse import parse_qsl, urlsplit

from llmq.scheduler.errors import EngineUnavailable, UsageError
from llmq.scheduler.job import Job
from llmq.workers.engines import sim_answers
from llmq.workers.engines.base import (
    Continues,
    EngineAnswer,
    EngineError,
    EngineGone,
    EngineInfo,
    EngineLoad,
    EngineOverloaded,
    EngineUnclear,
    OnDelta,
)
from llmq.workers.engines.merge import dump
from llmq.workers.engines.sim_answers import Script, script_for
from llmq.workers.engines.sim_gpu import SimGpu, Work

#: What an overloaded simulation asks for, in seconds.
RETRY_AFTER = 1.0


@dataclass(frozen=True, slots=True)
class SimOptions:
    """Settings of the simulated GPU, each a parameter of its URL; 0 turns a fault off.

    The defaults are about an 8-billion model on one data-centre GPU.
    """

    slots: int = 32
    prefill_tps: float = 8000.0
    """Prompt tokens a second, shared by the requests that read their prompts."""
    decode_tps: float = 40.0
    """Tokens a second of one request alone; each of a full GPU gets about half."""
    kv_tokens: int = 131_072
    """KV memory; requests that do not fit wait inside."""
    answer: int = 64
    """Where an answer ends by itself; `ignore_eos` with a limit gives exactly the limit."""
    seed: int = 0
    instant: int = 0
    """1: answers at once, without a GPU."""
    fail: float = 0.0
    """Chance that a request ends unclear (HTTP 500)."""
    overload: float = 0.0
    """Chance that a request is refused (HTTP 503 with Retry-After)."""
    die_after: int = 0
    """Dies when this many requests have begun, with those in flight."""
    poison: str = ""
    """Dies whenever the text of a request holds this."""
    down: float = 0.0
    """Seconds after which it comes back from death; 0: never."""


class SimEngine:
    """A simulated inference engine. Deterministic: the same seed and the same requests give the same answers."""

    def __init__(self, options: SimOptions | None = None) -> None:
        self.options = options or SimOptions()
        options = self.options
        self._gpu = SimGpu(options.slots, options.prefill_tps, options.decode_tps, options.kv_tokens)
        self._luck = random.Random(self.options.seed)
        self._begun = 0
        self._back_at: float | None = None

    @classmethod
    def from_url(cls, url: str) -> SimEngine:
        """Make one from `sim` or `sim://?slots=8&...`; raises UsageError that lists the parameters."""
        try:
            parts = urlsplit("sim://" if url == "sim" else url)
            usable = parts.scheme == "sim" and not (parts.netloc or parts.path.strip("/") or parts.fragment)
        except ValueError:  # brackets that hold no address
            usable = False
        if not usable:
            raise UsageError(f"expected sim or sim://?{_example()}, got {url!r}")
        return cls(_options(parts.query))

    async def probe(self) -> EngineInfo:
        """Return what is simulated; raises EngineUnavailable while it plays dead."""
        if self._is_down():
            raise EngineUnavailable("the simulated engine has died, as it was told to (die_after, poison)")
        return EngineInfo("sim", "sim://", (sim_answers.MODEL,), self.options.slots, True, Continues.FLAG)

    async def run(self, job: Job, on_delta: OnDelta | None = None) -> EngineAnswer:
        """Run one request to its end, in simulated time. Cancelling frees its slot at once. Raises EngineError."""
        if self._is_down():
            raise EngineGone("the simulated engine is down", in_flight=False)
        self._begun += 1
        if (fault := self._fault_for(job)) is not None:
            raise fault
        script = script_for(job, self._begun, self.options.seed, self.options.answer)
        if script.prompt_tokens + script.answer_tokens > self.options.kv_tokens:
            return _too_long(script, self.options.kv_tokens)
        if self.options.instant:
            _say_at_once(script, on_delta)
        else:
            await self._gpu.serve(_work(script, on_delta))
            if on_delta is not None and script.answer_tokens:
                _say(on_delta, sim_answers.closing(script))
        return EngineAnswer(200, sim_answers.whole(script), f"sim-{script.number}", script.usage)

    async def load(self) -> EngineLoad:
        """Return what runs and waits on the simulated GPU."""
        return EngineLoad(self._gpu.running, self._gpu.waiting)

    async def close(self) -> None:
        """End what still runs."""
        self._gpu.kill(lambda: EngineGone("the simulated engine was closed", in_flight=True))

    def _fault_for(self, job: Job) -> EngineError | None:
        options = self.options
        if self._begun == options.die_after or (options.poison and options.poison in str(job.body)):
            return self._die()
        if options.overload and self._luck.random() < options.overload:
            return EngineOverloaded("the simulated engine refuses work", RETRY_AFTER)
        if options.fail and self._luck.random() < options.fail:
            return EngineUnclear("the simulated engine failed", 500, dump({"error": {"message": "simulated failure"}}))
        return None

    def _die(self) -> EngineGone:
        down = self.options.down
        self._back_at = asyncio.get_running_loop().time() + down if down else float("inf")
        self._gpu.kill(_death)
        return _death()

    def _is_down(self) -> bool:
        if self._back_at is None:
            return False
        if asyncio.get_running_loop().time() < self._back_at:
            return True
        self._back_at = None
        return False


def _death() -> EngineGone:
    return EngineGone("the simulated engine died", in_flight=True)


def _work(script: Script, on_delta: OnDelta | None) -> Work:
    """Return the work of an answer; with a listener, its chunks are said as their tokens come."""
    if on_delta is None or not script.answer_tokens:
        return Work(script.prompt_tokens, script.answer_tokens, script.choices)
    said = 0

    def say_tokens(count: int) -> None:
        nonlocal said
        if said == 0:
            _say(on_delta, sim_answers.opening(script))
        for text, chunk in sim_answers.pieces(script, said, count):
            on_delta(text, chunk)
        said += count

    return Work(script.prompt_tokens, script.answer_tokens, script.choices, say_tokens)


def _say_at_once(script: Script, on_delta: OnDelta | None) -> None:
    if on_delta is None or not script.answer_tokens:
        return
    _say(on_delta, sim_answers.opening(script))
    for text, chunk in sim_answers.pieces(script, 0, script.answer_tokens):
        on_delta(text, chunk)
    _say(on_delta, sim_answers.closing(script))


def _say(on_delta: OnDelta, chunks: list[bytes]) -> None:
    for chunk in chunks:
        on_delta("", chunk)


def _too_long(script: Script, kv_tokens: int) -> EngineAnswer:
    needed = script.prompt_tokens + script.answer_tokens
    message = f"prompt and answer need {needed} tokens, the simulated engine has {kv_tokens}"
    error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    return EngineAnswer(400, dump({"error": error}), f"sim-{script.number}")


def _options(query: str) -> SimOptions:
    defaults = SimOptions()
    known = {option.name: type(getattr(defaults, option.name)) for option in fields(SimOptions)}
    given: dict[str, int | float | str] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in known:
            raise UsageError(
                f"sim:// has no parameter {name!r}; it takes {', '.join(known)}, as in sim://?{_example()}"
            )
        try:
            given[name] = known[name](text)
        except ValueError:
            wanted = {int: "a whole number", float: "a number"}[known[name]]
            raise UsageError(f"sim://: expected {wanted} for {name}, got {text!r}") from None
    options = SimOptions(**given)  # type: ignore[arg-type]  # each value was made by its field's own type
    for name in ("slots", "prefill_tps", "decode_tps", "kv_tokens", "answer"):
        if not 0 < getattr(options, name) < float("inf"):
            raise UsageError(f"sim://: expected a number above 0 for {name}, got {getattr(options, name):g}")
    for name in ("fail", "overload"):
        if not 0 <= getattr(options, name) <= 1:
            raise UsageError(f"sim://: expected a chance from 0 to 1 for {name}, got {getattr(options, name):g}")
    for name in ("die_after", "down", "instant"):
        if not 0 <= getattr(options, name) < float("inf"):
            raise UsageError(f"sim://: expected 0 or more for {name}, got {getattr(options, name):g}")
    return options


def _example() -> str:
    return "slots=32&prefill_tps=8000&decode_tps=40"
