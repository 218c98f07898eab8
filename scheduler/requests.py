"""What a caller asks for, checked before anything is sent: a body, the endpoint that it is for, and its class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmq.scheduler.errors import UsageError
from llmq.scheduler.job import ENDPOINTS, Job, TrafficClass


def checked_request(body: Mapping[str, Any], url: str, cls: TrafficClass | str) -> tuple[Job, TrafficClass]:
    """Return the job and its class. Raises UsageError that says what was expected."""
    traffic = _traffic_class(cls)
    if not isinstance(body, Mapping):
        raise UsageError(f"expected the body as an object, got a {type(body).__name__}")
    if url not in ENDPOINTS:
        raise UsageError(f"expected one of the endpoints {', '.join(ENDPOINTS)}, got {url!r}")
    return Job(url, dict(body)), traffic


def _traffic_class(cls: TrafficClass | str) -> TrafficClass:
    try:
        return TrafficClass(cls)
    except ValueError:
        raise UsageError(f"expected the class interactive or batch, got {cls!r}") from None
