"""What is built from the tree holds all of the product, and nothing else."""

from __future__ import annotations

import tarfile
import zipfile
from configparser import ConfigParser
from email.parser import HeaderParser
from pathlib import Path

import pytest

from tests.contract.project import build, names_in, product_files


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def metadata_of(wheel: Path, name: str) -> str:
    """Return a file of the wheel's metadata."""
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (path for path in archive.namelist() if path.endswith(f".dist-info/{name}"))
        return archive.read(path).decode()


def test_the_wheel_holds_the_product_and_nothing_else(wheel: Path) -> None:
    """All modules, Lua scripts and type markers are in the package `llmq`; no tests, no top-level `scheduler`."""
    packaged = {name for name in names_in(wheel) if ".dist-info/" not in name}
    assert product_files() == packaged
    assert {"llmq/scheduler/lua/claim.lua", "llmq/scheduler/py.typed", "llmq/py.typed"} <= packaged


def test_the_wheel_offers_the_command(wheel: Path) -> None:
    """Installing gives one command: llmq."""
    entries = ConfigParser()
    entries.read_string(metadata_of(wheel, "entry_points.txt"))
    assert {"console_scripts": {"llmq": "llmq.cli.main:main"}} == {
        section: dict(entries[section]) for section in entries.sections()
    }


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    """Name, licence and Python version are those of the project; the licence text is inside."""
    metadata = HeaderParser().parsestr(metadata_of(wheel, "METADATA"))
    assert ("llmq-streams", "Apache-2.0", ">=3.11") == (
        metadata["Name"],
        metadata["License-Expression"],
        metadata["Requires-Python"],
    )
    assert "Apache License" in metadata_of(wheel, "licenses/LICENSE")


def test_the_wheel_of_the_sdist_is_the_wheel_of_the_tree(wheel: Path, tmp_path: Path) -> None:
    """Nothing vanishes on the way over the source distribution, and the tests travel with it."""
    with tarfile.open(build("sdist", tmp_path / "sdist")) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    assert names_in(wheel) == names_in(build("wheel", tmp_path / "wheel", source))
    assert (source / "tests" / "conftest.py").exists()
