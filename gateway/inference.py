"""The inference routes: a call comes in, becomes a job of the queue, and its answer goes out, whole or streamed.

Read, let in, submit, wait, answer: what each of these means is in the modules named so. The client's leaving takes the
job back, and its place among the admitted is given back however the call ends.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from llmq.gateway.admission import Admission, Caller, Pass
from llmq.gateway.answers import answer_of
from llmq.gateway.boundary import Exchange
from llmq.gateway.call import Call, read_call
from llmq.gateway.direct import Direct
from llmq.gateway.errors import ApiError
from llmq.gateway.events import Events
from llmq.gateway.jobs import Jobs, OpenJob
from llmq.gateway.streaming import Stream
from llmq.gateway.vigil import Vigil, Watchtower
from llmq.scheduler.job import TrafficClass
from llmq.scheduler.job_record import JobRecord

#: The job's id, so that `llmq why` and `llmq job show` can be asked about a call.
JOB_HEADER = "x-llmq-job-id"


@dataclass(frozen=True, slots=True)
class Service:
    """What the inference routes work with; `direct` is None where there is no fallback."""

    jobs: Jobs
    admission: Admission
    tower: Watchtower
    direct: Direct | None = None


class Inference:
    """One inference route, as an ASGI application."""

    def __init__(self, url: str, service: Service) -> None:
        self._url = url
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one call. Raises ApiError."""
        request = Request(scope, receive)
        exchange: Exchange = request.state.exchange
        caller: Caller = request.state.caller
        call = read_call(self._url, request.headers, await request.body())
        entered = await self._service.admission.enter(caller, call.cls, call.job.cost())
        exchange.headers.update(entered.headers)
        used: int | None = None
        try:
            used = await self._serve(call, caller, exchange, receive)
        finally:
            await _give_back(entered, used)

    async def _serve(self, call: Call, caller: Caller, exchange: Exchange, receive: Receive) -> int | None:
        """Answer a call; return the LLM tokens that it cost, None where nobody knows."""
        try:
            job = await self._service.jobs.open(call, caller.tenant)
        except ApiError as error:
            if error.code != "queue_unavailable" or call.cls is TrafficClass.BATCH or self._service.direct is None:
                raise
            await self._service.direct.serve(call, exchange, receive)
            return None
        exchange.headers[JOB_HEADER] = job.id
        answered = False
        try:
            with (
                self._service.jobs.listener.waiting(job.watch),
                Vigil(self._service.tower, job, receive, job.watch.news.set) as vigil,
            ):
                record = await (self._stream if call.streams else self._whole)(call, job, exchange, vigil)
            answered = not vigil.over
        finally:
            if not answered:
                self._service.jobs.drop(job)
        if job.joined:  # who made the job has paid for it
            return 0
        # Of an answer that its client left, each piece was about a token: leaving early must not be cheaper.
        return _tokens(record) if record is not None else max(call.job.cost(), vigil.pieces)

    async def _stream(self, call: Call, job: OpenJob, exchange: Exchange, vigil: Vigil) -> JobRecord | None:
        events = Events(self._url, wants_usage=call.wants_usage)
        stream = Stream(exchange, events, job, self._service.tower.patience.tick)
        await stream.run(vigil)
        if vigil.left:
            return None
        if vigil.failure is not None:
            await stream.fail(vigil.failure)
            return None
        record = await job.watch.ended()
        await stream.finish(record, await self._retry_after(call, record))
        return record

    async def _whole(self, call: Call, job: OpenJob, exchange: Exchange, vigil: Vigil) -> JobRecord | None:
        watch = job.watch
        if not job.joined:  # nobody takes the pieces
            watch.order.give_up()
        while not watch.over and not vigil.over:
            watch.news.clear()
            await watch.news.wait()
        if vigil.left:
            return None
        if vigil.failure is not None:
            raise vigil.failure
        record = await watch.ended()
        answer = answer_of(record, await self._retry_after(call, record))
        await exchange.answer(answer.status, answer.body, {}, answer.content_type)
        return record

    async def _retry_after(self, call: Call, record: JobRecord | None) -> float:
        """Return when to come again; looked up only where there is no answer."""
        if record is not None and record.status_code is not None:
            return 0.0
        return await self._service.tower.fleet.retry_after(call.cls)


async def _give_back(entered: Pass, used: int | None) -> None:
    """Give a place back, also where this request is being cancelled."""
    leaving = asyncio.ensure_future(entered.leave(used))
    try:
        await asyncio.shield(leaving)
    except asyncio.CancelledError:
        await leaving
        raise


def _tokens(record: JobRecord | None) -> int | None:
    if record is None or record.status_code is None:
        return None
    return record.usage.total if record.status_code < 400 else 0
