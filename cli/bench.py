"""`llmq bench`: the user's own proof, on the user's own engine, that chat keeps its speed and what batch gets of it.

The same recorded chat comes three times: alone, beside batch that is sent straight to the engine, and beside batch that
goes through llmq. Everything runs in this process but Redis; the queues are its own, and gone at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json as json_module
import math
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from llmq.cli.engine import EngineStart, open_engine
from llmq.cli.errors import Interrupted
from llmq.cli.options import Concurrency, EngineName, Gpu, Json, Queue, RedisUrl, Serve, ServeLog
from llmq.cli.render import command, notice, print_facts, print_json, print_line, print_table
from llmq.cli.running import run_async
from llmq.cli.session import DEFAULT_QUEUE, Session, load, open_session
from llmq.scheduler.errors import UsageError
from llmq.scheduler.queue import Queue as JobQueue
from llmq.scheduler.settings import Settings
from llmq.scheduler.units import parse_duration
from llmq.workers.shutdown import Shutdown

if TYPE_CHECKING:
    from llmq.workers.engines.base import EngineInfo
    from llmq.workers.engines.discovery import FoundEngine
    from llmq.workers.trial.figures import Row
    from llmq.workers.trial.metered import MeteredEngine
    from llmq.workers.trial.phase import Phase
    from llmq.workers.trial.setting import Setting, Wanted

#: Batch requests that are sent straight to the engine, for each of its slots.
STRAIGHT = 2

Seconds = Annotated[str, typer.Option("--seconds", "-s", metavar="TIME", help="How long each phase lasts.")]
Turns = Annotated[
    int, typer.Option("--turns", metavar="N", min=1, help="Measure the phases in so many turns, one after the other.")
]
Rate = Annotated[float | None, typer.Option("--rate", metavar="X", help="Recorded chat X times as dense.")]
Share = Annotated[float, typer.Option("--share", metavar="S", help="What chat alone uses of the engine, about.")]
Tokens = Annotated[float | None, typer.Option("--tokens", metavar="X", help="X times as many tokens as recorded.")]
Longest = Annotated[int, typer.Option("--most-tokens", metavar="N", help="Prompt and answer together at most.")]
Trace = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="Other traffic: time, prompt, answer tokens a line.")
]
BatchPrompt = Annotated[
    str | None,
    typer.Option(
        "--batch-prompt", metavar="N-N", help="Tokens of batch prompts, before --tokens scales them (100-800)."
    ),
]


@dataclass(frozen=True, slots=True)
class Bench:
    """What was asked. `caps` are fixed batch caps to try on top, `factor` times chat alone's p95 is the objective.

    `fcfs` is whether batch is also sent straight to the engine.
    """

    settings: Settings
    start: EngineStart
    wanted: Wanted
    factor: float
    fcfs: bool
    caps: Sequence[int]
    out: Path
    json: bool


def bench(
    engine: EngineName = None,
    seconds: Seconds = "60s",
    warmup: Annotated[
        str, typer.Option("--warmup", metavar="TIME", help="Not counted at the beginning, of each turn.")
    ] = "10s",
    turns: Turns = 1,
    share: Share = 0.35,
    rate: Rate = None,
    tokens: Tokens = None,
    most_tokens: Longest = 2000,
    trace: Trace = None,
    batch_prompt: BatchPrompt = None,
    objective: Annotated[
        float, typer.Option("--objective", metavar="X", help="ttft_p95, as a multiple of chat's alone.")
    ] = 1.1,
    caps: Annotated[
        str, typer.Option("--caps", metavar="N,N", help="Also try these fixed batch caps, through llmq.")
    ] = "",
    fcfs: Annotated[
        bool, typer.Option("--fcfs/--no-fcfs", help="Also send batch straight to the engine: first come, first served.")
    ] = True,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="STEM", help="Writes STEM.json, STEM.png, STEM.svg.")
    ] = Path("llmq-bench"),
    gpu: Gpu = "0",
    serve: Serve = None,
    serve_log: ServeLog = None,
    queue: Queue = None,
    concurrency: Concurrency = None,
    redis: RedisUrl = None,
    json: Json = False,
) -> None:
    """Prove on your engine that chat keeps its speed beside batch.

    The same recorded chat three times: alone; beside batch that is sent straight to the engine; and beside batch
    through llmq. Prints a table, and writes a plot of the time to first token and the figures behind it. Nothing else
    should use the engine meanwhile. Ctrl-C is safe: the queues are its own, and are removed. What `llmq tune` has
    stored in --queue for this engine is where llmq begins.

    On a machine that is faster now and slower then, let the phases take turns: each sees every part of the hour. Chat
    alone is measured once more before them, for the objective.

    \b
    Examples:
      llmq bench --engine http://127.0.0.1:8000
      llmq bench --engine sim --seconds 30s
      llmq bench --seconds 180s --turns 3    3 x 60 s of each phase, in turns
      llmq bench --caps 2,4,8                fixed caps as well
      llmq bench --batch-prompt 2000-8000 --tokens 1 --most-tokens 9000
      llmq bench -o reports/tuesday          tuesday.json, .png, .svg
    """
    loaded = load(engine=engine, queue=queue, concurrency=concurrency, redis_url=redis)
    slots = loaded.settings.concurrency
    wanted = wanted_of(seconds, warmup, share, rate, tokens, most_tokens, trace, batch_prompt, slots, turns)
    if objective < 1:
        raise UsageError(f"--objective: expected 1 or more times what chat alone sees, got {objective:g}")
    asked = Bench(
        loaded.settings, EngineStart(gpu, serve, serve_log), wanted, objective, fcfs, _caps(caps), _checked(out), json
    )
    run_async(lambda: _bench(asked))


def wanted_of(
    seconds: str,
    warmup: str,
    share: float,
    rate: float | None,
    tokens: float | None,
    most_tokens: int,
    trace: Path | None,
    batch_prompt: str | None,
    slots: int | None,
    turns: int = 1,
) -> Wanted:
    """Return what a command line asks of a trial. Raises UsageError."""
    from llmq.workers.traffic import recorded_in
    from llmq.workers.trial.setting import Wanted

    whole, warm = parse_duration(seconds), parse_duration(warmup)
    if not 0 <= warm < whole / turns:
        of_what = f"{seconds} of a phase" if turns == 1 else f"{whole / turns:g} s of a turn"
        raise UsageError(f"expected a warm-up shorter than the {of_what}, got {warmup}")
    if not 0 < share < 1:
        raise UsageError(f"--share: expected a share between 0 and 1, got {share:g}")
    for name, value in (("--rate", rate), ("--tokens", tokens), ("--most-tokens", most_tokens)):
        if value is not None and not value > 0:
            raise UsageError(f"{name}: expected a number above 0, got {value:g}")
    arrivals = None if trace is None else recorded_in(trace)
    span = None if batch_prompt is None else _span(batch_prompt)
    return Wanted(whole, warm, share, rate, tokens, slots, most_tokens, arrivals, span, turns)


def set_ttft_p95(alone_s: float, factor: float, queue: str) -> str:
    """Return the command that asks for so many times what chat sees alone, and what it is."""
    name = () if queue == DEFAULT_QUEUE else ("--queue", queue)
    line = command("llmq", "set", "ttft_p95", f"{max(1, round(alone_s * factor * 1000))}ms", *name)
    return f"{line}   ({factor:g} x chat alone)"


def _span(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", text)
    if found is not None:
        low, high = int(found[1]), int(found[2] or found[1])
        if 0 < low <= high:
            return low, high
    raise UsageError(f"--batch-prompt: expected numbers of tokens from and to, as in 100-800, got {text!r}")


def _caps(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isascii() and word.isdigit() for word in words):
        raise UsageError(f"--caps: expected numbers of batch requests, as in 2,4,8, got {text!r}")
    return list(dict.fromkeys(int(word) for word in words))


def _checked(out: Path) -> Path:
    """Refuse a place that cannot be written before minutes are spent."""
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out: there is no folder {out.absolute().parent}: make it, or name another place")
    return out


async def _bench(asked: Bench) -> None:
    from llmq.workers.trial.figures import rows_of
    from llmq.workers.trial.metered import MeteredEngine
    from llmq.workers.trial.setting import set_up

    shutdown = Shutdown()
    try:
        async with (
            open_session(asked.settings, warnings=True) as session,
            open_engine(asked.settings, asked.start, shutdown) as found,
        ):
            engine = MeteredEngine(found.engine)
            setting = await set_up(engine, found.info, asked.wanted, notice)
            before, phases = await _phases(asked, session, setting, engine, await _tuned(session, found.info))
    except asyncio.CancelledError:
        raise Interrupted("interrupted; the queues of the bench are gone, and nothing was written") from None
    rows = rows_of(phases)
    report = _report(asked, found, setting, before, phases, rows)
    files = _write(asked, report, phases, found.info)
    if asked.json:
        print_json(report)
        return
    _print(rows, found.info, setting)
    print_line()
    print_facts({"objective": set_ttft_p95(rows[0].p95_s, asked.factor, asked.settings.queue)})
    for file in files:
        notice(f"wrote {file}")


async def _tuned(session: Session, info: EngineInfo) -> dict[str, str]:
    """Return what `llmq tune` has stored for this engine: where a worker of the user's own queue would begin."""
    from llmq.scheduler.tuned import field_of

    field = field_of(info.kind, info.models)
    stored = await cast(Any, session.queue.redis).hget(session.queue.keys.config, field)
    if stored is None:
        return {}
    notice("the governor begins where `llmq tune` has measured")
    return {field: stored.decode(errors="replace")}


