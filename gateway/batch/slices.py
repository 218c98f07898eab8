"""Slices: work on many small things that takes turns with the event loop, on which chat lives.

Reading and parsing a file takes seconds of CPU in all. It is done in a thread, two milliseconds at a time: a thread
that went on and on would take the interpreter from the event loop for five milliseconds each time that it wants it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

#: Seconds and things after which the event loop gets its turn.
SLICE_S = 0.002
SLICE_THINGS = 256


async def in_slices(things: Iterator[T]) -> AsyncGenerator[list[T], None]:
    """Iterate over what an iterator yields, some at a time; its own work is done in a thread."""
    while slice_ := await in_thread(lambda: _take(things)):
        yield slice_


async def in_thread(work: Callable[[], T]) -> T:
    """Do it in a thread, and never leave it running: it may use a file that is closed next."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()
        raise


def _take(things: Iterator[T]) -> list[T]:
    until, taken = time.perf_counter() + SLICE_S, []
    for thing in things:
        taken.append(thing)
        if len(taken) == SLICE_THINGS or time.perf_counter() >= until:
            break
    return taken
