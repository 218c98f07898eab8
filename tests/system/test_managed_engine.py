"""Engines that llmq starts itself, with real processes: watched, started again, and never left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from llmq.scheduler.errors import EngineUnavailable, UsageError
from llmq.workers.engines import gpu_lock, guardian
from llmq.workers.engines.base import EngineGone
from llmq.workers.engines.http import HttpEngine
from llmq.workers.engines.launch import launch_of_command
from llmq.workers.engines.managed import ManagedEngine
from tests.engine.fake import chat
from tests.engine.served import LOADS_FOR_EVER, WRAPPER, Served, runs
from tests.redis.serving import until
from tests.system.cli_process import answering, free_port
from tests.system.cli_process import until as until_now


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """The processes of a test's engine; none may outlive the test."""
    processes = Served(tmp_path)
    yield processes
    left = processes.alive
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert [] == left


class Told:
    """What the user was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def has(self, text: str) -> Callable[[], bool]:
        """Return the question whether some line holds a text."""
        return lambda: any(text in line for line in self.lines)


@contextlib.asynccontextmanager
async def managed(
    command: str, port: int, tmp_path: Path, told: Told, grace_s: float = 5.0
) -> AsyncIterator[ManagedEngine]:
    """Make a managed engine; close it whatever happens."""
    launch = launch_of_command(command, "0", f"http://127.0.0.1:{port}")
    engine = ManagedEngine(launch, HttpEngine(launch.url), told.lines.append, log=tmp_path / "log", grace_s=grace_s)
    try:
        yield engine
    finally:
        await engine.close()


class TestManagedEngine:
    """From the start to the end."""

    async def test_it_is_started_warmed_up_and_stopped(self, tmp_path: Path, served: Served) -> None:
        """It answers as any engine does; its log says that one request came before ours; then it is gone."""
        port, told = free_port(), Told()
        async with managed(served.llama(port), port, tmp_path, told) as engine:
            info = await engine.start()
            assert ("llama.cpp", 2) == (info.kind, info.slots)
            await until(lambda: b"slot print_timing" in (tmp_path / "log").read_bytes())
            assert 200 == (await engine.run(chat(max_tokens=2))).status_code
            assert 1 == len(served.alive)
        assert [] == served.alive
        assert str(tmp_path / "log") in told.lines[0]

    async def test_killed_it_is_started_again(self, tmp_path: Path, served: Served) -> None:
        """The request in flight dies with it; until the new one is warm all others are refused before they are sent."""
        port, told = free_port(), Told()
        async with managed(served.llama(port), port, tmp_path, told) as engine:
            await engine.start()
            begun = asyncio.Event()
            run = asyncio.create_task(engine.run(chat(max_tokens=1500, ignore_eos=True), lambda *_: begun.set()))
            await begun.wait()
            served.kill()
            with pytest.raises(EngineGone) as cut:
                await run
            await until(told.has("has ended (killed by SIGKILL); starting it again in 1 s"))
            with pytest.raises(EngineGone, match="being started again") as refused:
                await engine.run(chat(max_tokens=1))
            with pytest.raises(EngineUnavailable, match="being started again"):
                await engine.probe()
            await until(told.has("healthy again"))
            assert (True, False) == (cut.value.in_flight, refused.value.in_flight)
            assert "llama.cpp" == (await engine.probe()).kind
            assert 200 == (await engine.run(chat(max_tokens=1))).status_code
        assert 2 == len(served.pids)

    async def test_what_ends_before_it_is_healthy_is_an_error_with_its_last_words(
        self, tmp_path: Path, served: Served
    ) -> None:
        """The exit code, and 20 lines of what it printed this time."""
        told = Told()
        command = served.program("print(*range(1, 41), sep='\\n'); raise SystemExit(3)")
        for _ in range(2):
            async with managed(command, free_port(), tmp_path, told) as engine:
                with pytest.raises(EngineUnavailable, match=r"ended before it was healthy \(exit code 3\)") as failed:
                    await engine.start()
            assert [f"  {number}" for number in range(21, 41)] == str(failed.value).splitlines()[1:]

    async def test_a_port_that_is_taken_is_refused_before_anything_is_started(
        self, tmp_path: Path, served: Served
    ) -> None:
        """Else the other server would be taken for ours."""
        with answering(lambda asked: b"HTTP/1.1 404 X\r\nContent-Length: 0\r\n\r\n") as port:
            async with managed(served.llama(port), port, tmp_path, Told()) as engine:
                with pytest.raises(UsageError, match="something listens at"):
                    await engine.start()
        assert [] == served.pids

    async def test_what_ignores_sigterm_is_killed_with_all_that_it_started(
        self, tmp_path: Path, served: Served
    ) -> None:
        """Closed while it loads, after the grace."""
        async with managed(served.stubborn(), free_port(), tmp_path, Told(), grace_s=0.2) as engine:
            starting = asyncio.create_task(engine.start())
            await until(lambda: len(served.pids) == 2)
            starting.cancel()
            began = time.monotonic()
        assert time.monotonic() - began >= 0.2
        assert [] == served.alive


class TestGuardian:
    """The process between llmq and an engine."""

    @contextlib.contextmanager
    def guarding(self, command: str, log: Path, grace_s: float = 0.2) -> Iterator[subprocess.Popen[bytes]]:
        """Run a guardian; let go of its lifeline at the end."""
        words = [sys.executable, "-I", guardian.__file__, str(log), str(grace_s), "sh", "-c", f"exec {command}"]
        with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
            yield process

    def test_it_ends_with_the_engine_and_its_exit_code(self, tmp_path: Path, served: Served) -> None:
        """Also where a signal ended it; what it printed is in the log."""
        for program, code in (("print('words'); exit(7)", 7), ("import os; os.kill(os.getpid(), 11)", 139)):
            with self.guarding(served.program(program), tmp_path / "log") as process:
                assert code == process.wait(20)
        assert b"words\n" in (tmp_path / "log").read_bytes()

    def test_what_an_engine_leaves_behind_ends_with_it(self, tmp_path: Path, served: Served) -> None:
        """A process that is left would hold the memory of the GPU when the next engine starts."""
        with self.guarding(served.stubborn(), tmp_path / "log") as process:
            until_now(lambda: len(served.pids) == 2, "two processes")
            os.kill(served.pids[0], signal.SIGKILL)
            assert 137 == process.wait(20)
        until_now(lambda: not served.alive, "no process left")

    def test_the_lifeline_ends_all(self, tmp_path: Path, served: Served) -> None:
        """The kernel closes it also where whoever held it was killed."""
        with self.guarding(served.stubborn(), tmp_path / "log") as process:
            until_now(lambda: len(served.pids) == 2, "two processes")
            assert process.stdin is not None
            process.stdin.close()
            assert 137 == process.wait(20)
        until_now(lambda: not served.alive, "no process left")

    def test_the_child_of_a_wrapper_may_end_well(self, tmp_path: Path, served: Served) -> None:
        """The wrapper is gone at once; an engine that is told to end still gets the time for it."""
        log = tmp_path / "log"
        with self.guarding(served.program(WRAPPER), log, grace_s=20) as process:
            until_now(lambda: log.exists() and b"up" in log.read_bytes(), "a word")
            assert process.stdin is not None
            process.stdin.close()
            assert 143 == process.wait(20)
        assert b"well" in log.read_bytes()

    def test_killed_it_takes_the_engine_with_it(self, tmp_path: Path, served: Served) -> None:
        """On Linux, where the kernel does it; elsewhere an engine outlives its guardian, as the documents say."""
        with self.guarding(served.program(LOADS_FOR_EVER), tmp_path / "log") as process:
            until_now(lambda: (tmp_path / "log").exists() and b"loading" in (tmp_path / "log").read_bytes(), "a word")
            process.kill()
            process.wait()
            if sys.platform != "linux":
                served.kill()
        until_now(lambda: not served.alive, "no process left")


class TestGpuLock:
    """One engine a GPU of this host."""

    async def test_a_gpu_is_taken_once(self, tmp_path: Path) -> None:
        """A list takes all of its GPUs or none; what was let go can be taken again."""
        held = await gpu_lock.take(tmp_path, ["0", "1"])
        with pytest.raises(UsageError, match=rf"GPU 1 of this host .* \(process {os.getpid()}\)"):
            await gpu_lock.take(tmp_path, ["1"])
        with pytest.raises(UsageError, match="GPU 1"):
            await gpu_lock.take(tmp_path, ["2", "1"])
        gpu_lock.release(held)
        gpu_lock.release(await gpu_lock.take(tmp_path, ["2", "1"]))

    async def test_an_engine_that_is_still_ending_is_waited_for(self, tmp_path: Path) -> None:
        """Its llmq is gone: a supervisor that starts the worker again need not try twice."""
        held = await gpu_lock.take(tmp_path, ["0"])
        with holding(held) as ending:
            # What stands in the file is the number of a process that has ended.
            os.pwrite(held[0], f"{ended_pid():<20}".encode(), 0)
            gpu_lock.release(held)
            taking = asyncio.create_task(gpu_lock.take(tmp_path, ["0"]))
            with pytest.raises(UsageError, match="GPU 0"):
                await gpu_lock.take(tmp_path, ["0"], patience_s=0.2)
            assert not taking.done()
            ending.communicate(b"\n")
            gpu_lock.release(await taking)
        assert not runs(ending.pid)


def holding(held: list[int]) -> subprocess.Popen[bytes]:
    """Start a process that keeps these files open until it is told to end."""
    return subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=held)


def ended_pid() -> int:
    """Return the number of a process that has ended."""
    with subprocess.Popen(["true"]) as process:
        return process.pid
