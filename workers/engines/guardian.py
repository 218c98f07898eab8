"""The guardian: a small process between llmq and an engine that it starts, so that the engine never outlives llmq.

    python guardian.py LOG|- GRACE COMMAND...

It starts the engine in a process group of its own, writes down what that prints, and ends when the engine ends, with
its exit code (128 + N for signal N). Its stdin is the lifeline: whoever started it holds the other end, and the kernel
closes that even at SIGKILL. Then the group gets SIGTERM, and SIGKILL after GRACE seconds: llama.cpp waits for its
requests, and vLLM's inner processes survive their parent.

Where the guardian itself is killed, Linux kills the engine's first process with it. Elsewhere nothing does.

This file is run by its path, in an isolated Python: it imports nothing of llmq.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

#: The log is set aside at this size; one older log is kept.
LOG_LIMIT = 10 * 2**20

#: What stands in the log before the words of each start.
START_MARK = b"--- started by llmq: "

#: Exit code where the command cannot be run, as in a shell.
NOT_RUNNABLE = 127

#: For the processes of a group that ends as it was asked to, after its first has ended.
LEFT_BEHIND_S = 5.0

_LOOK_S = 0.02

_PR_SET_PDEATHSIG = 1
_LIFELINE = 0
_PIECE = 65_536

#: What an engine that has ended may still have in the pipe, and more than a pipe holds.
_LAST_PIECES = 32


class Log:
    """The engine's log. A disk that is full costs words, never the engine."""

    def __init__(self, path: Path, limit: int = LOG_LIMIT) -> None:
        self._path = path
        self._limit = limit
        self._size = path.stat().st_size if path.exists() else 0

    def write(self, words: bytes) -> None:
        """Append; set the log aside first where it would grow over its limit."""
        with contextlib.suppress(OSError):
            if self._size and self._size + len(words) > self._limit:
                self._path.replace(self._path.with_name(f"{self._path.name}.1"))
                self._size = 0
            descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with open(descriptor, "wb") as file:
                file.write(words)
            self._size += len(words)


class Guardian:
    """One engine process from its start to the end of its group."""

    def __init__(self, command: Sequence[str], log: Log | None, grace_s: float) -> None:
        self._log = log
        self._grace_s = grace_s
        self._asked = False
        self._kill_at: float | None = None
        self._events = selectors.DefaultSelector()
        self._watch_signals()
        self._events.register(_LIFELINE, selectors.EVENT_READ, self._read_lifeline)
        # Without a log all goes to stderr: stdout is the answer of the command that started us.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno() if log is None else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,
            preexec_fn=_die_with(os.getpid()),  # safe: this process has one thread
        )
        if self._process.stdout is not None:
            os.set_blocking(self._process.stdout.fileno(), False)
            self._events.register(self._process.stdout, selectors.EVENT_READ, self._read_output)

    def run(self) -> int:
        """Watch over the engine until it has ended; return its exit code."""
        while self._process.poll() is None:
            left = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
            for key, _ in self._events.select(left):
                key.data()
            if self._asked and self._kill_at is None:
                self._kill_at = time.monotonic() + self._grace_s
                self._signal(signal.SIGTERM)
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._signal(signal.SIGKILL)
                self._kill_at += 1.0
        self._end_the_rest()
        for _ in range(_LAST_PIECES):
            if not self._read_output():
                break
        code = self._process.returncode
        return code if code >= 0 else 128 - code

    def _end_the_rest(self) -> None:
        """End what the first process left behind: it would hold the GPU's memory.

        Where all were asked to end, the others may take a moment longer (the child of a wrapper script). Nobody can
        have been given the group's number: it is taken as long as one process is in the group.
        """
        until = time.monotonic() + LEFT_BEHIND_S if self._asked else 0.0
        while time.monotonic() < min(until, self._kill_at or until) and self._signal(0):
            time.sleep(_LOOK_S)
        self._signal(signal.SIGKILL)

    def _watch_signals(self) -> None:
        read_end, write_end = os.pipe()
        os.set_blocking(read_end, False)
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the wake-up is all
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: self._ask_to_end())
        self._events.register(read_end, selectors.EVENT_READ, lambda: os.read(read_end, _PIECE))

    def _read_lifeline(self) -> None:
        if not os.read(_LIFELINE, _PIECE):
            self._events.unregister(_LIFELINE)
            self._ask_to_end()

    def _ask_to_end(self) -> None:
        self._asked = True

    def _signal(self, number: int) -> bool:
        """Send the group a signal (0: none); return whether anybody is in it."""
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):  # macOS: no permission for a group of zombies
            return False
        return True

    def _read_output(self) -> bool:
        """Write down a piece of what the engine has said; return whether there was one. Never waits for more."""
        output = self._process.stdout
        if output is None or self._log is None or output.closed:
            return False
        try:
            words = os.read(output.fileno(), _PIECE)
        except BlockingIOError:
            return False
        if words:
            self._log.write(words)
        else:
            self._events.unregister(output)
            output.close()
        return bool(words)


def _die_with(parent: int) -> Callable[[], None] | None:
    """Return what a new process does first: on Linux, ask the kernel to kill it when its parent ends."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)

    def ask() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:  # it ended before it could be asked for
            os._exit(1)

    return ask


def main(arguments: Sequence[str]) -> int:
    """Guard one engine; return its exit code."""
    place, grace, *command = arguments
    log = None if place == "-" else Log(Path(place))
    if log is not None:
        log.write(START_MARK + time.strftime("%Y-%m-%dT%H:%M:%S%z\n").encode())
    try:
        guardian = Guardian(command, log, float(grace))
    except OSError as error:
        words = f"{command[0]} cannot be run: {error.strerror}\n".encode()
        if log is None:
            os.write(sys.stderr.fileno(), words)
        else:
            log.write(words)
        return NOT_RUNNABLE
    return guardian.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
