"""Ending tasks that talk to Redis.

A cancel is not certain to arrive: Python 3.11's `asyncio.wait_for`, within which redis-py sends every command, forgets
one that comes in the moment in which the command is sent. Who cancels once and waits may then wait for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

#: How long a task may take to end before it is cancelled again.
AGAIN_S = 0.1


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks until all of them have ended, however they end."""
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)


async def within(timeout: float | None, work: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns; raises TimeoutError after `timeout` seconds (None: never), for certain."""
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=timeout)
        if done:
            return task.result()
    finally:
        await end_tasks(task)
    raise TimeoutError
