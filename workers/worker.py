"""The worker: one process that serves one engine, from the first heartbeat to the last hand back.

    while (lease := await desk.take()) is not None:
        outcome = await executor.run(lease)
        desk.settle(lease, outcome)

That is a slot; a worker is as many of them as its engine answers requests at once. Around them stand small loops, each
in a module of its own: the desk's trips, the bells, the lease keeper (a thread), the sweeper. This module builds them,
starts them and ends them; it neither chooses jobs nor talks to Redis.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from llmq.scheduler.connection import connect, connect_sync, redis_errors
from llmq.scheduler.errors import EngineUnavailable, LLMQError
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.lease import Abandoned, Answered, Fence, HandedBack, Lease, Outcome, Reason
from llmq.scheduler.live import LiveSettings
from llmq.scheduler.scripts import Beat
from llmq.workers.bells import LISTEN_S, Bells
from llmq.workers.contact import Contact
from llmq.workers.deltas import DeltaSender
from llmq.workers.desk import VERDICTS, Desk
from llmq.workers.engines.base import Engine, EngineInfo
from llmq.workers.executor import Executor, Running, Stop
from llmq.workers.gate import Gate
from llmq.workers.governor import Allowance, Candidate, Snapshot, allow, default_reserve, victims
from llmq.workers.keeper import TIMEOUT_S, LeaseKeeper
from llmq.workers.measuring import Measuring
from llmq.workers.reach import OUT_OF_REACH
from llmq.workers.shutdown import Shutdown
from llmq.workers.sweeper import Sweeper

#: Slots where the engine does not tell how many requests it runs at once.
DEFAULT_CONCURRENCY = 8

#: The newest format of a queue's data that this version reads.
FORMAT = 1

#: After the grace: how long aborted requests and their hand back may take before the process ends all the same.
LAST_SECONDS_S = 10.0

PROBE_S = 1.0
LONGEST_PROBE_S = 5.0
EMPTY_CHECK_S = 0.1


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How one worker is run. `concurrency` and `reserve` of None mean the engine's slots, and the live setting."""

    queue: str = "default"
    gpu: str = "0"
    concurrency: int | None = None
    reserve: int | None = None
    grace: float = 30.0
    until_empty: bool = False
    announce: Callable[[str], None] = field(default=lambda line: print(line, file=sys.stderr, flush=True))


@dataclass(slots=True)
class WorkerReport:
    """What a worker did, for its last line: jobs that ended, failed ones among them, and those handed back."""

    worker_id: str
    ended: int = 0
    failed: int = 0
    handed_back: int = 0


async def serve(url: str, engine: Engine, options: WorkerOptions, shutdown: Shutdown) -> WorkerReport:
    """Serve `engine` until `shutdown` is asked for (or the queue is empty). The caller closes the engine.

    Raises EngineUnavailable when the first probe fails, RedisUnavailable when Redis cannot be used at the start. Later
    on both are waited for.
    """
    info = await engine.probe()
    with redis_errors(url):
        worker = await Worker.start(url, engine, info, options, shutdown)
    try:
        return await worker.run()
    finally:
        await worker.close()


