"""The systemd units: they start commands that exist, drain before they kill, and give the processes no rights."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import typer.main

from llmq.scheduler.settings import Settings, load_settings
from llmq.workers.engines import engine_process
from llmq.workers.worker import LAST_SECONDS_S
from tests.contract.documents import fault_of
from tests.contract.project import ROOT

DEPLOY = ROOT / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
NAMES = [unit.name for unit in UNITS]

#: What may stand in a unit more than once.
REPEATED = {"EnvironmentFile"}

#: What each service goes without.
HARDENED = {
    "DynamicUser": "yes", "NoNewPrivileges": "yes", "ProtectSystem": "strict", "PrivateTmp": "yes",
    "CapabilityBoundingSet": "", "RestrictSUIDSGID": "yes", "RestrictNamespaces": "yes", "LockPersonality": "yes",
    "ProtectKernelModules": "yes", "ProtectKernelTunables": "yes", "ProtectControlGroups": "yes",
    "SystemCallFilter": "@system-service", "SystemCallArchitectures": "native", "UMask": "0077",
}  # fmt: skip

Unit = dict[str, dict[str, list[str]]]


def read(path: Path) -> Unit:
    """Read a unit strictly: every line is a comment, a section or an assignment."""
    sections: Unit = {}
    section: dict[str, list[str]] | None = None
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        if found := re.fullmatch(r"\[(Unit|Service|Install)\]", line):
            assert found[1] not in sections, f"{path.name}:{number}: section {found[1]} comes twice"
            section = sections[found[1]] = defaultdict(list)
            continue
        found = re.fullmatch(r"([A-Z][A-Za-z]+)=(.*\S)?", line)
        assert found is not None, f"{path.name}:{number}: {line}"
        assert section is not None, f"{path.name}:{number} stands in no section"
        section[found[1]].append(found[2] or "")
    for name, values in ((name, values) for section in sections.values() for name, values in section.items()):
        assert len(values) == 1 or name in REPEATED, f"{path.name}: {name} comes twice"
    return sections


def service(name: str) -> dict[str, str]:
    """Return what a unit says of its service; of what stands there more than once, the last."""
    return {key: values[-1] for key, values in read(DEPLOY / name)["Service"].items()}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_unit_starts_is_a_command_of_llmq(name: str) -> None:
    """With options that it has. A unit of a command that comes later is held to it when it is there."""
    from llmq.cli.commands import app

    program, *words = shlex.split(service(name)["ExecStart"].replace("%i", "0"))
    root = typer.main.get_command(app)
    assert "/opt/llmq/bin/llmq" == program
    assert words[0] in name
    if words[0] in root.commands:  # type: ignore[attr-defined]
        assert None is fault_of(shlex.join(["llmq", *words]), root)


@pytest.mark.parametrize("name", NAMES)
def test_a_service_drains_before_it_is_killed(name: str) -> None:
    """G6: SIGTERM goes to llmq alone, which has its whole grace; then an engine that it started has its own."""
    said, grace = service(name), Settings().grace
    assert ("SIGTERM", "mixed") == (said["KillSignal"], said["KillMode"])
    engine = engine_process.GRACE_S + engine_process.LAST_SECONDS_S if "worker" in name else 0.0
    assert float(said["TimeoutStopSec"]) > grace + LAST_SECONDS_S + engine


@pytest.mark.parametrize("name", NAMES)
def test_a_service_is_tried_for_ever_but_not_with_wrong_settings(name: str) -> None:
    """Redis may be away at boot (exit code 4); bad usage is exit code 2, and stays bad."""
    said = service(name)
    assert ("always", "2") == (said["Restart"], said["RestartPreventExitStatus"])
    assert ["0"] == read(DEPLOY / name)["Unit"]["StartLimitIntervalSec"]


@pytest.mark.parametrize("name", NAMES)
def test_a_service_has_no_rights(name: str) -> None:
    """It needs none: sockets, and a folder of its own."""
    said = service(name)
    assert HARDENED == {key: said.get(key) for key in HARDENED}


@pytest.mark.parametrize("name", NAMES)
def test_a_service_takes_its_settings_from_files(name: str) -> None:
    """No secret stands in a unit, which everybody may read; the example holds settings that llmq knows."""
    unit = read(DEPLOY / name)["Service"]
    assert "/etc/llmq/llmq.env" == unit["EnvironmentFile"][0]
    assert all(path.startswith("-") for path in unit["EnvironmentFile"][1:])
    lines = re.findall(r"^(?:# )?(LLMQ_[A-Z_]+)=(.*)$", (DEPLOY / "llmq.env").read_text(encoding="utf-8"), re.M)
    load_settings({}, dict(lines))
    given = dict(word.split("=") for word in unit["Environment"][0].split())
    assert {"LLMQ_HOME", "LLMQ_LOG_LEVEL"} == given.keys()
    load_settings({}, given)


def test_systemd_finds_nothing_wrong(tmp_path: Path) -> None:
    """Its own check, where its tools are at hand: unknown settings and wrong values are errors."""
    analyze = shutil.which("systemd-analyze")
    for unit in UNITS if analyze else ():
        text = unit.read_text(encoding="utf-8").replace("/opt/llmq/bin/llmq", sys.executable)
        (tmp_path / unit.name).write_text(text)
        place = tmp_path / unit.name.replace("@.", "@0.")
        if place.name != unit.name:
            place.symlink_to(unit.name)
        done = subprocess.run(
            [str(analyze), "verify", "--man=no", "--recursive-errors=no", str(place)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (0, "") == (done.returncode, done.stderr)
