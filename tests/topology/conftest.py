"""Fixtures for the tests that run on several servers, and on servers that are hard to get along with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.servers import Servers, process_kinds
from tests.topologies import ClusterSet, SentinelSet

#: Starts a set that the test may break: `own_set("sentinel")`, `own_set("cluster", "--appendonly", "yes")`.
OwnSet = Callable[..., SentinelSet | ClusterSet]

#: The project.
ROOT = Path(__file__).parents[2]

SETS: dict[str, type[SentinelSet] | type[ClusterSet]] = {"sentinel": SentinelSet, "cluster": ClusterSet}

#: The oldest server that is supported, where it is installed; else the embedded one.
OLDEST = "redis" if "redis" in process_kinds() else "valkey"


#: The embedded server has no TLS.
collect_ignore = [] if "redis" in process_kinds() else ["test_tls.py"]


@pytest.fixture
def own_set(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnSet]:
    """Start sets of servers; they end with the test."""
    servers = Servers(tmp_path_factory.mktemp("sets"))

    def start(name: str, *options: str, kind: str = OLDEST) -> SentinelSet | ClusterSet:
        return SETS[name](servers, kind, options or ("--appendonly", "no"))

    yield start
    servers.close()