async def _phases(
    asked: Bench, session: Session, setting: Setting, engine: MeteredEngine, tuned: Mapping[str, str]
) -> tuple[list[Phase], list[Phase]]:
    """Return chat alone once before the turns, where there are several, and the phases."""
    from llmq.workers.trial.figures import p95_alone, rows_of
    from llmq.workers.trial.phase import queued, straight, whole

    plan, lines, trial = setting.plan, setting.lines(), f"bench-{secrets.token_hex(4)}"

    def queue(part: str) -> JobQueue:
        return JobQueue(session.redis, f"{trial}-{part}", keyring=asked.settings.keyring())

    def say(phase: Phase, turn: int) -> None:
        row = rows_of([phases[0], phase])[1]
        so_far = f" ({turn + 1} of {plan.turns} turns)" if plan.turns > 1 else ""
        figures = f"p95 {_ms(row.p95_s)}, {row.ratio:.2f} x alone, {row.batch_tps:,.0f} batch tokens/s"
        aim = "" if phase.objective_s is None else f", objective {_ms(phase.objective_s)}"
        notice(f"{phase.name}: {figures}{aim}{so_far}")

    def objective() -> float:
        return asked.factor * p95_alone([*before, *phases[:1]])

    before: list[Phase] = []
    phases: list[Phase] = []
    straight_name = f"first come first served, {STRAIGHT * plan.slots} batch"
    measured = [
        queued("chat alone", plan, engine, queue("alone"), session.url),
        *((straight(straight_name, plan, engine, STRAIGHT * plan.slots),) if asked.fcfs else ()),
        queued("llmq", plan, engine, queue("llmq"), session.url, lines=lines, objective=objective, config=tuned),
        *(
            queued(f"fixed cap {cap}", plan, engine, queue(f"c{cap}"), session.url, lines=lines, batch_cap=cap)
            for cap in asked.caps
        ),
    ]
    in_turns = f", in {plan.turns} turns, and chat alone once before" if plan.turns > 1 else ""
    notice(f"{len(measured)} phases of {plan.seconds:g} s{in_turns}")
    async with contextlib.AsyncExitStack() as stack:
        for part in measured:
            stack.push_async_callback(part.aclose)
        if plan.turns > 1:  # of the few requests of a first turn no objective can be made that holds for the run
            once = replace(plan, turns=1)
            before.append(await whole(queued("chat alone", once, engine, queue("before"), session.url)))
            notice(f"chat alone, before the turns: p95 {_ms(p95_alone(before))}")
        for turn in range(plan.turns):
            for part in measured:
                phase = await anext(part)
                if not turn:
                    phases.append(phase)
                say(phase, turn)
    return before, phases


