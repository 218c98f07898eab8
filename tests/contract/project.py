"""The project's own files, as the contract tests read them: where they are, and what a built wheel holds."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import llmq

ROOT = Path(__file__).parents[2]

#: The folders that are the product; they import as llmq.<folder>.
PRODUCT = ("scheduler", "workers", "gateway", "cli")

#: Everything that is written by hand.
WRITTEN = (*PRODUCT, "src", "tests", "docs", "examples", "bench", "deploy", ".ci")

#: Folders that tools leave in the tree.
CACHES = {"__pycache__", ".hypothesis"}


def files_in(*folders: str, root: Path = ROOT) -> Iterator[Path]:
    """Yield the files in these folders of the project; links are not followed, caches not entered."""
    for folder in folders:
        for path, names, files in os.walk(root / folder):
            names[:] = sorted(name for name in names if name not in CACHES)
            yield from (Path(path) / file for file in sorted(files))


def texts() -> Iterator[tuple[Path, str]]:
    """Yield (path, text) of all written files that are text."""
    for path in (*sorted(file for file in ROOT.iterdir() if file.is_file()), *files_in(*WRITTEN)):
        try:
            yield path, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # data of a test


def product_files(root: Path = ROOT) -> set[str]:
    """Return the files of the product by their names inside a wheel."""
    found = {f"llmq/{path.relative_to(root).as_posix()}" for path in files_in(*PRODUCT, root=root)}
    return found | {"llmq/__init__.py", "llmq/py.typed"}


def build(target: str, folder: Path, source: Path = ROOT) -> Path:
    """Build the `wheel` or `sdist` of a source folder into `folder`; the build backend needs no network."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (built,) = folder.iterdir()
    return built


def names_in(wheel: Path) -> set[str]:
    """Return the names of the files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def environment() -> dict[str, str]:
    """Return an environment whose processes import the same llmq as this one."""
    return os.environ | {"PYTHONPATH": str(Path(llmq.__file__).parents[1])}
