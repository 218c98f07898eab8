"""Find out what answers at a URL: which engine, which models, how many slots, how loaded.

A worker probes before it takes its first job and again whenever its engine was gone. Fetching is here and in one place
(`fetch`); what the pages mean is decided by functions without I/O. Probing changes nothing in the engine.
"""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from llmq.scheduler.errors import EngineUnavailable
from llmq.workers.engines.base import BATCH_PRIORITY, Continues, EngineInfo, EngineLoad

#: llama.cpp took 7.8 s for a page with 16 requests on 2 slots: slow is not dead.
PAGE_TIMEOUT = 30.0

#: For pages that only add to what is known; a probe does not fail for want of them.
EXTRA_TIMEOUT = 5.0

#: Pages of an engine are small; llama.cpp's /props holds its chat template.
MAX_PAGE_BYTES = 4 * 2**20

#: `owned_by` of the models page, where that alone tells the engine.
KIND_OF_OWNER = {"vllm": "vllm", "llamacpp": "llama.cpp", "sglang": "sglang"}

#: The end of an answer that was cut off: an engine that goes on with it has it at the end of its prompt.
CUT_OFF = "The sea is"

#: Names in /metrics of what runs and what waits, an engine a line.
LOAD_METRICS = (
    ("vllm:num_requests_running", "vllm:num_requests_waiting"),
    ("llamacpp:requests_processing", "llamacpp:requests_deferred"),
    ("sglang:num_running_reqs", "sglang:num_queue_reqs"),
)


class NobodyListens(EngineUnavailable):
    """Nothing accepts connections there: not even a wrong server."""


@dataclass(frozen=True, slots=True)
class Page:
    """One fetched page; `json` is None where the body is none."""

    status: int
    body: bytes
    content_type: str = ""
    request_id: str = ""

    @property
    def json(self) -> Any:
        """The body as JSON, None where it is not."""
        try:
            return orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return None

    @property
    def ok(self) -> bool:
        """Whether the page is there."""
        return self.status == 200

    @property
    def is_web_page(self) -> bool:
        """Whether a browser was expected."""
        return "html" in self.content_type or self.body.lstrip()[:1] == b"<"


NO_PAGE = Page(0, b"")


async def fetch(session: aiohttp.ClientSession, url: str, timeout: float) -> Page:
    """Get one page. Raises aiohttp.ClientError and TimeoutError."""
    limits = aiohttp.ClientTimeout(total=timeout)
    async with session.get(url, timeout=limits, allow_redirects=False) as response:
        body = await _body(response)
        headers = response.headers
        return Page(response.status, body, headers.get("Content-Type", ""), headers.get("x-request-id", ""))


async def _body(response: aiohttp.ClientResponse) -> bytes:
    body = await response.content.read(MAX_PAGE_BYTES)
    while len(body) < MAX_PAGE_BYTES and (more := await response.content.read(MAX_PAGE_BYTES - len(body))):
        body += more
    return body


async def probe(session: aiohttp.ClientSession, url: str, with_key: bool) -> EngineInfo:
    """Return what answers at `url` (a base URL without /v1). Raises EngineUnavailable with what was found instead."""
    try:
        models_page = await fetch(session, f"{url}/v1/models", PAGE_TIMEOUT)
    except aiohttp.ClientConnectorError as error:
        reason = os.strerror(error.errno).lower() if error.errno else str(error)
        raise NobodyListens(
            f"no engine answers at {url} ({reason}): start it, or name another, as in --engine http://HOST:8000"
        ) from None
    except (aiohttp.ClientError, TimeoutError) as error:
        reason = "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        raise EngineUnavailable(
            f"what listens at {url} gives no HTTP answer to /v1/models ({reason}): check that it is an inference "
            "server, and that the URL begins with the right one of http:// and https://"
        ) from None
    health = await _extra(session, f"{url}/health")
    if fault := fault_of(url, models_page, health, with_key):
        raise EngineUnavailable(fault)
    kind, slots = await _identify(session, url, models_page, health)
    models = models_of(models_page)
    continues = await _continues(session, url, kind, models)
    return EngineInfo(kind, url, models, slots, False, continues, await _prioritises(session, url, kind, models))


async def load(session: aiohttp.ClientSession, url: str) -> EngineLoad:
    """Return what runs and waits at `url`, as far as it tells; never raises for a page that is missing."""
    found = load_of(await _extra(session, f"{url}/metrics"))
    if found.running is None:
        found = EngineLoad(running=busy_slots_of(await _extra(session, f"{url}/slots")))
    return found


def fault_of(url: str, models_page: Page, health: Page, with_key: bool) -> str:
    """Say why this is no engine that can be used, with the next step; "" where it is one."""
    status = models_page.status
    if status in (401, 403):
        step = "it was started with another one" if with_key else "give the one that it was started with"
        return f"the engine at {url} refuses {'this' if with_key else 'requests without an'} API key ({status}): {step}"
    if models_page.is_web_page:
        return f"{url}/v1/models is a web page (HTTP {status}), not an inference API: check host and port"
    if 300 <= status < 400:
        return f"{url}/v1/models redirects elsewhere (HTTP {status}), which llmq never follows: give the final URL"
    if health.status == 503 or status == 503:
        return f"the engine at {url} is not ready (HTTP 503; it loads its model, or has died): try again in a while"
    if models_page.ok and not _is_models_page(models_page):
        return f"{url}/v1/models is not a list of models in OpenAI's form: it is no OpenAI-compatible server"
    # transformers lists its models from the hub, and answers 500 without a network: its health is enough.
    if models_page.ok or (status >= 500 and health.ok and isinstance(health.json, dict)):
        return ""
    return (
        f"{url} answers, but has no /v1/models (HTTP {status}): it is no OpenAI-compatible server, or its API is "
        "under another path; give the URL that ends before or with /v1, as in http://HOST:8000/v1"
    )


