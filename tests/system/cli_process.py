"""The command line in processes of its own, for the tests that look at exit codes, streams and signals.

    done = llmq("batch", "ls", "--json")
    with started("worker", "--engine", "sim") as process:
        process.until("ready ")

Nobody sits at these terminals: stdin is empty unless a test gives it something, stdout and stderr are pipes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: The entry point as it was installed.
LLMQ = str(Path(sys.executable).with_name("llmq"))

#: A busy machine starts a process in seconds.
PATIENCE_S = 60.0


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


def llmq(*arguments: object, url: str | None = None, stdin: bytes = b"", **options: Any) -> Done:
    """Run one command to its end. `url` is where its Redis is."""
    command = [LLMQ, *map(str, arguments)]
    ran = subprocess.run(command, input=stdin, capture_output=True, timeout=PATIENCE_S, env=environment(url), **options)
    return checked(Done(ran.returncode, ran.stdout.decode(), ran.stderr.decode()))


def checked(done: Done) -> Done:
    """Return what a command left; no error that a test can bring about may show a traceback."""
    assert "Traceback" not in done.err, done.err
    assert "Traceback" not in done.out
    return done


def environment(url: str | None) -> Mapping[str, str]:
    """Return the test's environment, with the URL in it."""
    return os.environ | ({"LLMQ_REDIS_URL": url} if url else {})


class Started:
    """A command that runs."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.said = ""

    def until(self, text: str) -> str:
        """Wait until stderr holds `text`; return all of it so far."""
        assert self.process.stderr is not None
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.said:
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
        env=environment(url),
        **options,
    )
    try:
        yield Started(process)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
