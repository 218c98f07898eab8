"""The program of the README does what it says: it is run as it stands, with a worker and a file of prompts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.project import ROOT
from tests.system.cli_process import QUICK, started, write_prompts

#: What it leaves queued is not the point: the next test begins on an empty server.
pytestmark = pytest.mark.leaves("llmq:*")


def test_the_python_program_of_the_readme_runs(system_redis_url: str, tmp_path: Path) -> None:
    """It streams an answer, submits `prompts.jsonl` and prints each line's id and status."""
    (program,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    write_prompts(tmp_path / "prompts.jsonl", 3)
    with started("worker", "--engine", QUICK, url=system_redis_url) as worker:
        worker.until("ready ")
        done = subprocess.run(
            [sys.executable, "-c", f"{program}\nimport asyncio\nasyncio.run(main())\n"],
            cwd=tmp_path,
            env=os.environ | {"LLMQ_REDIS_URL": system_redis_url},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    assert 0 == done.returncode, done.stderr
    assert 3 == len(re.findall(r"line-\d 200$", done.stdout, re.M))
