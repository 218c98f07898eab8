"""A gateway for the tests of files and batches: in this process, or in one of its own that a test kills.

async with gateway(url, folder) as served:
    client = served.client()                    # the official client, unchanged

python -m tests.gateway.batch_gateway URL FOLDER PORT [--die STEP:N]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import orjson
from openai import AsyncOpenAI, OpenAI
from openai.types import Batch

from llmq.gateway.batch import gathering, hold, keeper
from llmq.gateway.batch.conductor import Conductor, Limits
from llmq.gateway.batch.facts import Ledger
from llmq.gateway.batch.files import Files
from llmq.gateway.batch.parts import Chain
from llmq.gateway.batch.storage import Storage
from llmq.gateway.gateway import GatewayOptions, serve
from llmq.scheduler.batches import Batches
from llmq.scheduler.feeding import Feeder
from llmq.workers.shutdown import Shutdown
from tests.gateway import serving

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
PATIENCE_S = 60.0

ENDED = ("completed", "failed", "expired", "cancelled")


@dataclass
class Served:
    """A gateway that serves on `port`."""

    port: int
    clients: list[AsyncOpenAI] = field(default_factory=list)

    @property
    def base_url(self) -> str:
        """What the official clients take."""
        return f"http://127.0.0.1:{self.port}/v1"

    def client(self, key: str = "any", **options: Any) -> AsyncOpenAI:
        """Return the official client; it is closed with the gateway."""
        client = AsyncOpenAI(base_url=self.base_url, api_key=key, **{"max_retries": 0, **options})
        self.clients.append(client)
        return client

    def sync_client(self) -> OpenAI:
        """Return the official client without asyncio: use it in a thread, and close it there."""
        return OpenAI(base_url=self.base_url, api_key="any", max_retries=0)


@contextlib.asynccontextmanager
async def gateway(
    url: str, files: str | Path, *, limits: Limits | None = None, queue: str = "default"
) -> AsyncIterator[Served]:
    """Serve in this process until the block ends."""
    async with serving.gateway(url, files=str(files), input_limits=limits or Limits(), queue=queue) as running:
        served = Served(running.port)
        try:
            yield served
        finally:
            for client in served.clients:
                await client.close()


def listening(port: int = 0) -> socket.socket:
    """Return a socket that listens on a free port."""
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener


def line(number: int, *, url: str = CHAT, **body: Any) -> dict[str, Any]:
    """Return a good line of an input."""
    asked = {"model": "sim", "messages": [{"role": "user", "content": f"question {number}"}], "max_tokens": 4}
    return {"custom_id": f"row-{number}", "method": "POST", "url": url, "body": asked | body}


def jsonl(lines: list[Any]) -> bytes:
    """Return lines as a file; bytes are taken as they are."""
    return b"".join((one if isinstance(one, bytes) else orjson.dumps(one)) + b"\n" for one in lines)


def questions(count: int, **body: Any) -> bytes:
    """Return a good input."""
    return jsonl([line(number, **body) for number in range(1, count + 1)])


async def uploaded(client: AsyncOpenAI, content: bytes, name: str = "input.jsonl") -> str:
    """Upload an input; return its id."""
    return (await client.files.create(file=(name, content), purpose="batch")).id


async def created(client: AsyncOpenAI, content: bytes, window: Any = "24h", **options: Any) -> Batch:
    """Upload an input and make a batch of it."""
    return await client.batches.create(
        input_file_id=await uploaded(client, content),
        endpoint=options.pop("endpoint", CHAT),
        completion_window=window,
        **options,
    )


async def until_status(client: AsyncOpenAI, batch_id: str, *statuses: str, within: float = PATIENCE_S) -> Batch:
    """Wait until a batch has one of the statuses; return it."""
    async with asyncio.timeout(within):
        while True:
            batch = await client.batches.retrieve(batch_id)
            if batch.status in statuses:
                return batch
            assert batch.status not in ENDED, batch
            await asyncio.sleep(0.05)


async def ended(client: AsyncOpenAI, batch_id: str, *, within: float = PATIENCE_S) -> Batch:
    """Wait for the end of a batch."""
    return await until_status(client, batch_id, *ENDED, within=within)


async def lines_of(client: AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    """Return the lines of a file; of none, none."""
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return [orjson.loads(one) for one in content.content.splitlines()]


async def each_line_once(client: AsyncOpenAI, batch: Batch, count: int) -> tuple[list[Any], list[Any]]:
    """Fail unless each line has exactly one result in the two files; return output and errors."""
    output, errors = await lines_of(client, batch.output_file_id), await lines_of(client, batch.error_file_id)
    assert sorted(f"row-{n}" for n in range(1, count + 1)) == sorted(one["custom_id"] for one in [*output, *errors])
    assert batch.request_counts is not None
    assert (count, len(output), len(errors)) == (
        batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed,
    )  # fmt: skip
    return output, errors


# --- a gateway in a process of its own ------------------------------------------------------------------------------

#: A gateway that holds, looks and gathers in a tenth of the time: (module, name, value).
QUICK: tuple[tuple[Any, str, Any], ...] = (
    (hold, "TTL_S", 1.0),
    (hold, "RENEW_S", 0.2),
    (keeper, "LOOK_S", 0.2),
    (keeper, "FIRST_PAUSE_S", 0.1),
    (gathering, "PART_LINES", 10),
    (gathering, "LEAST_PATIENCE_S", 0.0),
)

#: The steps at which a gateway may be killed: after each has been done for the N-th time, by this process itself.
STEPS: dict[str, tuple[Any, str]] = {
    "enter": (Ledger, "enter"),
    "examine": (Conductor, "_accept"),
    "accept": (Ledger, "accept"),
    "life": (Chain, "begin_life"),
    "open": (Batches, "open"),
    "chunk": (Feeder, "_send"),
    "part": (Chain, "append"),
    "tell": (Batches, "collected"),
    "file": (Files, "add"),
    "end": (Ledger, "end"),
    "close": (Ledger, "close"),
    "write": (Storage, "write"),
}


@contextlib.contextmanager
def gateway_process(url: str, files: Path, *, die: str = "") -> Iterator[tuple[Served, subprocess.Popen[bytes]]]:
    """Start a gateway and return when it serves; it is killed at the end of the block."""
    with listening() as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tests.gateway.batch_gateway", url, str(files), str(port), f"--die={die}"]
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        _wait_until(lambda: _answers(port) or process.poll() is not None)
        yield Served(port), process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _die_after(step: str, count: int) -> None:
    owner, name = STEPS[step]
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    async def dying(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        done = await original(*arguments, **options)
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    setattr(owner, name, dying)


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("files")
    parser.add_argument("port", type=int)
    parser.add_argument("--die", default="")
    given = parser.parse_args()
    if given.die:
        step, _, count = given.die.partition(":")
        _die_after(step, int(count))
    for module, name, value in QUICK:
        setattr(module, name, value)
    await serve(given.url, GatewayOptions(files=given.files), [listening(given.port)], Shutdown())


if __name__ == "__main__":
    asyncio.run(_main())
