"""The gateway against its own description: schemathesis makes requests of it, good and bad, and judges the answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.generation import GenerationMode

from llmq.gateway.batch.description import describe_batches
from llmq.gateway.openapi import describe
from tests.servers import Servers, client_of
from tests.system.cli_process import started

#: Every operation, and with requests that break the description where one can: a GET without parameters has none.
CASES = [
    (method.upper(), path, mode)
    for path, item in describe(describe_batches())["paths"].items()
    for method in item
    for mode in (GenerationMode if "requestBody" in item[method] else [GenerationMode.POSITIVE])
]


@pytest.fixture(scope="module")
def described(servers: Servers) -> Iterator[Any]:
    """The description of a gateway with a simulated GPU behind it."""
    url = servers.shared("valkey").url
    with client_of(url) as client:
        client.flushall()  # else keys and settings of the test before would hold here
    with (
        started("worker", "--engine", "sim://?instant=1", url=url) as worker,
        started("gateway", "--port", 0, url=url) as process,
    ):
        worker.until("ready ")
        base = process.until("/v1\n").split()[-1].removesuffix("/v1")
        yield schemathesis.openapi.from_url(f"{base}/openapi.json")


@pytest.mark.parametrize(("method", "path", "mode"), CASES)
def test_every_answer_is_as_described(described: Any, method: str, path: str, mode: GenerationMode) -> None:
    """No request that it can think of makes a server error, or an answer of another shape or status."""

    @settings(max_examples=8, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=described[path][method].as_strategy(generation_mode=mode))
    def judge(case: Any) -> None:
        case.call_and_validate(timeout=30)

    judge()
