"""llmq: chat and batch LLM work on the same GPUs, queued on Redis Streams.

    from llmq import Client

    with Client() as llmq:
        print(llmq.submit({"messages": [{"role": "user", "content": "hello"}]}).result().text)

These are the public names; `AsyncClient` is the same for asyncio. Modules below this one may change in any version.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmq.scheduler.batch_handle import AsyncBatchHandle
    from llmq.scheduler.batch_record import BatchRecord
    from llmq.scheduler.blocking import BatchHandle, Client, JobHandle
    from llmq.scheduler.client import AsyncClient
    from llmq.scheduler.deltas import DeltaView
    from llmq.scheduler.errors import (
        EncodingError,
        EngineUnavailable,
        InputFileError,
        JobCancelled,
        JobEnded,
        JobExpired,
        JobFailed,
        JobInterrupted,
        JobLost,
        LLMQError,
        NotFoundError,
        QueueFull,
        RedisFull,
        RedisUnavailable,
        SettingsError,
        UsageError,
    )
    from llmq.scheduler.handles import AsyncJobHandle
    from llmq.scheduler.job import TrafficClass
    from llmq.scheduler.job_record import JobRecord
    from llmq.scheduler.lease import Usage
    from llmq.scheduler.queue import CancelResult
    from llmq.scheduler.result import LineResult, Result
    from llmq.scheduler.state import JobState

    __version__: str

__all__ = [
    "AsyncBatchHandle",
    "AsyncClient",
    "AsyncJobHandle",
    "BatchHandle",
    "BatchRecord",
    "CancelResult",
    "Client",
    "DeltaView",
    "EncodingError",
    "EngineUnavailable",
    "InputFileError",
    "JobCancelled",
    "JobEnded",
    "JobExpired",
    "JobFailed",
    "JobHandle",
    "JobInterrupted",
    "JobLost",
    "JobRecord",
    "JobState",
    "LLMQError",
    "LineResult",
    "NotFoundError",
    "QueueFull",
    "RedisFull",
    "RedisUnavailable",
    "Result",
    "SettingsError",
    "TrafficClass",
    "Usage",
    "UsageError",
    "__version__",
]

#: Where each name is. They are loaded when they are used: `llmq --help` needs no Redis client.
_MODULES = {
    "AsyncBatchHandle": "batch_handle",
    "AsyncClient": "client",
    "AsyncJobHandle": "handles",
    "BatchHandle": "blocking",
    "BatchRecord": "batch_record",
    "CancelResult": "queue",
    "Client": "blocking",
    "DeltaView": "deltas",
    "JobHandle": "blocking",
    "JobRecord": "job_record",
    "JobState": "state",
    "LineResult": "result",
    "Result": "result",
    "TrafficClass": "job",
    "Usage": "lease",
}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("llmq-streams")
    if name in __all__:
        return getattr(import_module(f"llmq.scheduler.{_MODULES.get(name, 'errors')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
