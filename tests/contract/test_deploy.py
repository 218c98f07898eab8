"""compose.yaml and the image: a queue that keeps its jobs, open to this machine only, and a worker without rights."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from tests.contract.documents import fault_of
from tests.contract.project import CACHES, ROOT, build, names_in

DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")

#: The drain grace of a worker, in seconds (--grace).
GRACE = 30


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """The services of compose.yaml."""
    services: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))["services"]
    return services


def test_valkey_keeps_what_it_acknowledged(services: dict[str, Any]) -> None:
    """An append-only file on a volume, and no eviction (G1, F-094)."""
    command = services["valkey"]["command"]
    assert "--appendonly yes" in command
    assert "--maxmemory-policy noeviction" in command
    assert any(volume.endswith(":/data") for volume in services["valkey"]["volumes"])


def test_no_port_is_open_to_other_machines(services: dict[str, Any]) -> None:
    """Valkey has no password here: what is published is published on loopback."""
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_the_worker_starts_when_valkey_answers_and_may_drain(services: dict[str, Any]) -> None:
    """It waits for the health check, and is given longer to stop than its grace (G6)."""
    assert services["valkey"]["healthcheck"]["test"]
    assert {"valkey": {"condition": "service_healthy"}} == services["worker"]["depends_on"]
    assert int(services["worker"]["stop_grace_period"].removesuffix("s")) > GRACE


def test_the_worker_command_exists(services: dict[str, Any]) -> None:
    """What the container runs, and how it is probed, are command lines that llmq understands."""
    from llmq.cli.commands import app

    worker = services["worker"]
    probe = worker["healthcheck"]["test"][1]
    for line in (" ".join(["llmq", *worker["command"]]), probe):
        assert None is fault_of(line.replace("$", ""), typer.main.get_command(app))
    assert probe.startswith("llmq health --worker")
    assert "redis://valkey:6379/0" == services["worker"]["environment"]["LLMQ_REDIS_URL"]


def test_the_gateway_command_exists(services: dict[str, Any]) -> None:
    """It keeps its files on a volume that its user may write to, and is given longer to stop than its grace."""
    from llmq.cli.commands import app

    gateway = services["gateway"]
    assert None is fault_of(" ".join(["llmq", *gateway["command"]]), typer.main.get_command(app))
    assert f"files:{gateway['environment']['LLMQ_GATEWAY_FILES']}" in gateway["volumes"]
    assert f"install -d -o 10001 -g 10001 {gateway['environment']['LLMQ_GATEWAY_FILES']}" in DOCKERFILE
    assert int(gateway["stop_grace_period"].removesuffix("s")) > GRACE
    assert "[gateway" in DOCKERFILE


def test_the_example_engine_is_started_only_when_asked_for(services: dict[str, Any]) -> None:
    """It wants a GPU; whoever has an engine already does not get another one."""
    assert ["engine"] == services["engine"]["profiles"]
    assert "ports" not in services["engine"]


def test_the_image_has_no_rights_and_no_tools() -> None:
    """It is built in one stage and run in another, by a user that is not root."""
    assert 2 == len(re.findall(r"^FROM python:3\.12-slim", DOCKERFILE, re.M))
    (user,) = re.findall(r"^USER (\d+):\d+$", DOCKERFILE, re.M)
    assert int(user) > 0
    assert 'ENTRYPOINT ["llmq"]' in DOCKERFILE


def test_what_the_image_copies_is_the_whole_product(tmp_path: Path) -> None:
    """A wheel built from nothing but the copied files is the wheel of the tree."""
    for words in re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.M):
        *sources, target = words.split()
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / "image" / target, ignore=shutil.ignore_patterns(*CACHES))
            else:
                place = tmp_path / "image" / target / Path(source).name
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / source, place)
    copied = names_in(build("wheel", tmp_path / "copied", tmp_path / "image"))
    assert names_in(build("wheel", tmp_path / "tree")) == copied
