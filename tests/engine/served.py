"""Engines as a user would have llmq start them: commands for `--serve`, and what became of their processes."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from llmq.workers.engines import llamacpp_server
from tests.engine import tiny_model

#: Prints that it is up, and is never healthy.
LOADS_FOR_EVER = "import time; print('loading', flush=True); time.sleep(600)"

#: Ignores SIGTERM, as does the process that it starts.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
subprocess.run(["sh", "-c", 'echo $$ >> "$0"; exec sleep 600', sys.argv[1]])
"""

#: Ends at once on SIGTERM, while the process that it started takes its time to end well.
WRAPPER = """
import signal, subprocess, sys
slow = 'trap "sleep 0.3; echo well; exit" TERM; echo up; while :; do sleep 0.05; done'
subprocess.run(["sh", "-c", slow])
"""


class Served:
    """The processes that one command has started; each writes its number into a file when it begins."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "pids"

    def llama(self, port: int, slots: int = 2) -> str:
        """Return the command of a real engine with the tiny model."""
        options = (f"--port={port}", f"--slots={slots}", "--threads=1")
        return self.command("-P", llamacpp_server.__file__, tiny_model(), *options)

    def program(self, text: str, *arguments: object) -> str:
        """Return the command of a Python program."""
        return self.command("-c", text, *arguments)

    def stubborn(self) -> str:
        """Return the command of a program that ends by SIGKILL only."""
        return self.program(STUBBORN, self._file)

    def command(self, *arguments: object) -> str:
        """Return the command of a Python process with these arguments."""
        noting = 'echo $$ >> "$0"; exec "$@"'
        return shlex.join(["sh", "-c", noting, str(self._file), sys.executable, *map(str, arguments)])

    @property
    def pids(self) -> list[int]:
        """All processes so far."""
        return [int(line) for line in self._file.read_text().split()] if self._file.exists() else []

    @property
    def alive(self) -> list[int]:
        """Those that have not ended."""
        return [pid for pid in self.pids if runs(pid)]

    def kill(self) -> None:
        """End the newest one as the out-of-memory killer does."""
        os.kill(self.pids[-1], signal.SIGKILL)


def runs(pid: int) -> bool:
    """Tell whether a process lives; one that has ended and waits to be noticed does not."""
    if sys.platform == "linux":  # where a small image may have no `ps`
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
        except (FileNotFoundError, ProcessLookupError):
            return False
    else:
        asked = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
        state = asked.stdout
    return state.strip()[:1] not in ("", "Z", "X")
