"""From what a user names as the engine to an `Engine`.

`engine_from` reads a name; `find_engine` also takes none, and then looks on this machine for a server on the usual
ports. It says which one it took, and never falls back to a simulation. Nothing is started here: a `local:` model and
`--serve` are `managed.py`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from llmq.scheduler.errors import EngineUnavailable, UsageError
from llmq.workers.engines.base import Engine, EngineInfo
from llmq.workers.engines.http import MAX_ANSWER_BYTES, HttpEngine
from llmq.workers.engines.probing import NobodyListens
from llmq.workers.engines.sim import SimEngine

#: Where servers listen by default: vLLM, SGLang, llama.cpp, Ollama.
LOCAL_PORTS = (8000, 30000, 8080, 11434)

FORMS = (
    "http(s)://HOST:PORT (any OpenAI-compatible server), local:MODEL.gguf (llama.cpp, started here), sim or "
    "sim://?slots=32&... (simulated)"
)


@dataclass(frozen=True, slots=True)
class FoundEngine:
    """An engine, what its probe found, and a line for the user that says which it is ("" if it was named by URL)."""

    engine: Engine
    info: EngineInfo
    note: str = ""


def engine_from(
    text: str,
    *,
    api_key: str | None = None,
    max_answer_bytes: int = MAX_ANSWER_BYTES,
    idle_timeout: float | None = None,
) -> Engine:
    """Return the engine of that name, not yet probed. Raises UsageError that lists the forms."""
    if text == "sim" or text.startswith("sim:"):
        return SimEngine.from_url(text)
    if text.startswith(("http://", "https://")):
        return HttpEngine(text, api_key=api_key, max_answer_bytes=max_answer_bytes, idle_timeout=idle_timeout)
    raise UsageError(f"expected an engine as {FORMS}, got {text!r}")


async def find_engine(
    text: str | None,
    *,
    api_key: str | None = None,
    ports: Sequence[int] = LOCAL_PORTS,
    max_answer_bytes: int = MAX_ANSWER_BYTES,
    idle_timeout: float | None = None,
) -> FoundEngine:
    """Return the named engine, probed; without a name the first one that serves on a local port.

    Raises UsageError for a name in no known form and EngineUnavailable, with what was found, when none answers.
    """
    if text is None:
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        return await _first_of(
            [
                HttpEngine(url, api_key=api_key, max_answer_bytes=max_answer_bytes, idle_timeout=idle_timeout)
                for url in urls
            ],
            ports,
        )
    engine = engine_from(text, api_key=api_key, max_answer_bytes=max_answer_bytes, idle_timeout=idle_timeout)
    try:
        info = await engine.probe()
    except BaseException:
        await engine.close()
        raise
    return FoundEngine(engine, info, "the engine is simulated: its answers are noise" if info.simulated else "")


async def _first_of(engines: Sequence[HttpEngine], ports: Sequence[int]) -> FoundEngine:
    kept: HttpEngine | None = None
    try:
        findings = await asyncio.gather(*(_probe(engine) for engine in engines))
        for engine, info in zip(engines, findings, strict=True):
            if isinstance(info, EngineInfo):
                kept = engine
                models = ", ".join(info.models) or "no model listed"
                return FoundEngine(engine, info, f"taking the {info.kind} engine at {info.url} ({models})")
    finally:
        await asyncio.gather(*(engine.close() for engine in engines if engine is not kept))
    raise EngineUnavailable(_none_found(ports, findings))


async def _probe(engine: HttpEngine) -> EngineInfo | EngineUnavailable:
    try:
        return await engine.probe()
    except EngineUnavailable as error:
        return error


def _none_found(ports: Sequence[int], findings: Sequence[EngineInfo | EngineUnavailable]) -> str:
    """Say what stands on the ports, and what can be named instead; closed ports are not worth a line each."""
    lines = [
        f"no inference engine on the local ports {', '.join(map(str, ports))}: start one, or name it: --engine {FORMS}"
    ]
    lines += [f"  {finding}" for finding in findings if not isinstance(finding, NobodyListens)]
    return "\n".join(lines)