def models_of(models_page: Page) -> tuple[str, ...]:
    """Return the ids that the models page lists, in its order."""
    if not _is_models_page(models_page):
        return ()
    return tuple(model["id"] for model in models_page.json["data"] if isinstance(model.get("id"), str))


def slots_of(props: Page, slots: Page) -> int | None:
    """Return llama.cpp's number of slots, from /props or else /slots."""
    total = props.json.get("total_slots") if props.ok and isinstance(props.json, dict) else None
    if isinstance(total, int) and total > 0:
        return total
    return len(slots.json) if slots.ok and isinstance(slots.json, list) and slots.json else None


def busy_slots_of(slots: Page) -> int | None:
    """Return how many of llama.cpp's slots work."""
    if not (slots.ok and isinstance(slots.json, list)):
        return None
    return sum(1 for slot in slots.json if isinstance(slot, dict) and slot.get("is_processing"))


def load_of(metrics: Page) -> EngineLoad:
    """Read the numbers of running and waiting requests from a Prometheus page, summed over its labels."""
    text = metrics.body.decode("utf-8", "replace") if metrics.ok else ""
    for running_name, waiting_name in LOAD_METRICS:
        running, waiting = _gauge(text, running_name), _gauge(text, waiting_name)
        if running is not None:
            return EngineLoad(running, waiting)
    return EngineLoad()


async def _identify(session: aiohttp.ClientSession, url: str, models: Page, health: Page) -> tuple[str, int | None]:
    """Return the engine's kind and its slots, asking for no more pages than it takes."""
    kind = _owner_of(models)
    if kind in ("vllm", "sglang"):
        return kind, None
    pages = ("props", "slots") if kind else ("props", "slots", "version", "get_model_info")
    props, slots, *others = await asyncio.gather(*(_extra(session, f"{url}/{page}") for page in pages))
    if kind == "llama.cpp" or (isinstance(props.json, dict) and "total_slots" in props.json):
        return "llama.cpp", slots_of(props, slots)
    version, model_info = others
    if isinstance(model_info.json, dict) and "model_path" in model_info.json:
        return "sglang", None
    if isinstance(version.json, dict) and "version" in version.json:
        return "vllm", None
    # transformers has no page of its own; of the engines known it alone gives its health a request id.
    if health.request_id and health.json == {"status": "ok"}:
        return "transformers", None
    return "openai", None


async def _continues(session: aiohttp.ClientSession, url: str, kind: str, models: tuple[str, ...]) -> Continues | None:
    """Return how the engine goes on with an answer that was cut off, as seen in the prompt that it makes of one."""
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": CUT_OFF}]
    match kind:
        case "llama.cpp":
            page = await _ask(session, f"{url}/apply-template", {"messages": messages})
            prompt = page.json.get("prompt") if isinstance(page.json, dict) else None
            return Continues.PREFILL if isinstance(prompt, str) and prompt.endswith(CUT_OFF) else None
        case "vllm" | "sglang":
            model = {"model": models[0]} if models else {}
            flags = {"continue_final_message": True, "add_generation_prompt": False}
            page = await _ask(session, f"{url}/tokenize", {**model, "messages": messages, **flags})
            tokens = page.json.get("tokens") if isinstance(page.json, dict) else None
            if not isinstance(tokens, list):
                return None
            page = await _ask(session, f"{url}/detokenize", {**model, "tokens": tokens})
            prompt = page.json.get("prompt") if isinstance(page.json, dict) else None
            return Continues.FLAG if isinstance(prompt, str) and prompt.endswith(CUT_OFF) else None
    return None


async def _prioritises(session: aiohttp.ClientSession, url: str, kind: str, models: tuple[str, ...]) -> bool:
    """Whether vLLM was started with priority scheduling: without, it refuses any priority but 0."""
    if kind != "vllm" or not models:
        return False
    body = {"model": models[0], "prompt": "1", "max_tokens": 1, "priority": BATCH_PRIORITY}
    return (await _ask(session, f"{url}/v1/completions", body)).ok


async def _ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Page:
    """Post to a page that may be missing; what it does is without effect."""
    limits = aiohttp.ClientTimeout(total=EXTRA_TIMEOUT)
    try:
        async with session.post(url, json=body, timeout=limits, allow_redirects=False) as response:
            return Page(response.status, await _body(response))
    except (aiohttp.ClientError, TimeoutError):
        return NO_PAGE


async def _extra(session: aiohttp.ClientSession, url: str) -> Page:
    """Get a page that may be missing, or slow under load."""
    try:
        return await fetch(session, url, EXTRA_TIMEOUT)
    except (aiohttp.ClientError, TimeoutError):
        return NO_PAGE


def _is_models_page(page: Page) -> bool:
    found = page.json if page.ok else None
    data = found.get("data") if isinstance(found, dict) else None
    return isinstance(data, list) and all(isinstance(model, dict) for model in data)


def _owner_of(models_page: Page) -> str:
    if not models_of(models_page):
        return ""
    owner = models_page.json["data"][0].get("owned_by")
    return KIND_OF_OWNER.get(owner, "") if isinstance(owner, str) else ""


def _gauge(text: str, name: str) -> int | None:
    values = re.findall(rf"^{re.escape(name)}(?:\{{[^}}\n]*\}})? ([0-9.eE+]+)\s*$", text, re.MULTILINE)
    return sum(int(float(value)) for value in values) if values else None
