"""How a command runs its asynchronous part: on uvloop where there is one, and ended by Ctrl-C or SIGTERM.

A command that is interrupted lets go of what it holds and says what goes on and what to type next.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from llmq.cli.errors import INTERRUPTED, Interrupted
from llmq.workers.shutdown import Shutdown

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_async(work: Callable[[], Coroutine[Any, Any, T]], shutdown: Shutdown | None = None) -> T:
    """Run `work` to its end.

    The first signal cancels it and raises Interrupted, the second ends the process. With `shutdown`, signals ask for
    that instead: once to drain, twice to hand back at once, and the third ends the process.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_interruptible(work, shutdown))
    finally:
        # A loop leaves handlers that do nothing: a question that is asked next could not be left by Ctrl-C.
        for number, handler in before.items():
            if handler is not None:  # None: set by what is not Python, and not ours to put back
                signal.signal(number, handler)
        gc.unfreeze()


def settle_memory() -> None:
    """Say that what is in memory now stays: a server has begun, and all its code is loaded.

    The collector of cycles need not look at it again: that takes 50 ms each time, in which no stream moves.
    """
    gc.collect()
    gc.freeze()


async def _interruptible(work: Callable[[], Coroutine[Any, Any, T]], shutdown: Shutdown | None) -> T:
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    steps: Iterator[Callable[[], object]] = iter([task.cancel] if shutdown is None else [shutdown.request] * 2)

    def receive() -> None:
        next(steps, _end_at_once)()

    for number in SIGNALS:
        loop.add_signal_handler(number, receive)
    try:
        return await work()
    except asyncio.CancelledError:
        raise Interrupted from None


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # Windows, PyPy
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def _end_at_once() -> None:
    os._exit(INTERRUPTED)
