"""Node and the official JavaScript client: installed once a test run, and run against a gateway."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("openai_client.mjs")

PACKAGE = "openai@7"

#: A registry that is far away, on a busy machine; less than a test may take, so that npm is named where it hangs.
INSTALL_S = 100.0


@dataclass(frozen=True, slots=True)
class Node:
    """Node, with the client installed in `folder`."""

    folder: Path

    async def passes(self, base: str, *checks: str, key: str = "none") -> list[Any]:
        """Run checks, one after the other; return what they told. Fails with what a check says where it fails."""
        async with self.running(base, *checks, key=key) as run:
            return await run.told_to_the_end()

    @contextlib.asynccontextmanager
    async def running(self, base: str, *checks: str, key: str = "none") -> AsyncIterator[Run]:
        """Run checks beside the test; it is killed at the end of the block."""
        process = await asyncio.create_subprocess_exec(
            "node", self.folder / SCRIPT.name, f"{base}/v1", *checks,
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
            env={"PATH": os.environ["PATH"], "HOME": str(self.folder), "KEY": key},
        )  # fmt: skip
        try:
            yield Run(process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.communicate()


@dataclass(frozen=True, slots=True)
class Run:
    """Checks that run."""

    process: asyncio.subprocess.Process

    async def told(self) -> Any:
        """Wait for the next thing that they tell."""
        assert self.process.stdout is not None
        async with asyncio.timeout(30):
            return json.loads(await self.process.stdout.readline())

    async def told_to_the_end(self) -> list[Any]:
        """Wait for their end; return all else that they told."""
        async with asyncio.timeout(60):
            out, err = await self.process.communicate()
        assert 0 == self.process.returncode, err.decode()
        return [json.loads(line) for line in out.splitlines()]


def install(base: Path) -> Node:
    """Install the client below `base`, if no other process of this test run has done so."""
    missing = [name for name in ("node", "npm") if shutil.which(name) is None]
    assert not missing, f"expected Node 20 or newer with npm on PATH, found no {' and no '.join(missing)}; install them"
    folder = base / "node"
    folder.mkdir(exist_ok=True)
    with (base / "node.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / SCRIPT.name).exists():
            command = [
                "npm",
                "install",
                "--no-audit",
                "--no-fund",
                "--ignore-scripts",
                "--prefix",
                str(folder),
                PACKAGE,
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
            assert 0 == done.returncode, f"npm cannot install {PACKAGE}: {done.stderr}"
            shutil.copy(SCRIPT, folder)  # last: it says that all is there. It finds its packages beside itself
    return Node(folder)
