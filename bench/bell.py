"""A bare bell loop, to compare with: all that any queue on Redis with a bell has to do, and no more.

`submit` adds a job to a stream and rings, in one trip. `python -m bench.bell URL`, in a process of its own, hears the
bell, claims with one XREADGROUP, and prints how long both took since the submit began: to the bell, and to the job.
There is no policy, no result, no fence; what was claimed is acknowledged and deleted when nobody measures.
"""

from __future__ import annotations

import sys
import time
from typing import Any

from redis.exceptions import ResponseError

from bench.jobs import ENDPOINT, body
from llmq.cli.running import run_async
from llmq.scheduler.connection import connect
from llmq.scheduler.job import Job

BELL = "bare:bell"
STREAM = "bare:jobs"
GROUP = "workers"

DATA = Job(ENDPOINT, body()).encode()


async def submit(redis: Any) -> None:
    """Queue one job and ring; the bell says when this was."""
    sent = time.monotonic()
    pipe = redis.pipeline(transaction=False)
    pipe.xadd(STREAM, {"d": DATA})
    pipe.lpush(BELL, sent)
    await pipe.execute()


async def listen(url: str) -> None:
    """Listen until killed, with the connections of a worker: one for its ear, one to claim with."""
    ear: Any = connect(url, blocking_s=2)
    redis: Any = connect(url)
    try:
        await redis.xgroup_create(STREAM, GROUP, "0", mkstream=True)
    except ResponseError:
        pass  # a job was quicker
    while True:
        if (rung := await ear.blpop([BELL], timeout=1)) is None:
            continue
        heard, sent = time.monotonic(), float(rung[1])
        ((_, ((entry, _),)),) = await redis.xreadgroup(GROUP, "one", {STREAM: ">"}, count=1)
        print(heard - sent, time.monotonic() - sent, flush=True)
        await redis.xack(STREAM, GROUP, entry)
        await redis.xdel(STREAM, entry)


if __name__ == "__main__":
    run_async(lambda: listen(*sys.argv[1:]))
