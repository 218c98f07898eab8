"""A gateway's admission in a process of its own, which asks as fast as it can until it is told to stop, or killed.

    python -m tests.gateway.key_hammer URL KEY REQUESTS CONCURRENCY SECONDS

It prints a line when it begins, holds every place that it gets for some milliseconds, and ends with the number of calls
that were let in. With CONCURRENCY 0 there is no such limit; with SECONDS 0 it takes all places it can, says so, and
waits to be killed.
"""

from __future__ import annotations

import asyncio
import sys
import time

from llmq.gateway.admission import Caller
from llmq.gateway.contact import Contact
from llmq.gateway.errors import ApiError
from llmq.gateway.keyed_admission import KeyedAdmission
from llmq.scheduler.api_key import KeyLimits
from llmq.scheduler.connection import connect
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.queue import Queue


async def main(url: str, key_id: str, requests: int, concurrency: int, seconds: float) -> None:
    """Hammer one key."""
    redis = connect(url)
    admission = KeyedAdmission(Queue(redis, "q"), Contact())
    caller = Caller("anna", key_id, limits=KeyLimits(requests or None, None, concurrency or None))
    print("begun", flush=True)
    if not seconds:
        await take_all(admission, caller)
    ends, entered = time.monotonic() + seconds, 0

    async def ask() -> None:
        nonlocal entered
        while time.monotonic() < ends:
            try:
                inside = await admission.enter(caller, TrafficClass.INTERACTIVE, 1)
            except ApiError:
                await asyncio.sleep(0.001)
                continue
            entered += 1
            await asyncio.sleep(0.002)
            await inside.leave(None)

    await asyncio.gather(*(ask() for _ in range(4)))
    await redis.aclose()
    print(entered, flush=True)


async def take_all(admission: KeyedAdmission, caller: Caller) -> None:
    """Take every place there is, and keep it."""
    held = []
    while True:
        try:
            held.append(await admission.enter(caller, TrafficClass.INTERACTIVE, 1))
        except ApiError:
            print(f"holds {len(held)}", flush=True)
            await admission.run()


if __name__ == "__main__":
    url, key_id, *numbers = sys.argv[1:]
    asyncio.run(main(url, key_id, int(numbers[0]), int(numbers[1]), float(numbers[2])))
