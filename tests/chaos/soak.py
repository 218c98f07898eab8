"""The soak: very many jobs through random restarts, and afterwards all is as it was.

    python -m tests.chaos.soak --jobs 200000

Batches are submitted, run, collected by nobody and deleted, with a little chat beside, while workers, Redis and
connections are killed. One worker is never killed: a leak needs somebody to be in. What Redis, that worker and the
client use is measured after the first batch and after the last one; `TOLERANCES` says what may differ, and why.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llmq import AsyncClient, JobEnded, JobInterrupted, NotFoundError, RedisUnavailable
from llmq.scheduler.batches import Batches
from llmq.scheduler.connection import redis_errors
from llmq.scheduler.lines import check, read_lines
from llmq.scheduler.prompts import open_prompts
from tests.chaos import cast as company
from tests.chaos.cast import Cast
from tests.chaos.faults import FAULTS
from tests.chaos.plan import plan
from tests.redis.serving import until

#: What happens during a soak; nothing that loses jobs, for each is counted.
KINDS = ("kill", "drain", "kill-redis", "kill-clients", "forget-scripts", "cut")

PLACES = 3

#: The one that lives from the first job to the last.
SURVIVOR = 0

#: One chat for so many lines.
LINES_A_CHAT = 200

#: Answers at once: what is soaked is the queue.
ENGINE = "sim://?instant=1"

#: Of the plan's faults one in so many happens: jobs must get through as well, very many of them.
ONE_IN = 6

#: Longer than any soak.
PLAN_S = 6 * 3600.0

#: Before measuring: connections that were cut are made again, pools are at rest.
CALM_S = 3.0

#: Keys of single jobs, batches and lanes: none may be left once all is deleted.
OF_JOBS = re.compile(r"llmq:\{default\}:(job:|b:|lane|tries|starts|order|ready|asleep|ending|counts|held)")


@dataclass(frozen=True, slots=True)
class Standing:
    """What is in use at a moment: keys of jobs, bytes, connections, open files."""

    job_keys: int
    redis_bytes: int
    redis_clients: int
    worker_bytes: int
    worker_files: int
    client_bytes: int
    client_files: int


#: What may be in use more than at the beginning, and why.
TOLERANCES = Standing(
    job_keys=0,
    redis_bytes=2 * 2**20,  # buffers of connections, heartbeats of the killed until their TTL, the allocator's tables
    redis_clients=8,  # a pool keeps the connections that its busiest moment needed
    worker_bytes=24
    * 2**20,  # Python keeps the arenas of its busiest moment: at 200,000 jobs, 1 KiB a job would be 65 MiB
    worker_files=8,  # connections, as above
    client_bytes=32 * 2**20,  # the file of the largest batch, and as above
    client_files=32,  # connections, as above, of several clients; the pipes of processes that are being started
)


@dataclass(frozen=True, slots=True)
class Soaked:
    """What a soak came to."""

    jobs: int
    seconds: float
    faults: int
    wrong: list[str]
    before: Standing
    after: Standing

    @property
    def faulty(self) -> list[str]:
        """Return what is not as it was, and jobs that did not end well."""
        before, after, allowed = asdict(self.before), asdict(self.after), asdict(TOLERANCES)
        more = [
            f"{name} grew from {before[name]:,} to {after[name]:,}, allowed are {allowed[name]:,} more"
            for name in before
            if after[name] > before[name] + allowed[name]
        ]
        return [*self.wrong, *more]


async def soak(folder: Path, jobs: int, *, batch: int = 10_000, seed: int = 1) -> Soaked:
    """Run so many jobs, in batches of `batch`, and say what is left of them."""
    began = time.monotonic()
    async with company.cast(folder, seed, places=PLACES, simulated=ENGINE) as cast, AsyncClient(cast.url) as client:
        owner = Owner(cast, client, _file(folder, batch))
        await owner.batch("first", batch)
        before = await _standing(cast, owner)
        over = asyncio.Event()
        suffering = asyncio.create_task(_suffer(cast, seed, over))
        for left in range(jobs - batch, 0, -batch):
            await owner.batch(f"at-{left}", batch)
        over.set()
        await suffering
        await cast.all_up()
        after = await _standing(cast, owner)
        faults = cast.suffered
    return Soaked(jobs, time.monotonic() - began, faults, owner.wrong, before, after)


class Owner:
    """Whose jobs they are: submits, waits, deletes; `wrong` is what did not end well."""

    def __init__(self, cast: Cast, client: AsyncClient, file: Path) -> None:
        self.wrong: list[str] = []
        self._url = cast.url
        self._client = client
        self._file = file

    async def batch(self, name: str, lines: int) -> None:
        """See one batch through, with chat beside, and delete all of it."""
        chats = [asyncio.create_task(self._chat(f"{name}-{n}")) for n in range(max(1, lines // LINES_A_CHAT))]
        batches = Batches(await self._client.queue())
        with await asyncio.to_thread(open_prompts, self._file, max_line_bytes=2**20) as file:
            checked = await asyncio.to_thread(check, file)
            await self._insist(lambda: batches.open(name=name, digest=file.digest, batch_id=name))
            await self._insist(lambda: batches.feed(name, read_lines(file, checked)))
        record = await self._insist(lambda: batches.wait(name))
        if (record.completed, record.failed) != (lines, 0):
            self.wrong.append(f"{name}: {record.completed} completed and {record.failed} failed of {lines}")
        await asyncio.gather(*chats)
        await self._insist(lambda: batches.delete(name))
        print(f"{name} is over and deleted", file=sys.stderr, flush=True)

    async def keys(self) -> list[str]:
        """Return all keys of jobs that are in Redis."""
        redis = (await self._client.queue()).redis
        names = [name.decode() async for name in redis.scan_iter(count=1000)]
        return [name for name in names if OF_JOBS.match(name)]

    async def _chat(self, name: str) -> None:
        await asyncio.sleep(random.random())
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        job = await self._insist(lambda: self._client.submit(body, timeout=0, key=name))
        try:
            await job.result()
        except JobInterrupted:
            pass  # its worker was killed after its first word (G18)
        except JobEnded as error:
            self.wrong.append(f"chat {name}: {error}")
        queue = await self._client.queue()
        await self._insist(lambda: queue.delete_job(job.id))

    async def _insist(self, action: Callable[[], Awaitable[Any]]) -> Any:
        """Do it as soon as Redis can be reached; what is done already (its reply was lost) is done."""
        while True:
            try:
                with redis_errors(self._url):
                    return await action()
            except RedisUnavailable:
                await asyncio.sleep(0.2)
            except NotFoundError:
                return None


async def _suffer(cast: Cast, seed: int, over: asyncio.Event) -> None:
    """Let the plan take its course until it is over; the survivor is spared."""
    loop = asyncio.get_running_loop()
    begins = loop.time()
    for planned in plan(seed, PLAN_S, {name: FAULTS[name] for name in KINDS}, PLACES)[::ONE_IN]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, begins + planned.at - loop.time())):
                await over.wait()
        if over.is_set():
            return
        if (FAULTS[planned.fault].hits, planned.place) != ("worker", SURVIVOR):
            await cast.suffer(planned)


async def _standing(cast: Cast, owner: Owner) -> Standing:
    """Measure, when the heartbeats, bells and connections of what is over have had their time."""

    async def drained() -> bool:
        return not await owner.keys()

    with contextlib.suppress(TimeoutError):
        await until(drained, within=30)
    await asyncio.sleep(CALM_S)
    survivor = cast.places[SURVIVOR].worker
    assert survivor is not None
    info = cast.operate(lambda redis: {**redis.info("memory"), **redis.info("clients")})
    return Standing(
        job_keys=len(await owner.keys()),
        redis_bytes=info["used_memory"],
        redis_clients=info["connected_clients"],
        worker_bytes=_resident(survivor.pid),
        worker_files=_files(survivor.pid),
        client_bytes=_resident(os.getpid()),
        client_files=_files(os.getpid()),
    )


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _file(folder: Path, lines: int) -> Path:
    path = folder / "lines.jsonl"
    path.write_text("".join(f'{{"prompt": "line {number}", "max_tokens": 2}}\n' for number in range(lines)))
    return path


def main() -> int:
    """Do what the command line says; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.soak", description="many jobs; nothing may be left")
    parser.add_argument("--jobs", type=int, default=200_000)
    parser.add_argument("--batch", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soaked = asyncio.run(soak(Path(folder), given.jobs, batch=given.batch, seed=given.seed))
    print(f"{soaked.jobs:,} jobs in {soaked.seconds:.0f} s, through {soaked.faults} faults")
    for name, before in asdict(soaked.before).items():
        print(f"{name:14} {before:>13,} -> {asdict(soaked.after)[name]:>13,}")
    for fault in soaked.faulty:
        print(fault)
    return 1 if soaked.faulty else 0


if __name__ == "__main__":
    sys.exit(main())
