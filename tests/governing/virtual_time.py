"""An event loop whose clock jumps to the next timer: what takes hours runs in seconds, and always the same way."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _NoWait(selectors.SelectSelector):
    """Waits for nothing: where the loop would sleep, its clock is moved on."""

    def __init__(self) -> None:
        super().__init__()
        self.loop: VirtualLoop | None = None

    def select(self, timeout: float | None = None) -> list[Any]:
        """Return what is ready now, and let the time pass that the loop would have waited."""
        ready = super().select(0)
        if not ready and timeout is not None and timeout > 0 and self.loop is not None:
            self.loop.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop in virtual time; `now` is its clock in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _NoWait()
        super().__init__(selector)
        selector.loop = self

    def time(self) -> float:
        """Return the virtual time."""
        return self.now


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)
