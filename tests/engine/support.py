"""What each engine supports, as `docs/engines.md` says it; the conformance suite holds the table to the engines."""

from __future__ import annotations

from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "engines.md"

HEADING = "## What each engine supports, as tested"

#: Nothing to hold the engine to: what it says to that was not recorded.
NOT_RECORDED = "not recorded"


def supported() -> dict[str, dict[str, str]]:
    """Return the table: by what is asked, and then by engine, what comes of it."""
    section = DOCUMENT.read_text(encoding="utf-8").split(f"{HEADING}\n", 1)[1].split("\n## ", 1)[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    engines = [name.strip("`") for name in rows[0][1:]]
    return {row[0]: dict(zip(engines, row[1:], strict=True)) for row in rows[2:]}