def _report(
    asked: Bench,
    found: FoundEngine,
    setting: Setting,
    before: Sequence[Phase],
    phases: Sequence[Phase],
    rows: Sequence[Row],
) -> dict[str, Any]:
    from llmq.workers.trial.requests import BATCH_PROMPT

    return {
        "simulated": found.info.simulated,
        "llmq": version_of("llmq-streams"),
        "at": time.time(),
        "engine": {"kind": found.info.kind, "models": list(found.info.models), "slots": setting.plan.slots},
        "seconds": setting.plan.seconds,
        "warmup": setting.plan.warmup,
        "turns": setting.plan.turns,
        "chat_per_s": round(setting.chat_a_second, 3),
        "capacity_per_s": round(setting.capacity, 3),
        "rate": round(setting.rate, 5),
        "tokens": setting.tokens,
        "batch_prompt": list(asked.wanted.batch_prompt or BATCH_PROMPT),
        "objective": asked.factor,
        "before": [{"name": phase.name, "first_tokens": _first_tokens(phase)} for phase in before],
        "phases": [
            row.to_json() | {"first_tokens": _first_tokens(phase)} for row, phase in zip(rows, phases, strict=True)
        ],
    }


def _first_tokens(phase: Phase) -> list[list[float | None]]:
    return [[round(at, 3), s and round(s, 4)] for at, s in sorted(phase.firsts)]


