"""The conductor: leads one batch from its order to its end, from wherever another gateway has left it.

Each step first looks at what is there, so that all of it may be cut off anywhere and begun again by anybody:

    no `accepted`       examine the input: `failed`, or accepted
    not in Redis        open the batch there; lines that the parts hold already are not queued again
    not sealed          feed the lines on, from the one that Redis expects, as it has room
    not ended           gather results into parts (`gathering.py`)
    ended               make the files (`finishing.py`), write `ended`
    `ended`             take the batch out of Redis, remove parts and mark
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass

from llmq.gateway.batch.batch_object import ENDS, Outcome, ended_object, extra_of, life_of
from llmq.gateway.batch.clock import QueueClock
from llmq.gateway.batch.examination import InputFault, examine, fault_of_file
from llmq.gateway.batch.facts import Accepted, Ledger, Mark, Order
from llmq.gateway.batch.files import KEEP_INPUT_S, Files
from llmq.gateway.batch.finishing import Ending, Finishing, has_gaps
from llmq.gateway.batch.gathering import Gathering
from llmq.gateway.batch.hold import Hold, HoldLost
from llmq.gateway.batch.parts import Chain, load_chain
from llmq.gateway.batch.slices import in_slices
from llmq.gateway.batch.storage import Storage
from llmq.scheduler.batch_record import BatchRecord
from llmq.scheduler.batches import Batches
from llmq.scheduler.errors import InputFileError, LLMQError, NotFoundError, UsageError
from llmq.scheduler.feeding import encode_line
from llmq.scheduler.input_file import InputFile
from llmq.scheduler.line_form import parse_request
from llmq.scheduler.line_set import LineSet
from llmq.scheduler.lines import InputLine
from llmq.scheduler.scripts import SubmitLine
from llmq.scheduler.tasks import end_tasks

#: Seconds between two looks at a batch: a fiftieth of its time so far, so that a short one is quick and a long one
#: costs nothing.
LOOK_PART, LEAST_LOOK_S, MOST_LOOK_S = 1 / 50, 0.05, 1.0

#: Seconds after which a mark without an order is what is left of a gateway that died while it took the batch up.
_ORPHAN_S = 600

#: Batches of which results are gathered at a time, and of which input is examined.
_GATHERED_AT_A_TIME = 4
_EXAMINED_AT_A_TIME = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """What an input may be: bytes of the file, bytes of a line, requests."""

    file_bytes: int = 200 * 1000 * 1000
    line_bytes: int = 1 << 20
    lines: int = 50_000


class Conductor:
    """Leads batches; `say` is told, in a line each, what an operator should know."""

    def __init__(
        self,
        batches: Batches,
        storage: Storage,
        files: Files,
        ledger: Ledger,
        clock: QueueClock,
        limits: Limits,
        say: Callable[[str], None],
    ) -> None:
        self._batches = batches
        self._storage = storage
        self._files = files
        self._ledger = ledger
        self._clock = clock
        self._limits = limits
        self._say = say
        self._gathered = asyncio.Semaphore(_GATHERED_AT_A_TIME)
        self._examined = asyncio.Semaphore(_EXAMINED_AT_A_TIME)
        self._orphans: dict[str, float] = {}

    async def conduct(self, mark: Mark, hold: Hold) -> None:
        """Lead a batch to its end, under a hold. Whatever it raises, it may be called again."""
        facts = await self._ledger.facts(mark.tenant, mark.batch_id)
        if facts.ended is None:
            if facts.order is None:
                await self._forget_orphan(mark)
                return
            accepted = facts.accepted or await self._accept(facts.order)
            if accepted is not None:
                await self._carry_out(facts.order, accepted, hold)
        await self._clear_away(mark.batch_id)

    # --- the input --------------------------------------------------------------------------------------------------

    async def _accept(self, order: Order) -> Accepted | None:
        """Examine the input and write down what was found; None where the batch has ended by that."""
        try:
            async with self._examined, self._input(order) as file:
                examined = await examine(file, order.endpoint, self._limits.lines)
                digest = "" if examined.faults else file.digest
                filename = await self._files.filename(order.tenant, order.input_file_id)
        except InputFileError as error:
            await self._fail(order, [fault_of_file(error)])
            return None
        except FileNotFoundError:
            await self._fail(order, [_no_input(order)])
            return None
        cancel_at = (await self._ledger.facts(order.tenant, order.id)).cancel_at
        if cancel_at is not None:
            outcome = Outcome("cancelled", None, int(await self._clock.now()), cancel_at)
            await self._end(order, None, outcome)
            return None
        if examined.faults:
            await self._fail(order, list(examined.faults))
            return None
        accepted = Accepted(int(await self._clock.now()), examined.total, digest, filename, examined.model)
        await self._ledger.accept(order, accepted)
        return accepted

    async def _fail(self, order: Order, faults: list[InputFault]) -> None:
        await self._end(order, None, Outcome("failed", None, int(await self._clock.now()), faults=faults))

    @contextlib.asynccontextmanager
    async def _input(self, order: Order) -> AsyncGenerator[InputFile, None]:
        """Open the input of a batch. Raises FileNotFoundError, and InputFileError for what is no file of requests."""
        file = await self._files.open_input(order.tenant, order.input_file_id, self._limits.line_bytes)
        with file:
            yield file

    async def _forget_orphan(self, mark: Mark) -> None:
        """Remove a mark whose order never came, once it is too old to come."""
        first_seen = self._orphans.setdefault(mark.batch_id, time.monotonic())
        if time.monotonic() - first_seen > _ORPHAN_S:
            await self._ledger.close(mark.batch_id)
            del self._orphans[mark.batch_id]

    # --- the lines --------------------------------------------------------------------------------------------------

    async def _carry_out(self, order: Order, accepted: Accepted, hold: Hold) -> None:
        while True:
            chain = await load_chain(self._storage, order.id, hold.token)
            try:
                record = await self._open(order, accepted, chain, hold)
                if record is not None:
                    record = await self._see_through(order, record, chain)
                break
            except NotFoundError:
                self._say(f"batch {order.id}: Redis no longer knows it; lines without a result are queued again")
        hold.check()
        await self._finish(order, accepted, record, chain)

    async def _open(self, order: Order, accepted: Accepted, chain: Chain, hold: Hold) -> BatchRecord | None:
        """Return the batch in Redis, opened where it is not there; None where it is too late for that."""
        with contextlib.suppress(NotFoundError):
            return await self._batches.show(order.id, patient=True)
        window = order.expires_at - await self._clock.now()
        if window <= 0 or await self._cancel_at(order) is not None:
            return None
        hold.check()  # one that slept finds the batch gone because another gateway has ended it
        life = await chain.begin_life()
        hold.check()
        record = await self._batches.open(
            name=accepted.filename,
            digest=accepted.digest,
            tenant=order.tenant,
            window=window,
            batch_id=order.id,
            extra=extra_of(life, chain.head.sums),
        )
        if (await self._ledger.facts(order.tenant, order.id)).ended is not None:  # it slept just before
            await self._batches.cancel(order.id)
            await self._batches.delete(order.id)
            raise HoldLost(f"{order.id} was ended by another gateway")
        return record

    async def _see_through(self, order: Order, record: BatchRecord, chain: Chain) -> BatchRecord:
        """Feed and gather until the batch has ended in Redis. Raises NotFoundError where Redis loses it."""
        life, before = life_of(record)
        gathering = Gathering(self._batches, order.id, life, chain, before.completed + before.failed, self._gathered)
        await gathering.begin()
        # After the batch is open: whoever cancels writes the fact first and then looks for an open batch.
        if not record.ended and await self._cancel_at(order) is not None:
            await self._batches.cancel(order.id)
        feeding = None if record.sealed else asyncio.create_task(self._feed(order, record.next_line, chain.taken))
        started = time.monotonic()
        try:
            while not await gathering.step(record):
                look = LOOK_PART * (time.monotonic() - started)
                await asyncio.sleep(min(MOST_LOOK_S, max(LEAST_LOOK_S, look)))
                if record.overdue(await self._clock.now()):
                    await self._batches.reap(order.id)
                record = await self._batches.show(order.id, patient=True)
                if feeding is not None and feeding.done():
                    _check_fed(feeding, record)
                    feeding = None
        finally:
            if feeding is not None:
                await end_tasks(feeding)
        return record

    async def _feed(self, order: Order, first: int, taken: LineSet) -> None:
        async with self._input(order) as file:
            lines = _encoded(file, order.endpoint, first, taken)
            await self._batches.feed_encoded(order.id, lines, resume="the gateway goes on by itself")

    async def _cancel_at(self, order: Order) -> int | None:
        return (await self._ledger.facts(order.tenant, order.id)).cancel_at

    # --- the end ----------------------------------------------------------------------------------------------------

    async def _finish(self, order: Order, accepted: Accepted, record: BatchRecord | None, chain: Chain) -> None:
        ending = self._ending(order, record, await self._cancel_at(order))
        finishing = Finishing(self._storage, self._files, order, accepted, ending)
        async with contextlib.AsyncExitStack() as stack:
            file = await stack.enter_async_context(self._input(order)) if has_gaps(chain, accepted) else None
            outcome = await finishing.finish(chain, file, await self._clock.now())
        await self._end(order, accepted, outcome, finishing.sequence)

    async def _end(self, order: Order, accepted: Accepted | None, outcome: Outcome, sequence: bytes = b"") -> None:
        """Write the last fact. What is known of a batch goes with its files; where it has made none, as inputs do."""
        keep_s = order.keep_s
        if keep_s is None and outcome.output_file_id is None and outcome.error_file_id is None:
            keep_s = KEEP_INPUT_S
        goes_at = None if keep_s is None else int(await self._clock.now()) + keep_s
        await self._ledger.end(order, ended_object(order, accepted, outcome), sequence, goes_at=goes_at)

    async def _clear_away(self, batch_id: str) -> None:
        """Remove what only a batch that has not ended needs; its mark is the last, so that nothing is left behind."""
        with contextlib.suppress(NotFoundError):
            try:
                await self._batches.delete(batch_id)  # what it holds is in the files, and Redis' memory is dear
            except NotFoundError:
                raise
            except UsageError:  # a gateway that had slept has opened it once more
                await self._batches.cancel(batch_id)
                raise
        await self._ledger.close(batch_id)

    def _ending(self, order: Order, record: BatchRecord | None, cancel_at: int | None) -> Ending:
        """Say how the lines have ended; without a record none could start any more."""
        if record is None:
            return (
                Ending("expired", order.expires_at) if cancel_at is None else Ending("cancelled", cancel_at, cancel_at)
            )
        status, ended_at = ENDS[record.status], record.ended_at or record.created_at
        if status != "cancelled":
            return Ending(status, ended_at)
        return Ending(status, ended_at, cancel_at or int(record.cancelling_at or ended_at))


def _check_fed(feeding: asyncio.Task[None], record: BatchRecord) -> None:
    """Raise what a feed ended by, unless that is what ends the batch."""
    error = feeding.exception()
    if error is None or (isinstance(error, LLMQError) and record.sealed):
        return
    raise error


def _no_input(order: Order) -> InputFault:
    return InputFault("input_file_not_found", f"The input file {order.input_file_id} is not there any more.")


async def _encoded(file: InputFile, endpoint: str, first: int, taken: LineSet) -> AsyncGenerator[SubmitLine, None]:
    async for lines in in_slices(_submit_lines(file, endpoint, first, taken)):
        for line in lines:
            yield line


def _submit_lines(file: InputFile, endpoint: str, first: int, taken: LineSet) -> Iterator[SubmitLine]:
    for number, raw, offset in file.raw_lines():
        if number >= first and raw is not None and number not in taken:
            key, job = parse_request(raw, endpoint)
            yield encode_line(InputLine(number, key, job, offset, proven=True))
