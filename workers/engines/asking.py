"""What is sent to an engine for a job: the body as it was submitted, but for the model's name and the stream.

`http.py` sends it. Nothing here does I/O.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import orjson

from llmq.scheduler import raw_json
from llmq.scheduler.errors import UsageError
from llmq.scheduler.job import Job
from llmq.workers.engines.base import BATCH_PRIORITY, EngineInfo
from llmq.workers.engines.merge import Tree, dump

#: A job whose model is missing, empty or this takes whatever the engine serves first.
DEFAULT_MODEL = "default"

#: Endpoints whose streams tell their usage only when asked; the others always do.
ASKED_FOR_USAGE = ("/v1/chat/completions", "/v1/completions")


#: Endpoints whose bodies may have a priority.
PRIORITISED = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True, slots=True)
class Request:
    """What is sent for a job."""

    path: str
    body: bytes
    streams: bool


def base_url(url: str) -> str:
    """Return the URL without a trailing `/v1` and slash. Raises UsageError for one that cannot be an engine's."""
    try:
        parts = urlsplit(url.strip())
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        usable = usable and not parts.query and not parts.fragment
    except ValueError:  # a port that is none, brackets that hold no address
        usable = False
    if not usable:
        raise UsageError(f"expected the URL of an engine, as in http://HOST:8000 or https://HOST/v1, got {url!r}")
    if parts.username is not None:
        raise UsageError("an engine's URL holds no user or password: give the key as the engine's API key")
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


def request_for(job: Job, model: str | None) -> Request:
    """Return what is sent: the body as it was submitted, but for the model's name and that it is streamed."""
    changes: Tree = {"stream": None}
    if model is not None:
        changes["model"] = model
    elif wants_default_model(job):
        changes["model"] = None
    streams = _can_stream(job.url, job.body)
    if not streams:
        changes["stream_options"] = None
    else:
        changes["stream"] = True
        if job.url in ASKED_FOR_USAGE:
            options = job.body.get("stream_options")
            changes["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
    return Request(job.url, _changed(job, changes), streams)


def _changed(job: Job, changes: Tree) -> bytes:
    """Return the body with some fields changed, or taken out (None); one that came as bytes stays so in all others."""
    if job.raw:
        return raw_json.changed(job.raw, {name: None if new is None else dump(new) for name, new in changes.items()})
    body = {key: value for key, value in job.body.items() if key not in changes}
    return orjson.dumps(body | {name: new for name, new in changes.items() if new is not None})


def behind_chat(job: Job, engine: EngineInfo) -> Job:
    """Return a batch job as it is sent: behind chat inside the engine too, where that has priorities."""
    if not engine.prioritises or job.url not in PRIORITISED or "priority" in job.body:
        return job
    raw = raw_json.changed(job.raw, {"priority": dump(BATCH_PRIORITY)}) if job.raw else b""
    return replace(job, body={**job.body, "priority": BATCH_PRIORITY}, raw=raw)


def _can_stream(url: str, body: Tree) -> bool:
    """Return whether engines stream this: vLLM refuses to with the three fields named here."""
    if url == "/v1/embeddings":
        return False
    prompt_logprobs, best_of = body.get("prompt_logprobs"), body.get("best_of")
    return not (
        (isinstance(prompt_logprobs, int) and prompt_logprobs != 0)
        or (isinstance(best_of, int) and best_of > 1)
        or body.get("use_beam_search")
    )


def wants_default_model(job: Job) -> bool:
    """Return whether the job leaves the choice of the model to the engine."""
    return job.body.get("model") in (DEFAULT_MODEL, None, "")
