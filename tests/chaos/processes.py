"""Processes that start in no time: forked from a server that has imported all that they need.

A chaos run kills and starts some hundred processes. Started anew, each would spend a second of a core on its imports,
which on a busy machine is most of what a run costs, and minutes until a killed worker is back.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import multiprocessing
import os
import signal
import sys
from pathlib import Path

from tests.servers import Guardian

#: What the processes run; the server imports these once.
MODULES = ("tests.chaos.worker", "tests.chaos.engine", "tests.system.feeding_and_collecting")

#: How often it is looked whether a process has ended or said something; there is no event for either.
LOOK_S = 0.03


class Process:
    """One process that runs `main` of a module; what it prints goes into `log`, and it dies with the guardian."""

    def __init__(self, module: str, arguments: list[str], log: Path, guardian: Guardian) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(MODULES))
        self._process = context.Process(target=_main, args=(module, arguments, str(log)), daemon=True)
        log.touch()
        self._process.start()
        self._guardian = guardian
        self._watched = True
        self.log = log
        guardian.watch(self.pid)

    @property
    def pid(self) -> int:
        """Its number."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """How it ended; None while it runs."""
        code = self._process.exitcode
        if code is not None and self._watched:
            self._watched = False
            self._guardian.forget(self.pid)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def said(self, word: str) -> str:
        """Return the first line of its log that begins with a word; empty where there is none yet."""
        text = self.log.read_text(errors="replace")
        return next((line for line in text.splitlines() if line.startswith(word)), "")

    async def wait(self) -> int:
        """Wait for its end."""
        while (code := self.returncode) is None:  # noqa: ASYNC110 - its end is no event of this loop
            await asyncio.sleep(LOOK_S)
        return code


def _main(module: str, arguments: list[str], log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = [module, *arguments]
    main = importlib.import_module(module).main
    if inspect.iscoroutinefunction(main):
        asyncio.run(main())
    else:
        main()
