"""The command line as the tests run it: to its end, or in a process of its own that can be interrupted and killed.

    done = llmq("batch", "ls", "--json", url=url)
    with started("worker", "--engine", "sim", url=url) as process:
        process.until("ready ")

Nobody sits at these terminals: stdin is empty unless a test gives it something, stdout and stderr are pipes.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from llmq.cli.main import run_line

#: The entry point as it was installed.
LLMQ = str(Path(sys.executable).with_name("llmq"))

#: A busy machine starts a process in seconds.
PATIENCE_S = 60.0

QUICK = "sim://?instant=1"

#: Two requests at a time, each some tenths of a second: slow enough to be interrupted, quick enough to be waited for.
SLOW = "sim://?slots=2&decode_tps=100"

#: More tokens than the simulated GPU holds: it answers HTTP 400.
TOO_LONG = {"max_tokens": 10_000_000, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Stdout, which must be one JSON value and nothing else."""
        return json.loads(self.out)

    @property
    def error(self) -> str:
        """The one line of the error on stderr."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert 1 == len(lines), self.err
        return lines[0].removeprefix("error: ")


def llmq(*arguments: object, url: str | None = None, stdin: bytes = b"", folder: Path | None = None) -> Done:
    """Run one command to its end, as a process would but in this one: loading Python takes longer than most commands.

    `url` is where its Redis is, `folder` where it runs.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    given = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    with (
        mock.patch.dict(os.environ, {"LLMQ_REDIS_URL": url} if url else {}),
        mock.patch.multiple(sys, stdin=given, stdout=out, stderr=err),
        contextlib.chdir(folder or Path.cwd()),
    ):
        code = run_line([str(argument) for argument in arguments])
    written = [stream.buffer.getvalue().decode() for stream in (out, err)]
    return checked(Done(code, *written))


def checked(done: Done) -> Done:
    """Return what a command left; no error that a test can bring about may show a traceback."""
    assert "Traceback" not in done.err, done.err
    assert "Traceback" not in done.out
    return done


class Started:
    """A command that runs."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.said = ""

    def until(self, text: str, times: int = 1) -> str:
        """Wait until stderr holds `text` so many times; return all of it so far."""
        assert self.process.stderr is not None
        deadline = time.monotonic() + PATIENCE_S
        while self.said.count(text) < times:
            ready = select.select([self.process.stderr], [], [], max(0.0, deadline - time.monotonic()))[0]
            piece = os.read(self.process.stderr.fileno(), 65_536) if ready else b""
            assert piece, f"expected {text!r} on stderr, got: {self.said}"
            self.said += piece.decode()
        return self.said

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def terminate(self) -> None:
        """Ask it to end, as a supervisor does."""
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it as the out-of-memory killer does."""
        self.process.kill()
        self.process.wait()

    def end(self) -> Done:
        """Wait for its end."""
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return checked(Done(self.process.returncode, out.decode(), self.said + err.decode()))


@contextlib.contextmanager
def started(*arguments: object, url: str | None = None, **options: Any) -> Iterator[Started]:
    """Start a command; it is killed at the end of the block if it still runs."""
    process = subprocess.Popen(
        [LLMQ, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | ({"LLMQ_REDIS_URL": url} if url else {}),
        **options,
    )
    try:
        yield Started(process)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def write_prompts(path: Path, count: int, **fields: Any) -> Path:
    """Write a file of `count` prompts; `fields` go into each body."""
    lines = [
        {"messages": [{"role": "user", "content": f"prompt {number}"}], **fields} for number in range(1, count + 1)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def ids_in(path: Path) -> list[str]:
    """Return the custom_ids of an output file, in its order."""
    return [json.loads(line)["custom_id"] for line in path.read_bytes().splitlines()]


def ids(count: int) -> list[str]:
    """Return the ids of a file of prompts without ids of their own."""
    return [f"line-{number}" for number in range(1, count + 1)]


def submitted(url: str, prompts: Path) -> str:
    """Queue a file and return the batch's id."""
    done = llmq("submit-batch", prompts, url=url)
    assert 0 == done.code, done.err
    return done.out.strip()


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def until(true: Callable[[], bool], what: str) -> None:
    """Wait until something is true that only another process can make so."""
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, f"expected {what}"
        time.sleep(0.02)


@contextlib.contextmanager
def answering(answer: Callable[[bytes], bytes]) -> Iterator[int]:
    """Answer on a port whatever is asked; nothing (b"") closes the connection."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while (asked := self.request.recv(65_536)) and (said := answer(asked)):
                self.request.sendall(said)
                if said.startswith(b"HTTP/"):
                    return

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()
