"""One engine process under its guardian: started, waited for, stopped. Nothing here asks the engine anything."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from llmq.workers.engines import guardian
from llmq.workers.engines.launch import Launch

#: Between SIGTERM and SIGKILL. llama.cpp waits up to 30 s for its requests; by then there is none to wait for.
GRACE_S = 30.0

#: After SIGKILL: a process that waits for its GPU's driver may take its time.
LAST_SECONDS_S = 10.0

#: What a message shows of an engine's last words.
LAST_LINES = 20

_TAIL_BYTES = 64 * 1024


class EngineProcess:
    """A running engine; made by `start`. `log` of None means that it speaks on stderr."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path | None) -> None:
        self._process = process
        self._log = log

    @classmethod
    async def start(cls, launch: Launch, log: Path | None, held: Sequence[int], grace_s: float) -> EngineProcess:
        """Start an engine. `held` are open files (locks) that stay open as long as it runs."""
        command = [sys.executable, "-I", guardian.__file__, str(log or "-"), str(grace_s), *launch.command]
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            # Nothing of llmq's own: an engine has no use for the password of Redis or the key of the jobs.
            env={**others_environment(), **launch.environment},
            pass_fds=list(held),
            # Ctrl-C on the terminal is for llmq, which drains before it ends the engine.
            start_new_session=True,
        )
        return cls(process, log)

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self._process.returncode is None

    async def ended(self) -> int:
        """Wait for the end; return the exit code (128 + N for signal N)."""
        code = await self._process.wait()
        return code if code >= 0 else 128 - code

    async def stop(self, grace_s: float = GRACE_S) -> bool:
        """End it and all that it started; return False where it still has not ended after SIGKILL."""
        lifeline = self._process.stdin
        assert lifeline is not None
        lifeline.close()
        try:
            async with asyncio.timeout(grace_s + LAST_SECONDS_S):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    def last_words(self) -> str:
        """Return the end of what it printed since its start, "" where that went to stderr or nothing came."""
        if self._log is None:
            return ""
        with contextlib.suppress(OSError), self._log.open("rb") as file:
            file.seek(max(0, self._log.stat().st_size - _TAIL_BYTES))
            said = file.read().rpartition(guardian.START_MARK)[2]
            lines = said.decode(errors="replace").splitlines()[1:]
            return "\n".join(f"  {line}" for line in lines[-LAST_LINES:])
        return ""


def others_environment() -> dict[str, str]:
    """Return this process' environment without the settings of llmq, some of which are secrets."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LLMQ_")}


def describe_exit(code: int) -> str:
    """Say how a process ended."""
    if code > 128:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(code - 128).name}"
    return f"exit code {code}"
