"""A Redis of one row's own: started on a free loopback port, and what it says about its work."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

START_TIMEOUT_S = 30.0

COMMON = ("--bind", "127.0.0.1", "--save", "", "--maxmemory-policy", "noeviction", "--daemonize", "no")

#: Append-only, as the embedded server is run; without it the figures compare with those of other queues.
DURABLE = ("--appendonly", "yes", "--appendfsync", "everysec")


@dataclass(frozen=True, slots=True)
class Work:
    """What a server has done since it was started: CPU time, and time in commands that clients sent, in seconds."""

    cpu_s: float
    command_s: float

    def since(self, before: Work) -> Work:
        """Return what was done after `before`."""
        return Work(self.cpu_s - before.cpu_s, self.command_s - before.command_s)


@dataclass(frozen=True, slots=True)
class RedisServer:
    """A running server; `client` is a plain connection for looking at it from outside."""

    url: str
    client: redis.Redis
    process: subprocess.Popen[bytes]

    def work(self) -> Work:
        """Return what it has done so far. Commands that scripts call are in the time of their script."""
        cpu: Any = self.client.info("cpu")
        stats: Any = self.client.info("commandstats")
        sent = ("cmdstat_evalsha", "cmdstat_eval", "cmdstat_blpop")
        micros = sum(stats[name]["usec"] for name in sent if name in stats)
        return Work(cpu["used_cpu_user_main_thread"] + cpu["used_cpu_sys_main_thread"], micros / 1e6)

    def memory(self) -> int:
        """Return the bytes that its data takes."""
        used: Any = self.client.info("memory")
        return int(used["used_memory"])

    def commands(self, seconds: float) -> tuple[int, int]:
        """Watch for some seconds; return how many commands clients sent, and how many with those within scripts."""
        with self.client.monitor() as monitor:  # type: ignore[no-untyped-call]
            connection: Any = monitor.connection
            sent = total = 0
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0:
                if connection.can_read(timeout=left):
                    command = monitor.next_command()
                    total += 1
                    sent += command["client_type"] != "lua"
        return sent, total


@contextmanager
def redis_server(folder: Path, *, appendonly: bool) -> Iterator[RedisServer]:
    """Start the `redis-server` that is on PATH; it ends with the block."""
    port = _free_port()
    options = [*COMMON, *(DURABLE if appendonly else ("--appendonly", "no")), "--dir", str(folder)]
    with (folder / "redis.log").open("wb") as log:
        process = subprocess.Popen([_binary(), *options, "--port", str(port)], stdout=log, stderr=log)
    try:
        _wait_until_ready(process, folder / "redis.log")
        client = redis.Redis(port=port, protocol=2, socket_timeout=60)
        try:
            yield RedisServer(f"redis://127.0.0.1:{port}/0", client, process)
        finally:
            client.close()
    finally:
        process.kill()
        process.wait()


def version() -> str:
    """Return the version of the server on PATH."""
    words = subprocess.run([_binary(), "--version"], check=True, capture_output=True, text=True).stdout.split()
    return next(word.removeprefix("v=") for word in words if word.startswith("v="))


def _binary() -> str:
    found = shutil.which("redis-server")
    if found is None:
        raise SystemExit("error: expected redis-server on PATH; on Debian: apt-get install redis-server")
    return found


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for the words in its log: a connection that is accepted may be another server's."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while b"Ready to accept connections" not in log.read_bytes():
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"redis-server does not start; its last words:\n{log.read_text(errors='replace')}")
        time.sleep(0.01)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
