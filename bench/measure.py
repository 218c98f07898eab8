"""One measurement, in a process of its own: `python -m bench.measure ROW COUNT FOLDER` prints its figures as JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable
from pathlib import Path

from bench.row import Figures, Setting, by_name
from bench.rows import ROWS
from bench.server import redis_server


def main() -> None:
    """Start a server, measure, and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("row", choices=by_name(ROWS))
    parser.add_argument("count", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--appendonly", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--litellm", type=Path)
    given = parser.parse_args()
    with redis_server(given.folder, appendonly=given.appendonly) as server:
        row = by_name(ROWS)[given.row]
        setting = Setting(server, given.folder, given.count, given.quick, given.litellm)
        print(json.dumps(asyncio.run(_measured(row.measure(setting)))))


async def _measured(measurement: Awaitable[Figures]) -> Figures:
    return await measurement


if __name__ == "__main__":
    main()
