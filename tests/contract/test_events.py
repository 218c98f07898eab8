"""The events of the log: each is in the documents with its level and fields, and somebody tells it."""

from __future__ import annotations

import ast
import logging
import re
from typing import TypeGuard

from llmq.scheduler.logs import LEVEL_OF, Event
from tests.contract.project import ROOT

ROWS = re.findall(
    r"^\| `(\w+)` \| (debug|info|warning|error) \| [^|]+ \|(.*)\|$",
    (ROOT / "docs" / "logs.md").read_text(encoding="utf-8"),
    re.M,
)

SOURCES = {
    path: path.read_text(encoding="utf-8")
    for folder in ("scheduler", "workers", "gateway", "cli")
    for path in (ROOT / folder).rglob("*.py")
}


def test_the_documents_list_each_event_with_its_level() -> None:
    """What is not listed cannot be watched for."""
    listed = {name: level for name, level, _ in ROWS}
    assert {event.value: logging.getLevelName(LEVEL_OF[event]).lower() for event in Event} == listed


def test_each_event_is_told_by_somebody() -> None:
    """An event that nobody tells is a promise."""
    told = "".join(text for path, text in SOURCES.items() if path.name != "logs.py")
    assert [] == [event.name for event in Event if f"Event.{event.name}" not in told]


def test_the_documents_name_the_fields_of_each_event() -> None:
    """Those that stand in the call itself; what is passed on as a whole (`**`) is told in words."""
    listed = {name: set(re.findall(r"`(\w+)`", fields)) for name, _, fields in ROWS}
    for path, text in SOURCES.items():
        for call in (node for node in ast.walk(ast.parse(text)) if _is_note(node)):
            event = call.args[0]
            if isinstance(event, ast.Attribute):
                given = {keyword.arg for keyword in call.keywords if keyword.arg}
                assert given <= listed[Event[event.attr].value], f"{path.name}: {event.attr}"


def _is_note(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "note"
