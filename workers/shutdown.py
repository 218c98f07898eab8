"""Shutdown in three phases: quiet (nothing new is claimed), deadline (running requests may finish), hand back.

A person or a supervisor asks once for the first; asking again, or the end of the grace, brings the last.
"""

from __future__ import annotations

import asyncio
import signal


class Shutdown:
    """What a process was asked to do; `request` is called by signal handlers and by whoever ends a worker."""

    def __init__(self) -> None:
        self._quiet = asyncio.Event()
        self._at_once = asyncio.Event()

    @property
    def requested(self) -> bool:
        """Whether anybody asked to stop."""
        return self._quiet.is_set()

    def request(self) -> None:
        """Ask to drain; asked a second time, hand back at once."""
        if self._quiet.is_set():
            self._at_once.set()
        self._quiet.set()

    def request_at_once(self) -> None:
        """Ask to hand back at once, without a grace."""
        self._quiet.set()
        self._at_once.set()

    async def quiet(self) -> None:
        """Wait until somebody asks to stop."""
        await self._quiet.wait()

    async def at_once(self) -> None:
        """Wait until somebody asks to stop at once."""
        await self._at_once.wait()

    def on_signals(self) -> None:
        """Let SIGTERM and SIGINT ask for it."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request)
