"""`llmq why`: why a job, a batch or a line of it does not run, in sentences."""

from __future__ import annotations

from typing import Annotated

import typer

from llmq.cli.options import Json, Queue, RedisUrl
from llmq.cli.render import print_json, print_line
from llmq.cli.running import run_async
from llmq.cli.session import load, open_session
from llmq.scheduler.why import Explanation, explain
from llmq.scheduler.why_line import read_why_line
from llmq.scheduler.why_reader import read_why


def why(
    name: Annotated[str, typer.Argument(metavar="ID", help="The id of a job or a batch; BATCH:17 is a line of it.")],
    line: Annotated[
        str | None, typer.Argument(metavar="LINE", help="A line of the batch: its number, or its custom_id.")
    ] = None,
    queue: Queue = None,
    redis: RedisUrl = None,
    json: Json = False,
) -> None:
    """Say why a job, batch or line does not run.

    What holds it back now is marked with an asterisk, each with what to type about it.

    \b
    Examples:
      llmq why batch_01h8xk2c5m
      llmq why batch_01h8xk2c5m 17
      llmq why 0f8c2a9be1d64c1f --json
    """
    settings = load(queue=queue, redis_url=redis).settings

    async def work() -> Explanation:
        async with open_session(settings) as session:
            batch, colon, after = name.partition(":")
            if line is not None or colon:
                return explain(await read_why_line(session.queue, batch, line if line is not None else after))
            return explain(await read_why(session.queue, name))

    found = run_async(work)
    if json:
        print_json(found.to_json())
        return
    print_line(f"{found.kind} {found.id}: {found.state}")
    for reason in found.reasons:
        print_line(f"{'*' if reason.blocks else ' '} {reason.text}")
