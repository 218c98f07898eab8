"""What a command leaves behind when its asynchronous part has ended."""

from __future__ import annotations

import gc
import signal

import pytest

from llmq.cli.errors import Interrupted
from llmq.cli.running import SIGNALS, run_async, settle_memory


async def _end() -> None:
    pass


async def _interrupt() -> None:
    raise Interrupted


def test_signals_mean_afterwards_what_they_meant_before() -> None:
    """Ctrl-C leaves a question that is asked between two trips to Redis: `llmq batch cancel` (G14)."""
    before = [signal.getsignal(number) for number in SIGNALS]
    run_async(_end)
    assert before == [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(Interrupted):
        run_async(_interrupt)
    assert before == [signal.getsignal(number) for number in SIGNALS]


def test_what_is_in_memory_when_a_server_begins_is_not_gone_through_again_and_again() -> None:
    """Only while it serves: what the process leaves behind afterwards is collected as ever."""

    async def serve() -> int:
        settle_memory()
        return gc.get_freeze_count()

    assert run_async(serve) > 1000
    assert 0 == gc.get_freeze_count()
