"""The local engine: `local:MODEL.gguf` serves a GGUF file on this machine with llama.cpp, in a child process.

    local:model.gguf?slots=4&context=8192

This module reads that name and says what to start (`launch.py`); the server is `llamacpp_server.py`, and `managed.py`
runs it like any other engine.
"""

from __future__ import annotations

import importlib.util
import secrets
import socket
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from urllib.parse import parse_qsl

from llmq.scheduler.errors import UsageError
from llmq.workers.engines import llamacpp_server
from llmq.workers.engines.launch import Launch, visible

PREFIX = "local:"

_MAGIC = b"GGUF"


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """Settings of the server, each a parameter of the name."""

    slots: int = 4
    """Requests at a time."""
    context: int = 4096
    """Tokens of one request, prompt and answer."""
    threads: int = 0
    """Threads that compute; 0: as llama.cpp chooses."""
    embeddings: int = 0
    """1: serve /v1/embeddings."""


def launch_of_local(text: str, gpu: str) -> Launch:
    """Return how to serve the model of a name such as `local:model.gguf?slots=4`, on a port that is free now.

    Raises UsageError where the file is missing or no GGUF, for a parameter that is wrong, and without llama.cpp.
    """
    name, _, query = text.removeprefix(PREFIX).partition("?")
    options = _options(query)
    model = _checked(name)
    if importlib.util.find_spec("xllamacpp") is None:
        raise UsageError(
            "local: needs llama.cpp, which is not installed here: pip install 'llmq-streams[local-llm]' "
            "(or pip install xllamacpp)"
        )
    # -P: the folder of that file holds a http.py and others that are not Python's.
    port, key = _free_port(), secrets.token_hex(16)
    arguments = [f"--{option}={value}" for option, value in asdict(options).items()]
    return Launch(
        name="llama.cpp",
        command=(sys.executable, "-P", llamacpp_server.__file__, str(model), f"--port={port}", *arguments),
        url=f"http://127.0.0.1:{port}",
        # A port is open to all users of the host, and may be somebody else's by the next start: hence the key. Threads
        # that spin while they wait make two threads on two cores run at a fifth of their speed.
        environment={**visible(gpu), llamacpp_server.KEY_VARIABLE: key, "OMP_WAIT_POLICY": "passive"},
        api_key=key,
    )


def _checked(name: str) -> Path:
    if not name:
        raise UsageError("expected the model's file, as in local:model.gguf, got none")
    path = Path(name).expanduser().absolute()
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except OSError as error:
        raise UsageError(f"local: cannot read the model {path} ({error.strerror}): check the path") from None
    if magic != _MAGIC:
        raise UsageError(
            f"local: {path} is not a GGUF file (it begins with {magic!r}, not {_MAGIC!r}): give a model in llama.cpp's "
            "format, or serve this one yourself and name its URL"
        )
    return path


def _options(query: str) -> LocalOptions:
    least = {"slots": 1, "context": 1, "threads": 0, "embeddings": 0}
    given: dict[str, int] = {}
    for name, text in parse_qsl(query, keep_blank_values=True):
        if name not in least:
            known = ", ".join(option.name for option in fields(LocalOptions))
            raise UsageError(f"local: has no parameter {name!r}; it takes {known}, as in local:model.gguf?slots=4")
        if not text.isascii() or not text.isdigit() or int(text) < least[name]:
            raise UsageError(f"local: expected a whole number from {least[name]} for {name}, got {text!r}")
        given[name] = int(text)
    return LocalOptions(**given)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
