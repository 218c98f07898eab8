"""Ending tasks: for certain, though a cancel may be forgotten on its way."""

from __future__ import annotations

import asyncio

import pytest

from llmq.scheduler.tasks import end_tasks, within


async def forgetful(times: int) -> None:
    """Go on after some cancels, as a command of redis-py does on Python 3.11."""
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not times:
                raise
            times -= 1


async def test_a_task_that_forgets_a_cancel_is_ended_all_the_same() -> None:
    """It is cancelled again."""
    tasks = [asyncio.create_task(forgetful(times)) for times in range(3)]
    await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await end_tasks(*tasks)
    assert all(task.cancelled() for task in tasks)


async def test_tasks_that_have_ended_are_left_alone() -> None:
    """With a result, an error, or none at all."""

    async def fail() -> None:
        raise ValueError

    failed, done = asyncio.create_task(fail()), asyncio.create_task(asyncio.sleep(0, "x"))
    await asyncio.wait({failed, done})
    await end_tasks(failed, done)
    await end_tasks()
    assert "x" == done.result()
    assert isinstance(failed.exception(), ValueError)


async def test_what_takes_too_long_is_ended() -> None:
    """Also where it forgets its cancel."""
    with pytest.raises(TimeoutError):
        await within(0.01, forgetful(1))


async def test_what_is_in_time_is_returned() -> None:
    """Its result, or its error."""

    async def fail() -> None:
        raise ValueError("mine")

    assert 3 == await within(None, asyncio.sleep(0, 3))
    with pytest.raises(ValueError, match="mine"):
        await within(5, fail())


async def test_who_is_cancelled_ends_what_it_waits_for() -> None:
    """Nothing is left running."""
    inner: list[asyncio.Task[None]] = []

    async def work() -> None:
        current = asyncio.current_task()
        assert current is not None
        inner.append(current)
        await asyncio.Event().wait()

    outer = asyncio.create_task(within(None, work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await end_tasks(outer)
    assert outer.cancelled()
    assert inner[0].cancelled()
