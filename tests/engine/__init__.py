"""A real engine for the tests: llama.cpp serving a tiny model of random weights.

    with llama_server(slots=2) as server:
        engine = HttpEngine(server.url)

The server is a process of its own, which a test may kill; it starts in half a second and ends with the test run.
"""

from __future__ import annotations

import atexit
import functools
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from tests.engine.tiny_model import write_tiny_model

#: It takes half a second on an idle machine, and many on a very busy one.
START_TIMEOUT = 60.0

#: `logit_bias` with which the tiny model says "A", and only that: its noise may end at once, or begin in the middle of
#: a character, and then llama.cpp says no role.
LETTERS = {"68": 100}

SCRIPT = Path(__file__).with_name("serve_llamacpp.py")

#: Threads that spin while they wait make two threads on two cores run at a fifth of their speed.
QUIET_THREADS = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}


@dataclass(frozen=True)
class LlamaServer:
    """A running llama.cpp server: its base URL, the one model it lists, its slots and its process."""

    url: str
    slots: int
    process: subprocess.Popen[bytes]
    model: str = "tiny"

    def kill(self) -> None:
        """Kill the process as the out-of-memory killer does; return when it is gone."""
        self.process.kill()
        self.process.wait()


@contextmanager
def llama_server(
    *, slots: int = 4, context: int = 2048, api_key: str | None = None, port: int = 0, embeddings: bool = False
) -> Iterator[LlamaServer]:
    """Serve the tiny model on a free port (or on `port`), with `context` tokens a slot; end the server afterwards."""
    command = [sys.executable, str(SCRIPT), str(tiny_model()), f"--slots={slots}", f"--context={context}"]
    command += [f"--port={port}"]
    command += [f"--api-key={api_key}"] if api_key else []
    command += ["--embeddings"] if embeddings else []
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **QUIET_THREADS},
    )
    try:
        deadline = time.monotonic() + START_TIMEOUT
        url = _listening_url(process, deadline)
        _wait_for_health(url, deadline)
        yield LlamaServer(url, slots, process)
    finally:
        process.kill()
        process.communicate()


@functools.cache
def tiny_model() -> Path:
    """Return the model file, written once a test run into a folder that goes away with it."""
    path = Path(_model_folder().name) / "tiny.gguf"
    write_tiny_model(path)
    return path


@functools.cache
def _model_folder() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="llmq-tiny-model-", ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)
    return folder


def _listening_url(process: subprocess.Popen[bytes], deadline: float) -> str:
    assert process.stdout is not None
    while select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError(f"the llama.cpp server ended with status {process.wait()} before it listened")
        if line.startswith(b"listening "):
            return line.split()[1].decode()
    raise RuntimeError(f"the llama.cpp server did not listen within {START_TIMEOUT:g} s")


def _wait_for_health(url: str, deadline: float) -> None:
    while time.monotonic() < deadline:
        try:
            with urlopen(f"{url}/health", timeout=START_TIMEOUT) as response:
                if response.status == 200:
                    return
        except URLError:
            # 503 while the model loads; there is no event to wait for across processes.
            time.sleep(0.02)
    raise RuntimeError(f"the llama.cpp server at {url} was not healthy within {START_TIMEOUT:g} s")
