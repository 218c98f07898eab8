"""The processes that a row measures: workers, and other commands of llmq, each a process of its own."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import llmq

START_TIMEOUT_S = 60.0

#: The command line, by the module that its entry point names: it need not be installed.
LLMQ = (sys.executable, "-c", "from llmq.cli.main import main; main()")


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that serves; `said` is what it prints from now on, `ready` how it said that it is."""

    process: subprocess.Popen[bytes]
    said: IO[bytes]
    ready: str = ""


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used so far, in seconds."""
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, times)) / os.sysconf("SC_CLK_TCK")


@contextmanager
def llmq_worker(url: str, slots: int, engine: str = "sim://?instant=1") -> Iterator[Worker]:
    """Run `llmq worker`, as anybody would; no slots are kept for chat."""
    options = ("--engine", engine, "--concurrency", str(slots), "--reserve", "0", "--redis", url)
    with _serving((*LLMQ, "worker", *options)) as worker:
        yield worker


@contextmanager
def llmq_gateway(url: str, home: Path) -> Iterator[tuple[Worker, str]]:
    """Run `llmq gateway`; also return its URL."""
    options = ("--port", "0", "--files", str(home / "files"), "--redis", url)
    with _serving((*LLMQ, "gateway", *options)) as gateway:
        yield gateway, gateway.ready.rpartition(" ")[2].removesuffix("/v1")


@contextmanager
def stream_engine() -> Iterator[str]:
    """Run the engine that streams at a fixed pace; return its URL."""
    with _serving((sys.executable, "-m", "bench.stream_engine")) as engine:
        yield engine.ready.rpartition(" ")[2]


@contextmanager
def bench_worker(
    url: str, slots: int, *, reserve: int = 0, sleep: float = 0.0, engine: str = "sim"
) -> Iterator[Worker]:
    """Run a worker whose engine says when each job started, and takes `sleep` seconds for one (see worker.py)."""
    options = (url, f"--slots={slots}", f"--reserve={reserve}", f"--sleep={sleep}", f"--engine={engine}")
    with _serving((sys.executable, "-m", "bench.worker", *options)) as worker:
        yield worker


def environment(home: Path | None = None) -> dict[str, str]:
    """Return an environment with this llmq and without anybody's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LLMQ_")}
    paths = (str(Path(llmq.__file__).parents[1]), str(Path(__file__).parents[1]))
    return kept | {"PYTHONPATH": os.pathsep.join(paths)} | ({"LLMQ_HOME": str(home)} if home else {})


@contextmanager
def _serving(command: Sequence[str]) -> Iterator[Worker]:
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        yield Worker(process, process.stdout, _wait_until_ready(process, process.stderr))
    finally:
        process.kill()
        process.communicate()


def _wait_until_ready(process: subprocess.Popen[bytes], stderr: IO[bytes]) -> str:
    deadline, said = time.monotonic() + START_TIMEOUT_S, b""
    while select.select([stderr], [], [], max(0.0, deadline - time.monotonic()))[0]:
        line = stderr.readline()
        if line.startswith(b"ready "):
            return line.decode().strip()
        said += line
        if not line:
            break
    raise RuntimeError(f"{process.args!r} was not ready; it said:\n{said.decode(errors='replace')}")
