"""Retrying: the failed lines of a batch that has ended, as the lines of a new one.

A failed result keeps the encoded job (`d`), so the file is not needed. The new batch's id follows from the old one's:
a retry that was interrupted is continued by the same command, and no line is ever retried by two batches.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable

from llmq.scheduler.batch_record import BatchRecord
from llmq.scheduler.errors import EncodingError, UsageError
from llmq.scheduler.job import Job
from llmq.scheduler.records import ResultRecord
from llmq.scheduler.scripts import SubmitLine


def retry_id(batch_id: str) -> str:
    """Return the id of the batch that retries a batch: `-r1`, `-r2`, ... behind the first one's id."""
    first, mark, count = batch_id.rpartition("-r")
    return f"{first}-r{int(count) + 1}" if mark and count.isdecimal() else f"{batch_id}-r1"


async def failed_lines(
    results: AsyncIterable[tuple[str, ResultRecord]], first: int = 1
) -> AsyncGenerator[SubmitLine, None]:
    """Iterate over the failed lines that can be queued again, numbered anew from 1; those from `first` on."""
    number = 0
    async for _, result in results:
        if result.ok or not result.data:  # a bad line of the file has no job: it fails again, whatever is done
            continue
        number += 1
        if number >= first:
            yield SubmitLine(number, result.key, result.data, cost_of(result.data))


def nothing_to_retry(old: BatchRecord) -> UsageError:
    """Return the error for a batch without lines that can be queued again."""
    if not old.failed:
        return UsageError(f"batch {old.id} has no failed lines: there is nothing to retry")
    return UsageError(
        f"batch {old.id} has nothing to retry: its {old.failed:,} failed lines are bad lines of the file; "
        "correct them, and submit them as a new batch"
    )


def cost_of(data: bytes) -> int:
    """Return what a stored job costs in LLM tokens, as estimated."""
    try:
        return Job.decode(data).cost()
    except EncodingError:  # a malformed job fails again, whatever it costs
        return 1
