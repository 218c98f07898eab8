"""Open files: a server takes what the system allows, and refuses clients before it has none left for itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
from llmq.cli.gateway import _connections
print(_connections({wanted}), resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("wanted", "soft", "hard", "connections", "files"),
    [
        (2000, 1024, 4096, 2000, 2256),
        (2000, 3000, 4096, 2000, 3000),
        (10_000, 1024, 4096, 3840, 4096),
        (10_000, 200, 200, 1, 200),
    ],
)
def test_a_gateway_takes_what_the_system_allows(
    wanted: int, soft: int, hard: int, connections: int, files: int
) -> None:
    """And says so where that is less than it was told to serve."""
    command = [sys.executable, "-c", PROGRAM.format(wanted=wanted, soft=soft, hard=hard)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert f"{connections} ({files}, {hard})" == ended.stdout.strip()
    assert (connections < wanted) == ("LLMQ_MAX_CONNECTIONS" in ended.stderr)
