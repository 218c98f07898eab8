"""The folder of the embedded server: its lock, its record, its configuration, its data and its log.

`<home>/server/<host>/`, of mode 0700. Home folders are shared between hosts often enough that each host has a folder
of its own. This module reads and writes files and nothing else; `embedded.py` starts, asks and stops the server.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from llmq.scheduler.errors import RedisUnavailable

#: The path of a unix socket must fit 108 bytes on Linux and 104 elsewhere.
SOCKET_PATH_LIMIT = 100

#: A log that is longer when the server starts is set aside (one older log is kept).
LOG_LIMIT = 1024 * 1024

_LOOPBACK_URL = re.compile(r"redis://:([0-9a-f]+)@127\.0\.0\.1:([0-9]+)/0")


@dataclass(frozen=True, slots=True)
class ServerRecord:
    """What is written down before a server starts: where it listens, and the token by which it is recognised."""

    url: str = field(repr=False)
    token: str = field(repr=False)

    @property
    def on_socket(self) -> bool:
        """Whether the server listens on a unix socket; else on loopback, with a password."""
        return self.url.startswith("unix:")


class ServerFolder:
    """The files of the embedded server of one home on this host."""

    def __init__(self, home: Path) -> None:
        host = re.sub(r"[^A-Za-z0-9._-]", "_", socket.gethostname()).lstrip(".")[:64]
        self.path = home.expanduser().absolute() / "server" / (host or "localhost")
        self.data = self.path / "data"
        self.log = self.path / "server.log"
        self.pid_file = self.path / "server.pid"
        self.configuration = self.path / "server.conf"
        self._lock = self.path / "lock"
        self._record = self.path / "server.json"
        self._socket = self.path / "server.sock"

    def make(self) -> None:
        """Make the folder and keep other users out of it; refuse one that belongs to somebody else."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = self.path.stat().st_uid
        if owner != os.geteuid():
            raise RedisUnavailable(
                f"{self.path} belongs to another user (uid {owner}); set LLMQ_HOME to a folder of your own"
            )
        self.path.chmod(0o700)
        self.data.mkdir(mode=0o700, exist_ok=True)

    def try_lock(self) -> int | None:
        """Return the open file that holds the lock; None while a server, or somebody who starts one, holds it."""
        return self._try_lock(fcntl.LOCK_EX)

    def is_held(self) -> bool:
        """Tell whether a server is starting or running, answering or not."""
        if not self._lock.exists():
            return False
        # Shared: two that only look do not see each other.
        lock = self._try_lock(fcntl.LOCK_SH)
        if lock is not None:
            os.close(lock)
        return lock is None

    def read_record(self) -> ServerRecord | None:
        """Return the record; None where there is none, or none that can be read."""
        try:
            stored = json.loads(self._record.read_bytes())
            record = ServerRecord(str(stored["url"]), str(stored["token"]))
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
            return None
        # A home that was moved or copied leads to a socket elsewhere.
        fits = record.url == self._socket_url() or _LOOPBACK_URL.fullmatch(record.url)
        return record if fits else None

    def new_record(self) -> ServerRecord:
        """Choose where a server listens: the socket where its path fits and its file system has any, else loopback."""
        token = secrets.token_hex(16)
        if len(os.fsencode(self._socket)) < SOCKET_PATH_LIMIT and self._takes_sockets():
            return ServerRecord(self._socket_url(), token)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return ServerRecord(f"redis://:{secrets.token_hex(16)}@127.0.0.1:{port}/0", token)

    def write(self, record: ServerRecord) -> None:
        """Write what the next server is started with, configuration first: a record is never without one."""
        _write_private(self.configuration, self._configuration_text(record))
        _write_private(self._record, json.dumps({"url": record.url, "token": record.token}))

    def set_log_aside(self) -> None:
        """Keep the log from growing for ever."""
        if self.log.exists() and self.log.stat().st_size > LOG_LIMIT:
            self.log.replace(self.log.with_name(f"{self.log.name}.1"))

    def last_words(self) -> str:
        """Return the end of the server's log, to end a message with."""
        try:
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return f"; its log would be {self.log}"
        told = [line.strip() for line in lines if line.strip()][-2:]
        return f"; its log ({self.log}) ends: {' | '.join(told)[-400:]}"

    def _try_lock(self, kind: int) -> int | None:
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _socket_url(self) -> str:
        return f"unix://{quote(os.fsencode(self._socket))}"

    def _takes_sockets(self) -> bool:
        """Try it: some network and FUSE file systems have no sockets."""
        path = self.path / "probe.sock"
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.bind(os.fsencode(path))
            except OSError:
                return False
        path.unlink(missing_ok=True)
        return True

    def _configuration_text(self, record: ServerRecord) -> str:
        settings: dict[str, object] = {
            "bind": "127.0.0.1",
            "daemonize": "yes",
            "pidfile": self.pid_file,
            "dir": self.data,
            "logfile": self.log,
            # No snapshots: the append-only file is the data. Without the preamble it is plain commands, which every
            # version of Valkey and Redis reads; a newer one's snapshot is refused by an older one.
            "save": "",
            "appendonly": "yes",
            "appendfsync": "everysec",
            "aof-use-rdb-preamble": "no",
            "aof-load-truncated": "yes",
            "maxmemory-policy": "noeviction",
            "masterauth": record.token,
        }
        if record.on_socket:
            settings |= {"port": 0, "unixsocket": self._socket, "unixsocketperm": 700}
        elif match := _LOOPBACK_URL.fullmatch(record.url):
            settings |= {"port": match[2], "requirepass": match[1]}
        return "".join(f"{name} {_quoted(value)}\n" for name, value in settings.items())


@contextlib.contextmanager
def folder_errors(folder: ServerFolder) -> Iterator[None]:
    """Turn what a read-only, full or forbidden disk says into one line that a person can act on."""
    try:
        yield
    except OSError as error:
        raise RedisUnavailable(
            f"the embedded server cannot use {error.filename or folder.path}: {error.strerror or error}; "
            "set LLMQ_HOME to a folder that you can write to, or LLMQ_REDIS_URL to a server of yours"
        ) from error


def _write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read, so that nobody ever sees half of it."""
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(text)
        new.replace(path)
    except OSError as error:
        # A full disk does not say which file it was.
        error.filename = error.filename or str(path)
        raise


def _quoted(value: object) -> str:
    """Write a value of a configuration file so that spaces, quotes and any byte of a path survive."""
    raw = os.fsencode(value if isinstance(value, Path) else str(value))
    return '"' + "".join(chr(b) if 32 <= b < 127 and b not in b'"\\' else f"\\x{b:02x}" for b in raw) + '"'
