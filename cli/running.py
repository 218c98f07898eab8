"""How a command runs its asynchronous part: on uvloop where there is one, and ended by Ctrl-C or SIGTERM.

The first signal cancels the command, which lets go of what it holds and raises `Interrupted` with what to type next;
the second ends the process at once. Commands with a drain of their own take the signals themselves (`on_signals`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from llmq.cli.errors import INTERRUPTED, Interrupted

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_async(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `work` to its end. Raises Interrupted when a signal ended it."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_interruptible(work))


async def _interruptible(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    task = asyncio.current_task()
    assert task is not None
    with on_signals(task.cancel):
        try:
            return await work()
        except asyncio.CancelledError:
            raise Interrupted from None


@contextlib.contextmanager
def on_signals(first: Callable[[], object], second: Callable[[], object] | None = None) -> Iterator[None]:
    """Call `first` at the first signal and `second` at the next; without `second`, that one ends the process.

    A signal after the second ends the process in any case: nobody presses Ctrl-C three times to wait.
    """
    loop = asyncio.get_running_loop()
    steps = iter([first] if second is None else [first, second])

    def receive() -> None:
        next(steps, _end_at_once)()

    for number in SIGNALS:
        loop.add_signal_handler(number, receive)
    try:
        yield
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:  # Windows, PyPy
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def _end_at_once() -> None:
    os._exit(INTERRUPTED)
