"""The routes of files and batches: HTTP in, HTTP out. What is done stands in `service.py`.

They expect the caller in `request.state.caller`, and let ApiError and errors of Redis pass to the app's boundary.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from llmq.gateway.admission import Admission, Caller
from llmq.gateway.batch import places
from llmq.gateway.batch.asked import read_batch
from llmq.gateway.batch.paging import read_listing
from llmq.gateway.batch.running_results import first_of, read_after
from llmq.gateway.batch.service import BatchService
from llmq.gateway.batch.storage import StorageError
from llmq.gateway.errors import ApiError
from llmq.scheduler.job import TrafficClass

#: Things on a page: those of OpenAI.
_BATCHES, _MOST_BATCHES = 20, 100
_FILES, _MOST_FILES = 10_000, 10_000

#: Bytes of the body of a request for a batch: 16 pairs of metadata are at most some 40 KiB.
_BODY_BYTES = 256 * 1024

#: Seconds after which a client may try again when the storage cannot be used.
_STORAGE_RETRY_S = 5.0

Endpoint = Callable[[Request], Awaitable[Response]]


def batch_routes(service: BatchService, admission: Admission) -> list[Route]:
    """Return the routes of `/v1/files` and `/v1/batches`."""
    routes = _Routes(service, admission)
    table: list[tuple[str, str, Endpoint]] = [
        ("POST", "/v1/files", routes.upload),
        ("GET", "/v1/files", routes.list_files),
        ("GET", "/v1/files/{id}", routes.file),
        ("GET", "/v1/files/{id}/content", routes.content),
        ("DELETE", "/v1/files/{id}", routes.delete_file),
        ("POST", "/v1/batches", routes.create),
        ("GET", "/v1/batches", routes.list_batches),
        ("GET", "/v1/batches/{id}", routes.batch),
        ("GET", "/v1/batches/{id}/results", routes.results),
        ("POST", "/v1/batches/{id}/cancel", routes.cancel),
    ]
    return [Route(path, _guarded(endpoint), methods=[method]) for method, path, endpoint in table]


class _Routes:
    """One method an endpoint."""

    def __init__(self, service: BatchService, admission: Admission) -> None:
        self._service = service
        self._admission = admission

    async def upload(self, request: Request) -> Response:
        """POST /v1/files"""
        return _json(await self._service.upload(_tenant(request), request.headers, _chunks(request)))

    async def list_files(self, request: Request) -> Response:
        """GET /v1/files"""
        query = request.query_params
        listing = read_listing(query, default=_FILES, most=_MOST_FILES, is_id=places.is_file_id)
        return _json(await self._service.list_files(_tenant(request), listing, query.get("purpose")))

    async def file(self, request: Request) -> Response:
        """GET /v1/files/{id}"""
        return _json((await self._service.file(_tenant(request), request.path_params["id"])).to_openai())

    async def content(self, request: Request) -> Response:
        """GET /v1/files/{id}/content"""
        record = await self._service.file(_tenant(request), request.path_params["id"])
        blocks = self._service.content(_tenant(request), record)
        headers = {
            "content-length": str(record.bytes),
            "content-disposition": f"attachment; filename*=UTF-8''{quote(record.filename, safe='')}",
            "x-content-type-options": "nosniff",
        }
        return StreamingResponse(await first_of(blocks), media_type="application/octet-stream", headers=headers)

    async def delete_file(self, request: Request) -> Response:
        """DELETE /v1/files/{id}"""
        return _json(await self._service.delete_file(_tenant(request), request.path_params["id"]))

    async def create(self, request: Request) -> Response:
        """POST /v1/batches: one request of its key, however many lines it has"""
        caller, asked = _caller(request), read_batch(await _body(request))
        # It runs for no time of its own: chat that fills the key's places must not keep batches out.
        limits = replace(caller.limits, concurrency=None)
        entered = await self._admission.enter(replace(caller, limits=limits), TrafficClass.BATCH, 0)
        try:
            request.state.exchange.headers.update(entered.headers)
            return _json(await self._service.create(caller.tenant, asked))
        finally:
            await entered.leave(0)

    async def list_batches(self, request: Request) -> Response:
        """GET /v1/batches"""
        query = {name: value for name, value in request.query_params.items() if name != "order"}
        listing = read_listing(query, default=_BATCHES, most=_MOST_BATCHES, is_id=places.is_batch_id)
        return _json(await self._service.list_batches(_tenant(request), listing))

    async def batch(self, request: Request) -> Response:
        """GET /v1/batches/{id}"""
        return _json(await self._service.batch(_tenant(request), request.path_params["id"]))

    async def cancel(self, request: Request) -> Response:
        """POST /v1/batches/{id}/cancel"""
        return _json(await self._service.cancel(_tenant(request), request.path_params["id"]))

    async def results(self, request: Request) -> Response:
        """GET /v1/batches/{id}/results: llmq's own"""
        query = request.query_params
        lines = await self._service.results(
            _tenant(request),
            request.path_params["id"],
            after=read_after(query.get("after", "0")),
            follow=query.get("follow", "false").lower() in ("true", "1", "yes"),
        )
        return StreamingResponse(await first_of(lines), media_type="application/jsonl")


def _guarded(endpoint: Endpoint) -> Endpoint:
    """Turn what the storage cannot do now into an answer that clients repeat."""

    async def guarded(request: Request) -> Response:
        try:
            return await endpoint(request)
        except StorageError:
            raise ApiError(
                503, "The storage of files and batches cannot be used now.", retry_after=_STORAGE_RETRY_S
            ) from None
        except FileNotFoundError:  # removed between its record and its content
            raise ApiError(404, "No such File object.", param="id") from None

    return guarded


def _caller(request: Request) -> Caller:
    caller: Caller = request.state.caller
    return caller


def _tenant(request: Request) -> str:
    return _caller(request).tenant


async def _chunks(request: Request) -> AsyncIterator[bytes]:
    try:
        async for chunk in request.stream():
            yield chunk
    except ClientDisconnect:
        raise ApiError(400, "The client went away before the file was whole.") from None


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in _chunks(request):
        body += chunk
        if len(body) > _BODY_BYTES:
            raise ApiError(413, f"The body is larger than the {_BODY_BYTES:,} bytes allowed.")
    return bytes(body)


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
