"""A process that feeds or collects a batch, for tests that kill it.

    python feeding_and_collecting.py feed URL BATCH FILE [--words N]
    python feeding_and_collecting.py collect URL BATCH OUT [--die STEP:before|after:N]

It prints a line after each chunk, or each page, and `done` at the end. `--die` kills this very process, as the
out-of-memory killer would, before or after it does a step for the N-th time; `--words` in the moments after it has
printed its N-th line. A test that reads the lines would come too late with its kill where this process is quicker.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import signal
from collections.abc import Callable
from typing import Any

from llmq.scheduler import collecting
from llmq.scheduler.batches import Batches
from llmq.scheduler.collecting import collect_to_file
from llmq.scheduler.connection import connect
from llmq.scheduler.lines import check, open_input, read_lines
from llmq.scheduler.output import open_output
from llmq.scheduler.queue import Queue

#: The steps that may be the last one: lines, their sync (and the sidecar's), the sidecar, Redis.
STEPS: dict[str, tuple[Any, str]] = {
    "write": (os, "pwrite"),
    "fsync": (os, "fsync"),
    "rename": (os, "replace"),
    "tell": (Batches, "collected"),
}

#: Numbers the lines that are printed; and the line after which this process dies (0: none).
said = itertools.count(1)
last_word = 0


async def feed(batches: Batches, batch_id: str, path: str) -> None:
    """Feed a file from where the batch stands."""
    with open_input(path) as file:
        checked = check(file)
        record = await batches.reopen(batch_id, file.digest)
        lines = read_lines(file, checked, after=record.next_line - 1)
        await batches.feed(batch_id, lines, on_progress=lambda progress: say(str(progress.next_line)))


async def collect(batches: Batches, batch_id: str, path: str) -> None:
    """Collect until the batch has ended, syncing as often as there is something."""
    collecting.SYNC_S, collecting.SYNC_LINES = 0.0, 1
    with open_output(path, batch_id) as out:
        await collect_to_file(batches, batch_id, out, on_progress=lambda record: say(str(record.done)))


def say(word: str) -> None:
    """Print at once: the test waits for it."""
    print(word, flush=True)
    if next(said) == last_word:  # what comes next is on its way then
        asyncio.get_running_loop().call_later(random.uniform(0.0, 0.002), os.kill, os.getpid(), signal.SIGKILL)


def die_at(step: str, when: str, count: int) -> None:
    """Let this process be killed at a step."""
    owner, name = STEPS[step]
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def dying(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        done = original(*args, **options)
        if calls == count and not asyncio.iscoroutine(done):
            os.kill(os.getpid(), signal.SIGKILL)
        return _then_die(done) if calls == count else done

    setattr(owner, name, dying)


async def _then_die(done: Any) -> None:
    await done
    os.kill(os.getpid(), signal.SIGKILL)


async def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=["feed", "collect"])
    parser.add_argument("url")
    parser.add_argument("batch_id")
    parser.add_argument("path")
    parser.add_argument("--die", default="")
    parser.add_argument("--words", type=int, default=0)
    given = parser.parse_args()
    global last_word
    last_word = given.words
    if given.die:
        step, when, count = given.die.split(":")
        die_at(step, when, int(count))
    redis = connect(given.url)
    act = feed if given.action == "feed" else collect
    await act(Batches(Queue(redis)), given.batch_id, given.path)
    await redis.aclose()
    say("done")


if __name__ == "__main__":
    asyncio.run(main())
