"""The worker: one process that serves one engine, from the first heartbeat to the last hand back.

Around the slots (`slots.py`, the way of a job) stand small loops, each in a module of its own: the desk's trips, the
bells, the lease keeper (a thread), the sweeper. This module builds them, starts them and ends them, and takes what the
keeper learns; it neither chooses jobs nor talks to Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any

from llmq.scheduler.cipher import Cipher
from llmq.scheduler.connection import connect, connect_sync, redis_errors
from llmq.scheduler.errors import EngineUnavailable, LLMQError
from llmq.scheduler.keyring import NO_KEYS, Keyring
from llmq.scheduler.keys import QueueKeys
from llmq.scheduler.lease import Fence
from llmq.scheduler.live import LiveSettings
from llmq.scheduler.logs import Event, note
from llmq.scheduler.queue import KEY_ID
from llmq.scheduler.scripts import Beat
from llmq.scheduler.tuned import Tuned, tuned_for
from llmq.workers.bells import LISTEN_S, Bells
from llmq.workers.card import Card
from llmq.workers.contact import Contact
from llmq.workers.deltas import DeltaSender
from llmq.workers.desk import Desk
from llmq.workers.engines.base import Engine, EngineInfo
from llmq.workers.executor import Executor
from llmq.workers.gate import Gate
from llmq.workers.governing import Governing
from llmq.workers.journal import note_changes, note_lease
from llmq.workers.keeper import TIMEOUT_S, LeaseKeeper
from llmq.workers.measuring import Measuring
from llmq.workers.metrics import MetricsAddress, WorkerMetrics, metrics_served
from llmq.workers.reach import OUT_OF_REACH
from llmq.workers.shutdown import Shutdown
from llmq.workers.slots import Slots, WorkerReport
from llmq.workers.sweeper import Sweeper

#: Slots where the engine does not tell how many requests it runs at once.
DEFAULT_CONCURRENCY = 8

#: The newest format of a queue's data that this version reads.
FORMAT = 1

#: After the grace: how long aborted requests and their hand back may take before the process ends all the same.
LAST_SECONDS_S = 10.0

#: How often, and how soon after another, a cancelled job is looked for. The next renewal tells of it, too, but later.
CANCEL_AGAIN = 4
CANCEL_AGAIN_S = 0.2

PROBE_S = 1.0
LONGEST_PROBE_S = 5.0
EMPTY_CHECK_S = 0.1


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """How one worker is run. `concurrency` and `reserve` of None mean the engine's slots, and the live setting.

    `batch_cap` is the most batch requests that it ever runs at once; None leaves that to reserve and governor.
    `metrics` of None tells none; `announce` is given the lines that say that it serves, and where its metrics are.
    """

    queue: str = "default"
    gpu: str = "0"
    concurrency: int | None = None
    reserve: int | None = None
    batch_cap: int | None = None
    grace: float = 30.0
    until_empty: bool = False
    keyring: Keyring = NO_KEYS
    metrics: MetricsAddress | None = None
    announce: Callable[[str], None] = field(default=lambda line: print(line, file=sys.stderr, flush=True))


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
        self._options = options
        self._shutdown = shutdown
        self._keys = QueueKeys(options.queue)
        self._settings = LiveSettings.from_hash({})
        self._config: dict[bytes, bytes] | None = None
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        concurrency = options.concurrency or info.slots or DEFAULT_CONCURRENCY
        self._gate = Gate(concurrency)
        self._measuring = Measuring()
        self._contact = Contact(self._settings.lease_s)
        self._redis = connect(url, client_name=self.id)
        self._ear = connect(url, blocking_s=2 * LISTEN_S, client_name=self.id)
        self._keeper_redis = connect_sync(url, timeout_s=TIMEOUT_S, client_name=self.id)
        cipher = Cipher(options.keyring, options.queue)
        self._deltas = DeltaSender(self._redis, self._keys, self.id, self.lease_lost, cipher)
        self._governing = Governing(
            lambda: self._settings,
            lambda: self._slots.load(),
            self._govern,
            on_cut_off=self._measuring.cut_off,
            tuned=self._tuned,
        )
        self._executor = Executor(
            engine,
            self._gate,
            self._deltas,
            lambda: self._settings,
            lambda: self._card.engine,
            self._governing,
            self._measuring.begun,
            cipher,
        )
        self._slots = Slots(
            concurrency,
            options.reserve,
            self._executor,
            self._gate,
            self._governing,
            self._measuring,
            lambda: self._settings,
            WorkerReport(self.id),
            options.batch_cap,
        )
        self._card = Card(self.id, self.host, options.queue, options.gpu, info)
        self._keeper = LeaseKeeper(
            self._keeper_redis,
            self._keys,
            self.id,
            self._contact,
            self,
            lambda: self._card.heartbeat(self._slots, self._measuring, self._governing),
            self._measuring.totals,
            lease_s=self._settings.lease_s,
        )
        self._desk = Desk(
            self._redis,
            self._keys,
            self.id,
            self.host,
            self._keeper,
            self._contact,
            self._slots,
            lambda: self._bells.reconsider(),
        )
        self._slots.desk = self._desk
        self._bells = Bells(
            self._ear,
            self._redis,
            self._keys,
            self.id,
            self._contact,
            self._slots.allowance,
            self._desk.look,
            self._command,
        )
        self._sweeper = Sweeper(
            self._redis,
            self._keys,
            self.id,
            self._contact,
            lambda: self._settings.lease_s,
            self._desk.end,
            self._measuring.reclaimed,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._metrics = contextlib.ExitStack()
        self._trips: asyncio.Task[None]

    @classmethod
    async def start(
        cls, url: str, engine: Engine, info: EngineInfo, options: WorkerOptions, shutdown: Shutdown
    ) -> Worker:
        """Make a worker that has written its first heartbeat and serves."""
        worker = cls(url, engine, info, options, shutdown)
        try:
            await asyncio.to_thread(worker._tell_metrics)
            worker.beaten(await asyncio.to_thread(worker._keeper.first_beat))
            if worker._failure.done():
                worker._failure.result()
        except BaseException:
            worker._metrics.close()
            await worker._close_clients()
            raise
        worker._keeper.start()
        worker._card.state = "ready"
        worker._trips = worker._go(worker._desk.trips())
        worker._go(worker._bells.listen())
        worker._go(worker._sweeper.sweeps())
        worker._go(worker._watch_engine())
        worker._go(worker._governing.govern())
        worker._keeper.beat_soon()
        options.announce(worker._card.ready_line(worker._slots))
        return worker

    async def run(self) -> WorkerReport:
        """Serve until asked to stop, then drain; raises what a part of the worker died of."""
        slots = [asyncio.create_task(self._slots.serve_one()) for _ in range(self._slots.concurrency)]
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
            report = self._slots.report
            note(Event.DRAINED, ended=report.ended, failed=report.failed, handed_back=report.handed_back)
        if self._failure.done():
            self._failure.result()
        return self._slots.report

    async def close(self) -> None:
        """End every part, leave the list of workers, and close the connections."""
        await _cancelled(self._tasks)
        await asyncio.to_thread(self._keeper.stop)
        await asyncio.to_thread(self._metrics.close)
        if self._desk.clear:  # else the sweepers have to see that a worker is missing
            try:
                async with asyncio.timeout(2):
                    await asyncio.to_thread(self._keeper.last_beat)
                    await self._redis.zrem(self._keys.workers, self.id)
                    await self._redis.delete(self._keys.worker(self.id), self._keys.control(self.id))
            except OUT_OF_REACH:
                pass  # the heartbeat has a TTL; whoever lists workers sees its age
        await self._close_clients()

    # --- what the keeper says -------------------------------------------------------------------------------------

    def lease_lost(self, fence: Fence) -> None:
        """Abort a request whose lease belongs to another delivery."""
        note_lease(Event.LEASE_LOST, fence)
        self._keeper.drop(fence)
        self._slots.lose(fence)

    def lease_overdue(self, fence: Fence) -> None:
        """Abort a request whose lease could not be renewed for too long."""
        note_lease(Event.LEASE_OVERDUE, fence)
        self._slots.give_up(fence)

    def job_cancelled(self, fence: Fence) -> None:
        """Abort a request whose job was cancelled."""
        self._slots.cancel(fence)

    def beaten(self, beat: Beat) -> None:
        """Take over the live settings and Redis' time."""
        if beat.format > FORMAT:
            self._fail(
                LLMQError(
                    f"the queue {self._options.queue!r} has data of format {beat.format}, this llmq reads up to "
                    f"{FORMAT}: update llmq on this host"
                )
            )
        self._check_key(beat.config.get(KEY_ID.encode(), b"").decode(errors="replace"))
        if self._config is not None:
            note_changes(self._config, beat.config)
        self._config = beat.config
        self._settings = LiveSettings.from_hash(beat.config)
        self._keeper.lease_s = self._settings.lease_s
        self._contact.lease_is(self._settings.lease_s)
        self._measuring.clock(beat.now_ms)

    def _check_key(self, key_id: str) -> None:
        """Refuse to start without the key that the queue is encrypted with; claim nothing while it is another one."""
        keyring = self._options.keyring
        missing = bool(key_id) and not keyring.holds(key_id)
        if missing and self._card.state == "starting":
            self._fail(keyring.missing(key_id, self._options.queue))
        elif missing != self._gate.locked:
            self._gate.locked = missing
            if missing:
                note(Event.KEY_MISSING, queue=self._options.queue, key_id=key_id)
                self._change_state("ready", "key_missing")
            else:
                note(Event.KEY_BACK, queue=self._options.queue, key_id=key_id or None)
                self._change_state("key_missing", "ready")
                self._desk.look()

    def keeper_died(self, error: BaseException) -> None:
        """End the process: without the keeper no lease is safe."""
        self._fail(error)

    def _govern(self) -> None:
        """Do what the governor has decided: preempt what is too much, claim what may come on top."""
        self._slots.make_way()
        self._desk.look()

    def _tuned(self) -> Tuned | None:
        """Return what `llmq tune` found to hold at this engine; None where it was not asked."""
        return tuned_for(self._config or {}, self._card.engine.kind, self._card.engine.models)

    # --- loops ----------------------------------------------------------------------------------------------------

    def _command(self, text: str) -> None:
        verb, _, rest = text.partition(" ")
        match verb:
            case "cancel":
                lane, _, entry = rest.rpartition(" ")
                self._cancel(lambda fence: fence.lane == lane and fence.entry == entry)
            case "cancel-lane":
                self._cancel(lambda fence: fence.lane == rest)
            case "drain":
                self._shutdown.request()

    def _cancel(self, matches: Callable[[Fence], bool], again: int = CANCEL_AGAIN) -> None:
        """Cancel now, and what a claim has taken whose reply is still on its way: the command may have overtaken it."""
        self._slots.cancel_where(matches)
        if again:
            asyncio.get_running_loop().call_later(CANCEL_AGAIN_S, self._cancel, matches, again - 1)

    async def _watch_engine(self) -> None:
        """While the engine is gone, probe it until it is healthy."""
        pause, down_at = PROBE_S, 0.0
        while True:
            await asyncio.sleep(pause)
            if not self._gate.gone:
                continue
            if not down_at:
                down_at = time.monotonic()
                note(Event.ENGINE_DOWN, url=self._card.engine.url, running=len(self._slots.running()))
            self._change_state("ready", "engine_down")
            try:
                self._card.engine = await self._engine.probe()
            except EngineUnavailable:
                pause = min(LONGEST_PROBE_S, pause * 1.5)
            else:
                note(Event.ENGINE_BACK, url=self._card.engine.url, down_s=time.monotonic() - down_at)
                pause, down_at = PROBE_S, 0.0
                self._gate.back()
                self._change_state("engine_down", "ready")
                self._desk.look()

    def _change_state(self, before: str, after: str) -> None:
        if self._card.state == before:
            self._card.state = after
            self._keeper.beat_soon()

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
        note(Event.DRAINING, queue=self._options.queue, running=len(self._slots.running()))
        self._card.state = "draining"
        self._keeper.beat_soon()
        self._desk.close()
        finished = asyncio.ensure_future(asyncio.wait(slots))
        at_once = asyncio.ensure_future(self._shutdown.at_once())
        ends: list[asyncio.Future[Any]] = [at_once, finished, self._failure]
        await asyncio.wait(ends, timeout=self._options.grace, return_when=asyncio.FIRST_COMPLETED)
        self._slots.stop_all()
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

    def _tell_metrics(self) -> None:
        if self._options.metrics is not None:
            metrics = WorkerMetrics(self._card, self._slots, self._measuring, self._contact)
            self._metrics.enter_context(metrics_served(metrics, self._options.metrics, self._options.announce))

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


async def _cancelled(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks until they have ended: Python 3.11's `wait_for`, in redis-py, loses a cancel at the wrong moment."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.5)
