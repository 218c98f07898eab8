"""`llmq tune`: measures how much batch an engine bears beside chat, and stores it for the governor to begin with."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from llmq.cli.bench import BatchPrompt, Longest, Rate, Seconds, Share, Tokens, Trace, set_ttft_p95, wanted_of
from llmq.cli.engine import EngineStart, open_engine
from llmq.cli.errors import Interrupted
from llmq.cli.options import Concurrency, EngineName, Gpu, Json, Queue, RedisUrl, Serve, ServeLog
from llmq.cli.render import notice, print_facts, print_json, print_line, print_table
from llmq.cli.running import run_async
from llmq.cli.session import load, open_session
from llmq.scheduler.errors import UsageError
from llmq.scheduler.settings import Settings
from llmq.scheduler.tuned import Tuned, store_tuned
from llmq.workers.shutdown import Shutdown

if TYPE_CHECKING:
    from llmq.workers.engines.base import EngineInfo
    from llmq.workers.trial.setting import Wanted
    from llmq.workers.trial.tuning import Found


def tune(
    engine: EngineName = None,
    seconds: Seconds = "20s",
    share: Share = 0.35,
    rate: Rate = None,
    tokens: Tokens = None,
    most_tokens: Longest = 2000,
    trace: Trace = None,
    batch_prompt: BatchPrompt = None,
    factor: Annotated[
        float, typer.Option("--factor", metavar="X", help="Chat's p95 breaks above X times its p95 alone.")
    ] = 1.1,
    gpu: Gpu = "0",
    serve: Serve = None,
    serve_log: ServeLog = None,
    queue: Queue = None,
    concurrency: Concurrency = None,
    redis: RedisUrl = None,
    json: Json = False,
) -> None:
    """Measure how much batch your engine bears beside chat.

    A few minutes of recorded chat beside more and more batch requests, straight at the engine. What held is stored in
    the queue for this engine and model: its workers begin there, those that run as well, and feel their way from it as
    ever. Run it again whenever engine or model change. Nothing else should use the engine meanwhile.

    \b
    Examples:
      llmq tune --engine http://127.0.0.1:8000
      llmq tune --engine sim --seconds 10s --queue trial
    """
    loaded = load(engine=engine, queue=queue, concurrency=concurrency, redis_url=redis)
    if factor <= 1:
        raise UsageError(f"--factor: expected more than 1 times what chat alone sees, got {factor:g}")
    slots = loaded.settings.concurrency
    wanted = wanted_of(seconds, "0s", share, rate, tokens, most_tokens, trace, batch_prompt, slots)
    start = EngineStart(gpu, serve, serve_log)
    try:
        found, info, tuned = run_async(lambda: _tune(loaded.settings, start, wanted, factor))
    except Interrupted:
        raise Interrupted("interrupted; nothing was stored") from None
    if json:
        print_json(_to_json(found, info, tuned, loaded.settings.queue))
    else:
        _print(found, info, loaded.settings.queue, factor)


async def _tune(
    settings: Settings, start: EngineStart, wanted: Wanted, factor: float
) -> tuple[Found, EngineInfo, Tuned]:
    from llmq.workers.trial.metered import MeteredEngine
    from llmq.workers.trial.setting import set_up
    from llmq.workers.trial.tuning import find_limits

    async with (
        open_session(settings) as session,
        open_engine(settings, start, Shutdown()) as opened,
    ):
        engine = MeteredEngine(opened.engine)
        setting = await set_up(engine, opened.info, wanted, notice)
        found = await find_limits(setting, engine, factor, notice)
        tuned = Tuned(
            batch=found.batch,
            prefill_tps=found.prefill_tps,
            alone_s=found.alone.p95_s,
            chat_rate=setting.chat_a_second,
            at=time.time(),
            chat=found.chat_in_flight,
        )
        await asyncio.shield(store_tuned(session.queue, opened.info.kind, opened.info.models, tuned))
    return found, opened.info, tuned


def _print(found: Found, info: EngineInfo, queue: str, factor: float) -> None:
    columns = ["beside chat", "p95>", "x alone>", "batch tok/s>", "holds"]
    rows = [["nothing", f"{found.alone.p95_s * 1000:.0f} ms", "1.00", "0", ""]]
    for trial in found.trials:
        row = trial.row
        held = "yes" if trial.holds else "no"
        rows.append([row.name, f"{row.p95_s * 1000:.0f} ms", f"{row.ratio:.2f}", f"{row.batch_tps:,.0f}", held])
    print_table(columns, rows)
    print_line()
    print_facts(
        {
            "engine": f"{info.kind}{' (SIMULATED)' if info.simulated else ''} {', '.join(info.models[:1])}",
            "batch": f"{found.batch} requests at once hold, beside {found.chat_in_flight:.1f} of chat on average",
            "prompts": f"{found.prefill_tps:,.0f} prompt tokens of batch a second hold",
            "objective": set_ttft_p95(found.alone.p95_s, factor, queue),
            "stored": f"in queue {queue}: its workers begin with it from now on",
        }
    )


def _to_json(found: Found, info: EngineInfo, tuned: Tuned, queue: str) -> dict[str, Any]:
    return {
        "simulated": info.simulated,
        "queue": queue,
        "engine": info.kind,
        "models": list(info.models),
        "batch": tuned.batch,
        "chat_in_flight": round(tuned.chat, 2),
        "prefill_tps": round(tuned.prefill_tps),
        "alone": found.alone.to_json(),
        "trials": [
            trial.row.to_json() | {"batch": trial.batch, "prefill_tps": round(trial.prefill_tps), "holds": trial.holds}
            for trial in found.trials
        ],
    }