def _write(asked: Bench, report: dict[str, Any], phases: Sequence[Phase], info: EngineInfo) -> list[Path]:
    from llmq.workers.trial.plot import HOW_TO_GET, can_plot, plotted

    file = asked.out.with_name(asked.out.name + ".json")
    file.write_text(json_module.dumps(report, separators=(",", ":")) + "\n", encoding="utf-8")
    if not can_plot():
        notice(f"no plot: it is drawn with matplotlib ({HOW_TO_GET})")
        return [file]
    engine = " ".join(dict.fromkeys([info.kind, *info.models[:1]]))
    title = f"{'SIMULATED ' if info.simulated else ''}{engine}: chat beside batch"
    return [file, *plotted(phases, title, asked.out)]


def _print(rows: Sequence[Row], info: EngineInfo, setting: Setting) -> None:
    simulated = " (SIMULATED)" if info.simulated else ""
    print_line(
        f"{info.kind}{simulated}, {setting.plan.slots} slots, {rows[0].requests} chat requests at "
        f"{setting.chat_a_second:.3g} a second"
    )
    print_line()
    columns = [
        "phase",
        "p50>",
        "p95>",
        "p99>",
        "x alone>",
        "within>",
        "bursts>",
        "batch tok/s>",
        "wasted>",
        "preempted>",
    ]
    print_table(columns, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    return [
        row.name,
        _ms(row.p50_s),
        _ms(row.p95_s),
        _ms(row.p99_s),
        f"{row.ratio:.2f}",
        f"{row.within:.0%}",
        "-" if math.isnan(row.burst_ratio) else f"{row.burst_ratio:.2f}",
        f"{row.batch_tps:,.0f}",
        f"{row.wasted_share:.1%}",
        f"{row.preempted:,}",
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms" if seconds < float("inf") else "never"
