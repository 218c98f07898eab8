"""The lock file: what an audit looks at, and what pyproject.toml asks for, are the same."""

from __future__ import annotations

import re
import tomllib

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.contract.project import ROOT

LOCK = ROOT / "requirements.lock"
ENTRY = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)(?: ; ([^\\\n]+?))?(?: \\)?\n((?:    --hash=\S+(?: \\)?\n)*)", re.M)

#: Extras that CI does not install, and so the lock does not hold.
BY_HAND = {"fuzz"}


def entries() -> dict[str, list[tuple[str, Marker | None, int]]]:
    """Return each package of the lock file: its versions, with where they are for, and how many hashes they have."""
    found: dict[str, list[tuple[str, Marker | None, int]]] = {}
    for name, version, marker, hashes in ENTRY.findall(LOCK.read_text()):
        entry = (version, Marker(marker) if marker else None, hashes.count("sha256:"))
        found.setdefault(canonicalize_name(name), []).append(entry)
    return found


def wanted() -> list[Requirement]:
    """Return what pyproject.toml asks for, with all extras that CI installs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lists = [project["dependencies"], *(extras[name] for name in extras if name not in BY_HAND)]
    found = [Requirement(text) for one in lists for text in one]
    return [requirement for requirement in found if requirement.name != "llmq-streams"]


def test_every_line_is_a_pin_with_hashes() -> None:
    """The whole file is pins, each with a SHA-256: pip takes nothing else from any host."""
    text = LOCK.read_text()
    left = [line for line in ENTRY.sub("", text).splitlines() if line and not line.startswith("#")]
    assert [] == left
    assert [] == [name for name, versions in entries().items() for *_, hashes in versions if not hashes]


def test_it_satisfies_what_the_project_asks_for() -> None:
    """Each dependency of pyproject.toml is in the lock, in a version that its range allows."""
    locked = entries()
    missing = [str(one) for one in wanted() if canonicalize_name(one.name) not in locked]
    assert [] == missing, "make the lock file again: its head says how"
    wrong = [
        f"{one}: {version}"
        for one in wanted()
        for version, *_ in locked[canonicalize_name(one.name)]
        if not one.specifier.contains(version, prereleases=True)
    ]
    assert [] == wrong


def test_it_names_no_host_and_no_path() -> None:
    """Where packages come from is the installer's affair: no URL, index or path stands in the file."""
    assert [] == re.findall(r"://|^-|--index|/\w+/", LOCK.read_text(), re.M)
