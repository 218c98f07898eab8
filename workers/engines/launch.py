"""What is started as an engine: the command, its environment, and the URL at which it will answer.

`launch_of_command` reads what a user gives as `--serve 'CMD'`. It decides and starts nothing; `managed.py` does.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from llmq.scheduler.errors import UsageError

#: Where the usual servers listen when nobody says otherwise. Their modules (`python -m vllm...`) count as well.
PORT_OF_PROGRAM = {"vllm": 8000, "sglang": 30000, "llama-server": 8080}

#: Addresses that mean "all of this host": llmq takes the loopback.
_ANYWHERE = ("0.0.0.0", "::", "[::]", "localhost")


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start an engine; `environment` is set on top of this process' own. `api_key` is what it asks for."""

    name: str
    command: tuple[str, ...]
    url: str
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    api_key: str | None = field(default=None, repr=False)


def launch_of_command(text: str, gpu: str, engine: str | None, api_key: str | None = None) -> Launch:
    """Read a command line as a shell would, without one; `engine` is the URL where the user gave one.

    Raises UsageError for what cannot be run, and where nothing tells the URL.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--serve: {text!r} cannot be read as a command ({error}): check its quotes") from None
    if not words:
        raise UsageError("--serve: expected a command, as in --serve 'vllm serve MODEL --port 8000', got nothing")
    if shutil.which(words[0]) is None:
        hint = "; there is no shell: give NAME=VALUE to llmq itself" if "=" in words[0] else ""
        raise UsageError(f"--serve: there is no program {words[0]!r} that can be run: check name and PATH{hint}")
    if engine is not None and not engine.startswith(("http://", "https://")):
        raise UsageError(f"--serve starts an HTTP server: expected its URL as --engine, or none, got {engine!r}")
    url = engine or f"http://{_host(words)}:{_port(words)}"
    # vLLM, SGLang and llama.cpp call it the same.
    key = api_key or option(words, "--api-key")
    return Launch(PurePath(words[0]).name, tuple(words), url, visible(gpu), key)


def visible(gpu: str) -> dict[str, str]:
    """Return the variables that show a process these GPUs and no other: of CUDA, and of ROCm."""
    devices = ",".join(gpus(gpu))
    return {"CUDA_VISIBLE_DEVICES": devices, "HIP_VISIBLE_DEVICES": devices}


def gpus(gpu: str) -> list[str]:
    """Return the names in a list such as `0,1`; raises UsageError for one that is empty or holds a name twice."""
    names = [name.strip() for name in gpu.split(",")]
    if "" in names or len(set(names)) < len(names):
        raise UsageError(f"expected GPUs as 0, or 0,1 for two, got {gpu!r}")
    return names


def _port(words: Sequence[str]) -> int:
    given = option(words, "--port")
    if given is None:
        return _usual_port(words)
    if not given.isascii() or not given.isdigit() or not 0 < int(given) < 65536:
        raise UsageError(f"--serve: expected a port from 1 to 65535 after --port, got {given!r}")
    return int(given)


def _usual_port(words: Sequence[str]) -> int:
    for word in words:
        program = PurePath(word).name
        for name, port in PORT_OF_PROGRAM.items():
            if program == name or program.startswith(f"{name}."):
                return port
    raise UsageError(
        "--serve: nothing tells where this server will listen: put --port N into the command, or name its URL: "
        "--engine http://127.0.0.1:N"
    )


def _host(words: Sequence[str]) -> str:
    given = option(words, "--host")
    if given is None or given in _ANYWHERE:
        return "127.0.0.1"
    return f"[{given}]" if ":" in given and not given.startswith("[") else given


def option(words: Sequence[str], name: str) -> str | None:
    """Return the value of `--name VALUE` or `--name=VALUE`; the last one counts, as with every parser of options."""
    found = None
    for word, following in zip(words, [*words[1:], None], strict=True):
        if word == name and following is not None:
            found = following
        elif word.startswith(f"{name}="):
            found = word.partition("=")[2]
    return found
