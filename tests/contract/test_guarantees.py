"""The page of guarantees: the tests that it names exist, all laws stand on it, no fault of the list is forgotten."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.contract.faults import FAULTS
from tests.contract.project import ROOT, files_in

PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")


def all_tests() -> Iterator[tuple[str, str]]:
    """Yield the full name of every test, and its docstring."""
    for path in files_in("tests"):
        if path.name.startswith(("test_", "by_hand_")) and path.suffix == ".py":
            yield from _tests_of(path.relative_to(ROOT), ast.parse(path.read_bytes()), ())


def _tests_of(path: Path, node: ast.AST, within: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _tests_of(path, child, (*within, child.name))
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and child.name.startswith("test_"):
            yield "::".join((path.as_posix(), *within, child.name)), ast.get_docstring(child) or ""


def test_every_test_that_the_page_names_exists() -> None:
    """A promise is not proven by a test that was renamed: FILE::NAME, or FILE::CLASS, is there."""
    known = {name for name, _ in all_tests()}
    known |= {name.rpartition("::")[0] for name in known}
    named = set(re.findall(r"tests/[\w/]+\.py(?:::\w+)+", PAGE))
    assert len(named) > 100
    assert [] == sorted(named - known)


def test_every_law_has_its_paragraph_its_limit_and_its_tests() -> None:
    """G1 to G18, each with a sentence, what it does not promise, and tests."""
    for number in range(1, 19):
        found = re.search(rf"^\*\*G{number}\*\* (.+?)(?=^\*\*G|^## )", PAGE, re.M | re.S)
        assert found, f"G{number}"
        assert "*Limit.*" in found[1], f"G{number}"
        assert "::test_" in found[1], f"G{number}"


def test_every_fault_is_cited() -> None:
    """Each number of the list is named by a test, or by the page with the reason why it cannot happen here."""
    cited = set(re.findall(r"F-\d{3}", PAGE + " ".join(text for _, text in all_tests())))
    assert [] == sorted(FAULTS.keys() - cited)
    assert [] == sorted(cited - FAULTS.keys()), "no such fault is in tests/contract/faults.py"


def test_every_kind_of_fault_has_tests_or_a_reason() -> None:
    """Each row of the table says what llmq does, and names a test."""
    rows = [line for line in PAGE.splitlines() if re.match(r"\| [^|]+ \| F-\d{3}", line)]
    assert 40 <= len(rows)
    assert [] == [row for row in rows if len(row.split("|")[3].strip()) < 10]
    assert [] == [row for row in rows if "::" not in row]