class Worker:
    """One running worker. Made by `start`; nothing else builds its parts."""

    def __init__(self, url: str, engine: Engine, info: EngineInfo, options: WorkerOptions, shutdown: Shutdown) -> None:
        self.host = socket.gethostname()
        self.id = f"{self.host}-{os.getpid()}-{secrets.token_hex(3)}"
        self._engine = engine
        self._info = info
        self._options = options
        self._shutdown = shutdown
        self._version = version("llmq-streams")
        self._keys = QueueKeys(options.queue)
        self._concurrency = options.concurrency or info.slots or DEFAULT_CONCURRENCY
        self._settings = LiveSettings.from_hash({})
        self._state = "starting"
        self._started_at = time.time()
        self._report = WorkerReport(self.id)
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._gate = Gate(self._concurrency)
        self._batch_cap: int | None = None
        self._measuring = Measuring()
        self._contact = Contact(self._settings.lease_s)
        self._redis = connect(url, client_name=self.id)
        self._ear = connect(url, blocking_s=2 * LISTEN_S, client_name=self.id)
        self._keeper_redis = connect_sync(url, timeout_s=TIMEOUT_S, client_name=self.id)
        self._deltas = DeltaSender(self._redis, self._keys, self.id, self.lease_lost)
        self._executor = Executor(engine, self._gate, self._deltas, lambda: self._settings, self._measuring.begun)
        self._keeper = LeaseKeeper(
            self._keeper_redis,
            self._keys,
            self.id,
            self._contact,
            self,
            self._heartbeat,
            lease_s=self._settings.lease_s,
        )
        self._desk = Desk(
            self._redis,
            self._keys,
            self.id,
            self.host,
            self._keeper,
            self._contact,
            self._allowance,
            self._make_way,
            lambda: self._bells.reconsider(),
        )
        self._bells = Bells(
            self._ear,
            self._redis,
            self._keys,
            self.id,
            self._contact,
            self._allowance,
            self._desk.look,
            self._command,
        )
        self._sweeper = Sweeper(
            self._redis, self._keys, self.id, self._contact, lambda: self._settings.lease_s, self._end
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._trips: asyncio.Task[None]

    @classmethod
    async def start(
        cls, url: str, engine: Engine, info: EngineInfo, options: WorkerOptions, shutdown: Shutdown
    ) -> Worker:
        """Make a worker that has written its first heartbeat and serves."""
        worker = cls(url, engine, info, options, shutdown)
        try:
            worker.beaten(await asyncio.to_thread(worker._keeper.first_beat))
            if worker._failure.done():
                worker._failure.result()
        except BaseException:
            await worker._close_clients()
            raise
        worker._keeper.start()
        worker._state = "ready"
        worker._trips = worker._go(worker._desk.trips())
        worker._go(worker._bells.listen())
        worker._go(worker._sweeper.sweeps())
        worker._go(worker._watch_engine())
        worker._keeper.beat_soon()
        options.announce(worker._ready_line())
        return worker

    async def run(self) -> WorkerReport:
        """Serve until asked to stop, then drain; raises what a part of the worker died of."""
        slots = [asyncio.create_task(self._slot()) for _ in range(self._concurrency)]
        for slot in slots:
            slot.add_done_callback(self._part_ended)
        asked = asyncio.ensure_future(self._shutdown.quiet())
        empty = asyncio.ensure_future(self._empty()) if self._options.until_empty else None
        ends = [end for end in (asked, empty, self._failure) if end is not None]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:  # also where this call is cancelled, or a part has died: what runs is handed back, not left to lapse
            if not asked.done() and not (empty is not None and empty.done()):
                self._shutdown.request_at_once()
            for end in ends[:-1]:
                end.cancel()
            await self._drain(slots)
        if self._failure.done():
            self._failure.result()
        return self._report

    async def close(self) -> None:
        """End every part, leave the list of workers, and close the connections."""
        await _cancelled(self._tasks)
        await asyncio.to_thread(self._keeper.stop)
        if self._desk.clear:  # else the sweepers have to see that a worker is missing
            try:
                async with asyncio.timeout(2):
                    await self._redis.zrem(self._keys.workers, self.id)
                    await self._redis.delete(self._keys.worker(self.id), self._keys.control(self.id))
            except OUT_OF_REACH:
                pass  # the heartbeat has a TTL; whoever lists workers sees its age
        await self._close_clients()

    # --- the slots ------------------------------------------------------------------------------------------------

    async def _slot(self) -> None:
        while (lease := await self._desk.take()) is not None:
            self._measuring.started(lease)
            outcome = await self._executor.run(lease)
            self._desk.settle(lease, outcome)
            self._note(lease, outcome)

    def _note(self, lease: Lease, outcome: Outcome) -> None:
        self._measuring.ended(lease, outcome)
        match outcome:
            case HandedBack(reason=reason):
                self._report.handed_back += 1
                if reason in (Reason.OVERLOAD, Reason.ENGINE_GONE):
                    self._keeper.beat_soon()
            case Answered(status_code=status):
                self._report.ended += 1
                self._report.failed += status >= 400
            case _:
                self._report.failed += 1

    def _end(self, lease: Lease, outcome: Outcome) -> None:
        """End a job that the sweeper claimed only for this."""
        self._keeper.keep(lease.fence)
        self._desk.settle(lease, outcome)

    # --- what may be taken ----------------------------------------------------------------------------------------

    def _allowance(self) -> Allowance:
        held = self._desk.held
        self._batch_cap = self._gate.batch_cap(time.monotonic())
        interactive = sum(1 for lease in held if lease.cls is TrafficClass.INTERACTIVE)
        return allow(
            Snapshot(
                concurrency=self._concurrency,
                running_interactive=interactive,
                running_batch=len(held) - interactive,
                preemptable=sum(1 for running in self._executor.running.values() if _preemptable(running)),
                suspects=sum(1 for lease in held if lease.suspect),
                reserve=self._reserve(),
                preempt=self._settings.preempt,
                batch_cap=self._batch_cap,
                taking=not self._gate.gone and not self._desk.closed,
            )
        )

    def _reserve(self) -> int:
        for given in (self._options.reserve, self._settings.reserve):
            if given is not None:
                return given
        return default_reserve(self._concurrency)

    def _make_way(self) -> None:
        """Preempt batch requests for what has been claimed above the free slots."""
        running = list(self._executor.running.values())
        stopping = sum(1 for r in running if r.stop is not None)
        over = len(self._desk.held) - stopping - self._concurrency
        candidates = [Candidate(r.lease.fence, r.started_at, protected=not _preemptable(r)) for r in running]
        for fence in victims(candidates, over):
            assert isinstance(fence, Fence)
            self._executor.stop(fence, Stop.PREEMPTED)

    # --- what the keeper says -------------------------------------------------------------------------------------

    def lease_lost(self, fence: Fence) -> None:
        """Abort a request whose lease belongs to another delivery."""
        self._keeper.drop(fence)
        self._stop(fence, Stop.LOST, Abandoned())

    def lease_overdue(self, fence: Fence) -> None:
        """Abort a request whose lease could not be renewed for too long."""
        self._stop(fence, Stop.OVERDUE, HandedBack(Reason.SHUTDOWN))

    def job_cancelled(self, fence: Fence) -> None:
        """Abort a request whose job was cancelled."""
        self._stop(fence, Stop.CANCELLED, VERDICTS["cancelled"])

    def _stop(self, fence: Fence, why: Stop, unstarted: Outcome) -> None:
        """Stop a request; `unstarted` is its outcome where no slot has begun with it."""
        if not self._executor.stop(fence, why):
            self._desk.withdraw(fence, unstarted)

    def beaten(self, beat: Beat) -> None:
        """Take over the live settings and Redis' time."""
        if beat.format > FORMAT:
            self._fail(
                LLMQError(
                    f"the queue {self._options.queue!r} has data of format {beat.format}, this llmq reads up to "
                    f"{FORMAT}: update llmq on this host"
                )
            )
        self._settings = LiveSettings.from_hash(beat.config)
        self._keeper.lease_s = self._settings.lease_s
        self._contact.lease_is(self._settings.lease_s)
        self._measuring.clock(beat.now_ms)

    def keeper_died(self, error: BaseException) -> None:
        """End the process: without the keeper no lease is safe."""
        self._fail(error)

    # --- loops ----------------------------------------------------------------------------------------------------

    def _command(self, text: str) -> None:
        verb, _, rest = text.partition(" ")
        match verb:
            case "cancel":
                lane, _, entry = rest.rpartition(" ")
                self._stop_where(lambda fence: fence.lane == lane and fence.entry == entry)
            case "cancel-lane":
                self._stop_where(lambda fence: fence.lane == rest)
            case "drain":
                self._shutdown.request()

    def _stop_where(self, matches: Callable[[Fence], bool]) -> None:
        for fence in [lease.fence for lease in self._desk.held if matches(lease.fence)]:
            self.job_cancelled(fence)

    async def _watch_engine(self) -> None:
        """While the engine is gone, probe it until it is healthy."""
        pause = PROBE_S
        while True:
            await asyncio.sleep(pause)
            if not self._gate.gone:
                continue
            self._state = "engine_down" if self._state == "ready" else self._state
            try:
                self._info = await self._engine.probe()
            except EngineUnavailable:
                pause = min(LONGEST_PROBE_S, pause * 1.5)
            else:
                pause = PROBE_S
                self._gate.back()
                self._state = "ready" if self._state == "engine_down" else self._state
                self._desk.look()

    async def _empty(self) -> None:
        """Wait until the queue holds no lane: nothing waits, runs, or may still be submitted to an open batch."""
        while True:
            await asyncio.sleep(EMPTY_CHECK_S)
            try:
                if self._desk.clear and await self._redis.exists(self._keys.lanes) == 0:
                    return
            except OUT_OF_REACH:
                continue  # the trips wait for it

    # --- the end --------------------------------------------------------------------------------------------------

    async def _drain(self, slots: list[asyncio.Task[None]]) -> None:
        """End in three phases: quiet, deadline, hand back."""
        self._state = "draining"
        self._keeper.beat_soon()
        self._desk.close()
        finished = asyncio.ensure_future(asyncio.wait(slots))
        at_once = asyncio.ensure_future(self._shutdown.at_once())
        ends: list[asyncio.Future[Any]] = [at_once, finished, self._failure]
        await asyncio.wait(ends, timeout=self._options.grace, return_when=asyncio.FIRST_COMPLETED)
        for fence in list(self._executor.running):
            self._executor.stop(fence, Stop.SHUTDOWN)
        settled: asyncio.Future[None] = asyncio.ensure_future(self._all_settled(finished))
        # What could not be settled runs again when its lease has run out.
        await asyncio.wait([settled, self._trips], timeout=LAST_SECONDS_S, return_when=asyncio.FIRST_COMPLETED)
        await _cancelled([at_once, settled, finished, *slots])

    async def _all_settled(self, finished: asyncio.Future[Any]) -> None:
        await finished
        await self._deltas.close()
        await self._desk.settled()

    async def _close_clients(self) -> None:
        await self._redis.aclose()
        await self._ear.aclose()
        self._keeper_redis.close()

    def _go(self, loop: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(loop)
        task.add_done_callback(self._part_ended)
        self._tasks.append(task)
        return task

    def _part_ended(self, task: asyncio.Task[Any]) -> None:
        """A loop that ends by an error ends the process: a worker that is half alive looks well and serves nothing."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    # --- what it says of itself -----------------------------------------------------------------------------------

    def _heartbeat(self) -> Mapping[str, str | int]:
        running = [r.lease for r in list(self._executor.running.values())]
        interactive = sum(1 for lease in running if lease.cls is TrafficClass.INTERACTIVE)
        cap = self._batch_cap
        return {
            "id": self.id,
            "host": self.host,
            "pid": os.getpid(),
            "gpu": self._options.gpu,
            "queue": self._options.queue,
            "engine": self._info.kind,
            "engine_url": self._info.url,
            "models": json.dumps(self._info.models),
            "simulated": int(self._info.simulated),
            "slots": self._concurrency,
            "busy_i": interactive,
            "busy_b": len(running) - interactive,
            "batch_cap": self._concurrency - self._reserve() if cap is None else cap,
            "reserve": self._reserve(),
            "state": self._state,
            "started_at": round(self._started_at * 1000),
            "seen_at": round(time.time() * 1000),
            "claimed_at": round(self._desk.claimed_at * 1000),
            "lanes": json.dumps(sorted({lease.fence.lane for lease in running})),
            "version": self._version,
            **self._measuring.snapshot(),
        }

    def _ready_line(self) -> str:
        info = self._info
        models = ", ".join(info.models[:3]) + (", ..." if len(info.models) > 3 else "")
        simulated = " SIMULATED" if info.simulated else ""
        return (
            f"ready {self.id} queue={self._options.queue} gpu={self._options.gpu} engine={info.kind}{simulated} "
            f"url={info.url} models={models or '-'} concurrency={self._concurrency} reserve={self._reserve()}"
        )


def _preemptable(running: Running) -> bool:
    lease = running.lease
    return lease.cls is TrafficClass.BATCH and running.in_engine and running.stop is None and not lease.protected()


async def _cancelled(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks until they have ended: Python 3.11's `wait_for`, in redis-py, loses a cancel at the wrong moment."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.5)
