"""`llmq top`: on a real terminal (a pty of 80 columns), beside a real worker, through an outage of Redis."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator

import pytest

from tests.conftest import OwnServer
from tests.system.cli_process import LLMQ, PATIENCE_S, QUICK, llmq, started

#: Where each picture begins.
HOME = b"\x1b[H"

_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class Screen:
    """A terminal on which `llmq top` runs; `until` waits for what it shows."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self.process = process
        self._terminal = terminal

    def until(self, text: str) -> str:
        """Wait until a text is written, after what was waited for last."""
        seen, deadline = b"", time.monotonic() + PATIENCE_S
        while text not in (plain := _ESCAPES.sub(b"", seen.replace(HOME, b"\n")).decode(errors="replace")):
            ready = select.select([self._terminal], [], [], max(0.0, deadline - time.monotonic()))[0]
            assert ready, f"expected {text!r} on the screen, saw {plain[-4000:]!r}"
            seen += os.read(self._terminal, 65_536)
        return plain

    def end(self, number: signal.Signals) -> int:
        """Send a signal, and return the exit code."""
        self.process.send_signal(number)
        deadline = time.monotonic() + PATIENCE_S
        while self.process.poll() is None:  # what it writes last has to be read, or it waits for that
            assert time.monotonic() < deadline
            if select.select([self._terminal], [], [], 0.05)[0]:
                with contextlib.suppress(OSError):  # the other side is closed
                    os.read(self._terminal, 65_536)
        return self.process.returncode


@contextlib.contextmanager
def watching(url: str, *arguments: str) -> Iterator[Screen]:
    """Run `llmq top` on a terminal of 80 columns."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [LLMQ, "top", *arguments],
        stdin=its,
        stdout=its,
        stderr=subprocess.PIPE,
        env=os.environ | {"LLMQ_REDIS_URL": url, "TERM": "xterm"},
    )
    os.close(its)
    try:
        yield Screen(process, ours)
    finally:
        process.kill()
        process.communicate()
        os.close(ours)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_shows_a_worker_that_comes_and_ends_well(system_redis_url: str, number: signal.Signals) -> None:
    """The same figures as status, looked at again and again; lines are as wide as the terminal at most."""
    with watching(system_redis_url, "--every", "200ms") as screen:
        first = screen.until("has no workers")
        assert "Ctrl-C ends" in first
        assert "interactive" in first
        with started("worker", "--engine", QUICK, "--gpu", "7", url=system_redis_url) as worker:
            ready = worker.until("ready ").partition("ready ")[2].split()[0]
            shown = screen.until(ready)
            assert max(len(line) for line in shown.replace("\r", "").split("\n")) <= 80
            assert 0 == screen.end(number)
            worker.terminate()
            worker.end()


def test_an_outage_is_shown_and_outlived(own_server: OwnServer) -> None:
    """The last picture stays, with the time since when; then it goes on."""
    server = own_server()
    with watching(server.url, "--every", "200ms") as screen:
        screen.until("interactive")
        server.kill()
        shown = screen.until("not read for ")
        assert "Traceback" not in shown
        screen.until("interactive")
        server.start()
        deadline = time.monotonic() + PATIENCE_S
        while "not read for" in screen.until("has no workers"):
            assert time.monotonic() < deadline
        assert 0 == screen.end(signal.SIGINT)


def test_a_program_is_told_what_to_call(system_redis_url: str) -> None:
    """Without a terminal there is nothing to draw on; `--json` is one look."""
    done = llmq("top", url=system_redis_url)
    assert (2, "expected a terminal on stdout; for a program: llmq status --json") == (done.code, done.error)
    assert "default" == llmq("top", "--json", url=system_redis_url).json["queue"]


@pytest.mark.parametrize("every", ["0", "10ms", "2h", "often"])
def test_a_wrong_interval_is_refused(system_redis_url: str, every: str) -> None:
    """One line that names what was expected."""
    done = llmq("top", "--every", every, url=system_redis_url)
    assert 2 == done.code
    assert "expected" in done.error


def test_an_unreachable_redis_is_an_error_at_the_start() -> None:
    """A wrong URL is no outage to wait for."""
    with watching("redis://127.0.0.1:1/0") as screen:
        assert screen.process.wait(PATIENCE_S) == 4
        assert screen.process.stderr is not None
        assert screen.process.stderr.read().startswith(b"error: ")
