"""What stands between a client and an engine: llmq's gateway with its worker, and LiteLLM's proxy beside it."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.error import URLError
from urllib.request import urlopen

from bench.processes import cpu_s, environment, llmq_gateway, llmq_worker
from bench.row import Setting

START_TIMEOUT_S = 120.0

#: Nothing of LiteLLM's that a proxy can do without; it asks nobody but the engine.
_LITELLM = """\
model_list:
  - model_name: bench
    litellm_params: {{model: openai/bench, api_base: "{engine}/v1", api_key: none}}
general_settings: {{dangerously_permit_weak_or_unset_master_key: true}}
litellm_settings: {{telemetry: false, num_retries: 0}}
"""


@dataclass(frozen=True, slots=True)
class Target:
    """A place to send chat to, and the processes that work between it and the engine."""

    url: str
    pids: tuple[int, ...] = ()

    def cpu_s(self) -> list[float]:
        """Return the CPU time that each of its processes has used so far, in seconds."""
        return [cpu_s(pid) for pid in self.pids]


@contextmanager
def llmq_front(setting: Setting, engine: str, slots: int) -> Iterator[Target]:
    """Run a gateway and a worker for the engine, as anybody would; the gateway's process is the first."""
    with (
        llmq_worker(setting.server.url, slots, engine) as worker,
        llmq_gateway(setting.server.url, setting.folder) as (gateway, url),
    ):
        yield Target(url, (gateway.process.pid, worker.process.pid))


@contextmanager
def litellm_front(setting: Setting, engine: str) -> Iterator[Target]:
    """Run LiteLLM's proxy with one worker process, which is what it does by itself; nobody needs a key."""
    assert setting.litellm is not None
    config = setting.folder / "litellm.yaml"
    config.write_text(_LITELLM.format(engine=engine))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(setting.litellm), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    kept = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=kept | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR"},
    )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_until_it_lives(process, f"{url}/health/liveliness")
        yield Target(url, (process.pid,))
    finally:
        process.kill()
        process.wait()


def _wait_until_it_lives(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urlopen(url, timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"{process.args!r} did not serve {url}")
