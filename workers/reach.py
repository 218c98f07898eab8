"""Reach: which errors mean that Redis did not do what it was asked, and may do it later.

A worker rides all of them out: it keeps what it holds and asks again. Any other error is a fault of llmq's own and ends
the process.
"""

from __future__ import annotations

from llmq.scheduler.outage import REDIS_ERRORS

OUT_OF_REACH: tuple[type[Exception], ...] = (*REDIS_ERRORS, OSError)
