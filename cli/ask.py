"""`llmq ask`: one question, answered on the terminal as the engine writes it. Chat: it goes before batch."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from llmq.cli.errors import Interrupted
from llmq.cli.options import Json, Queue, RedisUrl, Tenant
from llmq.cli.render import notice, print_json
from llmq.cli.running import run_async
from llmq.cli.session import load, worker_command
from llmq.scheduler.client import AsyncClient
from llmq.scheduler.errors import LLMQError, UsageError
from llmq.scheduler.fleet import SILENT, read_workers
from llmq.scheduler.handles import AsyncJobHandle
from llmq.scheduler.settings import Loaded

#: A wait of this length is worth a word on who serves.
_NOTE_AFTER_S = 2.0

#: What the simulated GPU signs its answers with.
_SIMULATED = "simulated"

#: How long a cancel may take when somebody wants to leave.
_CANCEL_S = 2.0


def ask(
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The question; - is stdin.")],
    model: Annotated[str | None, typer.Option("--model", "-m", metavar="M", help="The model (the engine's).")] = None,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="The system message.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, metavar="N", help="The longest answer, in LLM tokens.")
    ] = None,
    queue: Queue = None,
    tenant: Tenant = None,
    redis: RedisUrl = None,
    json: Json = False,
) -> None:
    """Ask one question and print the answer as it comes.

    Ctrl-C cancels it. Ends with 1 when the engine refused it or nobody answered in time.

    \b
    Examples:
      llmq ask "Why is the sky blue?"
      llmq ask - --system "Translate to French" < letter.txt
      llmq ask "1 + 1?" --json
    """
    question = _question(text)
    loaded = load(queue=queue, tenant=tenant, redis_url=redis)
    messages = [{"role": "system", "content": system}] if system else []
    body: dict[str, Any] = {"messages": [*messages, {"role": "user", "content": question}]}
    body |= {"model": model} if model else {}
    body |= {"max_tokens": max_tokens} if max_tokens else {}
    run_async(lambda: _ask(loaded, body, json))


def _question(text: str) -> str:
    if text == "-":
        try:
            text = sys.stdin.buffer.read().decode()
        except UnicodeDecodeError:
            raise UsageError("stdin: expected UTF-8 text") from None
    if not text.strip():
        raise UsageError('expected a question, got nothing: llmq ask "Why is the sky blue?"')
    return text


async def _ask(loaded: Loaded, body: dict[str, Any], json: bool) -> None:
    settings = loaded.settings
    async with AsyncClient(settings.redis_url, queue=settings.queue, tenant=settings.tenant) as client:
        job = await client.submit(body)
        noting = asyncio.create_task(_note_no_worker(client, loaded))
        try:
            if json:
                result = await job.result()
                noting.cancel()
                print_json(
                    {
                        "id": job.id,
                        "text": result.text,
                        "status_code": result.status_code,
                        "usage": asdict(result.usage),
                        "body": result.body,
                    }
                )
            else:
                await _print_stream(job, noting)
                result = await job.result()
            if isinstance(result.body, dict) and result.body.get("system_fingerprint") == _SIMULATED:
                notice("note: the engine is simulated: its answers are noise")
        except asyncio.CancelledError:
            await _cancel(job)
            raise Interrupted(f"interrupted; job {job.id} is cancelled") from None
        except BrokenPipeError:
            await _cancel(job)
            raise
        finally:
            noting.cancel()


async def _print_stream(job: AsyncJobHandle, noting: asyncio.Task[None]) -> None:
    printed = ""
    try:
        async with contextlib.aclosing(job.stream()) as deltas:
            async for delta in deltas:
                noting.cancel()
                if delta.text:
                    sys.stdout.write(delta.text)
                    sys.stdout.flush()
                    printed = delta.text
    finally:
        if printed and not printed.endswith("\n"):
            sys.stdout.write("\n")


async def _note_no_worker(client: AsyncClient, loaded: Loaded) -> None:
    """After a while without an answer, say whether there is anybody to give one."""
    await asyncio.sleep(_NOTE_AFTER_S)
    with contextlib.suppress(LLMQError):
        if all(worker.state == SILENT for worker in await read_workers(await client.queue())):
            queue = loaded.settings.queue
            notice(f"note: no worker serves queue {queue} now; waiting for one: {worker_command(loaded, queue)}")


async def _cancel(job: AsyncJobHandle) -> None:
    """Cancel a job that nobody waits for any more; where Redis is away, it expires by itself."""
    with contextlib.suppress(LLMQError, TimeoutError):
        async with asyncio.timeout(_CANCEL_S):
            await job.cancel()
