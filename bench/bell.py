"""The other end of a bare bell: `python -m bench.bell URL KEY` pops what is pushed, and prints how long it took.

It prints a second time: with one more trip to Redis, since whoever hears a bell has to ask what it rang for.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from llmq.cli.running import run_async
from llmq.scheduler.connection import connect


async def listen(url: str, key: str) -> None:
    """Listen until killed, on a connection like that of a worker's ear."""
    redis: Any = connect(url, blocking_s=2)
    other: Any = connect(url)
    while True:
        if (rung := await redis.blpop([key], timeout=1)) is not None:
            heard = time.monotonic()
            await other.ping()
            print(heard - float(rung[1]), time.monotonic() - float(rung[1]), flush=True)


if __name__ == "__main__":
    run_async(lambda: listen(*sys.argv[1:]))
