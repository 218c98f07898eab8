"""The embedded server: a real Valkey or Redis that llmq starts when nobody named one.

One server for all llmq processes of a user on a host; it outlives the process that started it, and keeps its data in
an append-only file. Three things make "one" true, whatever dies when:

- **The lock.** Who starts a server holds an flock and hands the open file to the server, which keeps it until it ends,
  even by SIGKILL. So the lock is held exactly while a server is starting or running; a process id could have been
  given to another by then. Whoever cannot take the lock waits for an answer.
- **The record.** URL and token are written before the server starts, so nothing is unknown when the starter dies.
- **The token**, random, is the server's setting `masterauth`, which means nothing without replication. A stale record
  that leads to somebody else's server is told apart by it; FLUSHALL does not remove it, and `ps` does not show it.

It listens on a unix socket in a folder of mode 0700: no port to collide on, no password in a URL, and the kernel keeps
other users out. Where the path is too long for a socket or the file system has none, it listens on loopback with a
random password, which stands in files of mode 0600 and in no argument.

What is acknowledged survives the death of the server's process; the death of the host costs about a second of writes
(`appendfsync everysec`). A server that died is started again by the next `ensure_server`, at the same URL.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from redis import exceptions

from llmq.scheduler.connection import connect_sync, redact
from llmq.scheduler.errors import RedisUnavailable
from llmq.scheduler.server_binary import find_server
from llmq.scheduler.server_folder import ServerFolder, ServerRecord, folder_errors

#: How long to wait for a server that is starting or loading its data.
START_TIMEOUT_S = 120.0

#: How long a server may take to end: it writes and syncs its append-only file.
STOP_TIMEOUT_S = 30.0

#: A local server answers in well under a millisecond; one that is stopped (SIGSTOP) or swapping does not.
ANSWER_TIMEOUT_S = 2.0

#: Between two looks at a server that is starting, which takes about 50 ms.
POLL_S = 0.02

#: The second start takes another port, in case the recorded one belongs to somebody else by now.
STARTS = 2


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """The state of the embedded server: `running`, `loading` its data, `silent` (alive, no answer) or `stopped`.

    `url` shows no password. What only a server that answers can tell is None in the other states.
    """

    state: Literal["running", "loading", "silent", "stopped"]
    folder: Path
    log: Path
    url: str | None = None
    pid: int | None = None
    version: str | None = None
    memory_bytes: int | None = None
    uptime_s: int | None = None


def ensure_server(home: Path, find_binary: Callable[[], Path] = find_server) -> str:
    """Return the URL of this user's server on this host, started now if it does not run. Blocks until it answers.

    Any number of processes may call this at once: one of them starts the server. Raises RedisUnavailable when there
    is no server to start, when it does not start, or when the folder cannot be written.
    """
    folder = ServerFolder(home)
    deadline = time.monotonic() + START_TIMEOUT_S
    starts = 0
    with folder_errors(folder):
        if (url := _answering(folder)) is not None:
            return url
        folder.make()
        while (url := _answering(folder)) is None:
            lock = folder.try_lock()
            if lock is not None:
                try:
                    if starts == STARTS:
                        raise RedisUnavailable(f"the embedded server does not start{folder.last_words()}")
                    _start(find_binary(), folder, lock, new_port=starts > 0)
                finally:
                    os.close(lock)
                starts += 1
            elif time.monotonic() > deadline:
                raise _silent(folder)
            time.sleep(POLL_S)
    return url


def stop_server(home: Path) -> bool:
    """End this user's server on this host, everything written; return whether one was running.

    Only ever ends the server that holds the token. Raises RedisUnavailable when it does not answer or does not end.
    """
    folder = ServerFolder(home)
    with folder_errors(folder):
        record = folder.read_record()
        if record is None or _ask(folder, record) is None:
            if folder.is_held():
                raise _silent(folder)
            return False
        _shut_down(folder, record)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while folder.is_held():
            if time.monotonic() > deadline:
                raise RedisUnavailable(f"the embedded server did not end{folder.last_words()}")
            time.sleep(POLL_S)
    return True


def server_status(home: Path) -> ServerStatus:
    """Return the state of this user's server on this host; starts and changes nothing."""
    folder = ServerFolder(home)
    with folder_errors(folder):
        record = folder.read_record()
        info = _ask(folder, record) if record else None
        if record is None or info is None:
            return ServerStatus("silent" if folder.is_held() else "stopped", folder.path, folder.log)
    return ServerStatus(
        state="loading" if info["loading"] else "running",
        folder=folder.path,
        log=folder.log,
        url=redact(record.url),
        pid=info["process_id"],
        version=f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info['redis_version']}",
        memory_bytes=info["used_memory"],
        uptime_s=info["uptime_in_seconds"],
    )


def _answering(folder: ServerFolder) -> str | None:
    """Return the URL of the recorded server if it is this folder's, and ready."""
    record = folder.read_record()
    info = _ask(folder, record) if record else None
    return record.url if record and info and not info["loading"] else None


def _ask(folder: ServerFolder, record: ServerRecord) -> dict[str, Any] | None:
    """Return what the recorded server says of itself; None if it does not answer, or is not this folder's.

    The token tells it from other servers, its data folder from that of a home which was copied on this host.
    """
    client = connect_sync(record.url, timeout_s=ANSWER_TIMEOUT_S, max_connections=1, health_check_s=0)
    with contextlib.closing(client):
        try:
            # Both are answered while the server loads its data, too.
            told = client.config_get("masterauth", "dir")
            if told.get("masterauth") != record.token or not _same(str(told.get("dir")), folder.data):
                return None
            info: dict[str, Any] = client.info()
        except exceptions.RedisError:
            return None
    return info


def _same(one: str, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False


def _start(binary: Path, folder: ServerFolder, lock: int, *, new_port: bool) -> None:
    """Start a server that inherits the lock. Returns when it runs on its own, which is before it answers."""
    record = folder.read_record()
    if record is None or (new_port and not record.on_socket):
        record = folder.new_record()
    folder.set_log_aside()
    folder.write(record)
    with folder.log.open("ab") as log:
        # A session of its own: Ctrl-C in this terminal is not meant for it. LC_ALL: an unknown locale would end it.
        subprocess.run(
            [binary, folder.configuration],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder.data,
            # Nothing of llmq's own: some of its settings are secrets, and this process outlives the command.
            env={name: value for name, value in os.environ.items() if not name.startswith("LLMQ_")} | {"LC_ALL": "C"},
            pass_fds=(lock,),
            start_new_session=True,
            check=False,
        )


def _shut_down(folder: ServerFolder, record: ServerRecord) -> None:
    with contextlib.closing(connect_sync(record.url, timeout_s=STOP_TIMEOUT_S)) as client:
        try:
            # NOSAVE: no snapshot beside the append-only file, which is written and synced in either case.
            client.shutdown(nosave=True)
        except exceptions.RedisError as error:
            raise RedisUnavailable(f"the embedded server refuses to end: {error}{folder.last_words()}") from error


def _silent(folder: ServerFolder) -> RedisUnavailable:
    return RedisUnavailable(
        f"the embedded server in {folder.path} runs, but does not answer; it may still be loading its data: "
        f"try again, or end the process whose id is in {folder.pid_file}{folder.last_words()}"
    )
