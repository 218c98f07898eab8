"""The input's source: an open file that can be read at any place, whatever the prompts come from.

A file is opened; stdin and pipes, which can be read once, are copied to a temporary file first, packed as they are.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import IO

from llmq.scheduler.errors import InputFileError, LLMQError

#: Bytes copied at once.
_BLOCK = 1 << 20


def open_source(path: str) -> IO[bytes]:
    """Open a file of prompts. Raises InputFileError, which says what is in the way."""
    try:
        source = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by its InputFile)
    except FileNotFoundError:
        raise InputFileError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputFileError(f"{path}: is a folder; name a file of JSON lines") from None
    except PermissionError:
        raise InputFileError(f"{path}: may not be read by this user; see its permissions: ls -l") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise InputFileError(f"{path}: cannot be opened ({error})") from None
    return source


def spool(source: IO[bytes], name: str, folder: Path | None) -> IO[bytes]:
    """Copy what can be read once to a file without a name. Raises LLMQError when the disk there is full."""
    try:
        spool = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (closed by its InputFile)
    except OSError as error:
        raise LLMQError(
            f"{folder or tempfile.gettempdir()}: cannot hold a copy of {name} ({error.strerror})"
        ) from error
    try:
        shutil.copyfileobj(source, spool, _BLOCK)
    except OSError as error:
        spool.close()
        raise LLMQError(
            f"{name}: cannot be copied to {folder or tempfile.gettempdir()} ({error.strerror}); "
            "it is read twice, so free some space there or give a file instead"
        ) from error
    return spool
