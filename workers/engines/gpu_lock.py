"""The lock of a GPU: of the engines that llmq starts on this host, at most one is on each GPU.

A file a GPU in LLMQ_HOME, locked with flock. The guardian of the engine holds the open files too, so a lock lasts as
long as the engine does, whoever dies. Engines that somebody else started are not known here.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from llmq.scheduler.errors import UsageError

#: How long an engine may still be ending whose llmq is gone: the guardian's grace and a little.
PATIENCE_S = 35.0

_LOOK_S = 0.2


def file_name(gpu: str, ending: str) -> str:
    """Return a file's name for what belongs to a GPU of this host: home folders are shared between hosts."""
    plain = (re.sub(r"[^A-Za-z0-9._-]", "_", name)[:64] for name in (socket.gethostname() or "localhost", gpu))
    return f"{'-gpu-'.join(plain)}.{ending}"


async def take(folder: Path, names: list[str], patience_s: float = PATIENCE_S) -> list[int]:
    """Lock these GPUs; return the open files, for `release`. Raises UsageError where a living llmq holds one.

    Where the holder is gone and only its engine is still ending, it is waited for.
    """
    held: list[int] = []
    try:
        for name in sorted(names):  # in one order: two that want the same two GPUs do not wait for each other
            held.append(await _take_one(folder / file_name(name, "lock"), name, patience_s))
    except OSError as error:
        release(held)
        raise UsageError(
            f"cannot lock the GPU in {folder} ({error.strerror or error}): set LLMQ_HOME to a folder that you can write"
        ) from error
    except BaseException:
        release(held)
        raise
    return held


def release(held: list[int]) -> None:
    """Let go; an engine that is still ending keeps its lock."""
    for descriptor in held:
        os.close(descriptor)
    held.clear()


async def _take_one(path: Path, name: str, patience_s: float) -> int:
    descriptor = _open(path)
    try:
        for _ in _looks(patience_s):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
                if _lives(holder):
                    break
                await asyncio.sleep(_LOOK_S)
            else:
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
                return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    raise UsageError(
        f"GPU {name} of this host has an engine that llmq started already (process {holder or 'unknown'}): name "
        "another GPU, or use that engine: llmq worker --engine URL"
    )


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def _looks(patience_s: float) -> Iterator[int]:
    return iter(range(max(1, round(patience_s / _LOOK_S))))


def _lives(holder: str) -> bool:
    """Tell whether a process runs; text that is no number is nobody's."""
    with contextlib.suppress(ProcessLookupError, ValueError):
        try:
            os.kill(int(holder), 0)
        except PermissionError:
            pass  # it runs, for somebody else
        return True
    return False
