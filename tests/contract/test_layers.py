"""Who may import whom: a job's way reads in one direction."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.project import PRODUCT, ROOT, environment, files_in

#: What each folder may import of the others.
ALLOWED = {
    "scheduler": set[str](),
    "workers": {"scheduler"},
    "gateway": {"scheduler"},
    "cli": {"scheduler", "workers", "gateway"},
}


def imports_of(path: Path) -> Iterator[str]:
    """Yield the names of all modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield f"{'.' * node.level}{node.module or ''}"
            yield from (f"{node.module}.{alias.name}" for alias in node.names if node.module)


@pytest.mark.parametrize("folder", PRODUCT)
def test_a_folder_imports_only_what_is_further_down(folder: str) -> None:
    """The scheduler imports neither workers, gateway nor cli; workers and gateway do not know of each other."""
    forbidden = {f"llmq.{other}" for other in set(PRODUCT) - ALLOWED[folder] - {folder}}
    for path in files_in(folder):
        if path.suffix == ".py":
            found = {".".join(name.split(".")[:2]) for name in imports_of(path)}
            assert not found & forbidden, path


def test_the_product_is_imported_as_llmq() -> None:
    """No file imports a bare `scheduler` or `cli`: those names belong to other projects."""
    for path in files_in(*PRODUCT, "src", "tests", "examples", "bench"):
        if path.suffix == ".py":
            assert not {name.split(".")[0] for name in imports_of(path)} & set(PRODUCT), path


def test_the_import_contracts_hold() -> None:
    """The contracts of pyproject.toml: layers, no cycles, no Redis in engines."""
    linter = Path(sys.executable).with_name("lint-imports")
    command = [str(linter), "--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert "0 broken" in run.stdout, run.stdout + run.stderr
