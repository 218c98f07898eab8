"""The tree holds no trace of one machine, no unfinished work in the product, and tests where they belong."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.contract.project import PRODUCT, ROOT, files_in, texts

TESTS = ROOT / "tests"

#: What each folder is for stands in CONTRIBUTING.md; `engine` and `data` hold what tests use,
#: and so does `governing`, traffic in virtual time.
FOLDERS = {"unit", "fake", "redis", "system", "contract", "chaos", "governing", "engine", "data"}

#: Paths of a developer's machine, and hosts that packages come from; no file needs either.
MACHINE = re.compile(
    r"(?<![\w.])/(?:work|root|Users|home/(?!llmq\b)\w+|tmp/w)/|\b(?:pythonhosted|npmjs)\.org|deb\.debian"
)

UNFINISHED = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b|NotImplementedError")

SKIPS = re.compile(r"\b(?:mark\.skip|mark\.xfail|pytest\.skip|pytest\.xfail|importorskip)")

#: The laws of the design, G1 to G18.
LAWS = {f"G{number}" for number in range(1, 19)}

#: Laws that no test outside of this folder proves yet, each with the version that will.
LATER: dict[str, str] = {}


def test_no_file_names_a_machine() -> None:
    """No path of a developer's machine and no package host stands in any file."""
    this = Path(__file__)
    found = [(path, match[0]) for path, text in texts() if path != this for match in MACHINE.finditer(text)]
    assert [] == found


def test_the_product_is_finished() -> None:
    """No marker of unfinished work stands in the product; such work is not in it."""
    found = [
        (path, match[0])
        for path, text in texts()
        if path.relative_to(ROOT).parts[0] in (*PRODUCT, "src")
        for match in UNFINISHED.finditer(text)
    ]
    assert [] == found


def test_every_test_is_in_a_known_folder() -> None:
    """Tests lie in unit, fake, redis, system or contract: the folder says what a test needs."""
    assert {path.name for path in TESTS.iterdir() if path.is_dir() and path.name != "__pycache__"} <= FOLDERS
    assert [] == list(TESTS.glob("test_*.py"))


def test_no_test_is_skipped() -> None:
    """A test that cannot run here is not there: nothing is skipped or expected to fail."""
    this = Path(__file__)
    found = [
        path for path in files_in("tests") if path.suffix == ".py" and path != this and SKIPS.search(path.read_text())
    ]
    assert [] == found


def test_every_test_says_what_it_shows() -> None:
    """Each test function has a docstring."""
    silent = [f"{path.name}: {test.name}" for path, test in all_tests() if not ast.get_docstring(test)]
    assert [] == silent


def test_every_law_has_a_test() -> None:
    """Each law of the design is named in the docstring of a test of the product itself."""
    named = {
        law
        for path, test in all_tests()
        if path.relative_to(TESTS).parts[0] != "contract"
        for law in re.findall(r"\bG\d+\b", ast.get_docstring(test) or "")
    }
    assert [] == sorted(LAWS - named - set(LATER)), "no test names these"
    assert [] == sorted(named - LAWS), "there are no such laws"
    assert [] == sorted(named & set(LATER)), "these are proven by now"


def all_tests() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield every test function with its file."""
    for path in files_in("tests"):
        if path.name.startswith("test_") and path.suffix == ".py":
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                    yield path, node
