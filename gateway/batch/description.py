"""The description of files and batches for `/openapi.json`: parameters, and the shapes of what comes back."""

from __future__ import annotations

from typing import Any

from llmq.gateway.openapi import Tree, answer, operation
from llmq.scheduler.job import ENDPOINTS

_TEXT: Tree = {"type": "string"}
_MOMENT: Tree = {"type": ["integer", "null"]}
_COUNT: Tree = {"type": "integer", "minimum": 0}


def _id(kind: str) -> Tree:
    return {"type": "string", "pattern": f"^{kind}[0-9a-hjkmnp-tv-z]{{26}}$"}


def _object(kind: str, properties: dict[str, Tree]) -> Tree:
    """Return the shape of an object whose fields are all there."""
    fields = {"id": _TEXT, "object": {"const": kind}, **properties}
    return {"type": "object", "required": list(fields), "properties": fields}


def _list_of(thing: Tree) -> Tree:
    fields: dict[str, Tree] = {
        "object": {"const": "list"},
        "data": {"type": "array", "items": thing},
        "first_id": {"type": ["string", "null"]},
        "last_id": {"type": ["string", "null"]},
        "has_more": {"type": "boolean"},
    }
    return {"type": "object", "required": list(fields), "properties": fields}


_FILE = _object(
    "file",
    {
        "bytes": _COUNT,
        "created_at": {"type": "integer"},
        "expires_at": _MOMENT,
        "filename": _TEXT,
        "purpose": {"enum": ["batch", "batch_output"]},
    },
)

_BATCH = _object(
    "batch",
    {
        "endpoint": {"enum": list(ENDPOINTS)},
        "input_file_id": _TEXT,
        "completion_window": _TEXT,
        "status": {
            "enum": [
                "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled",
            ]
        },
        "output_file_id": {"type": ["string", "null"]},
        "error_file_id": {"type": ["string", "null"]},
        "created_at": {"type": "integer"},
        **dict.fromkeys(
            (
                "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at",
                "cancelling_at", "cancelled_at",
            ),
            _MOMENT,
        ),
        "request_counts": {
            "type": "object",
            "required": ["total", "completed", "failed"],
            "additionalProperties": False,
            "properties": {"total": _COUNT, "completed": _COUNT, "failed": _COUNT},
        },
        "metadata": {"type": ["object", "null"]},
    },
)  # fmt: skip

_EXPIRY: Tree = {
    "type": "object",
    "required": ["anchor", "seconds"],
    "properties": {
        "anchor": {"const": "created_at"},
        "seconds": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
}

_ASKED: Tree = {
    "type": "object",
    "required": ["input_file_id", "endpoint", "completion_window"],
    "properties": {
        "input_file_id": _id("file-"),
        "endpoint": {"enum": list(ENDPOINTS)},
        "completion_window": {"type": "string", "pattern": "^([1-9][0-9]?[mh]|[1-9]d)$"},
        "metadata": {
            "type": ["object", "null"],
            "maxProperties": 16,
            "propertyNames": {"maxLength": 64},
            "additionalProperties": {"type": "string", "maxLength": 512},
        },
        "output_expires_after": _EXPIRY,
    },
}

_UPLOAD: Tree = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {"file": {"type": "string", "format": "binary"}, "purpose": {"const": "batch"}},
}


def _in(place: str, name: str, schema: Tree, *, required: bool = False) -> Tree:
    return {"name": name, "in": place, "required": required, "schema": schema}


def _listing(most: int, kind: str) -> list[Tree]:
    limit = {"type": "integer", "minimum": 1, "maximum": most}
    return [_in("query", "limit", limit), _in("query", "after", _id(kind))]


def _bytes(content_type: str) -> Tree:
    return {"description": "The content", "content": {content_type: {"schema": {"type": "string", "format": "binary"}}}}


def _body(content_type: str, schema: Tree) -> Tree:
    return {"required": True, "content": {content_type: {"schema": schema}}}


def describe_batches() -> dict[str, Tree]:
    """Return the paths of files and batches."""
    of_id: dict[str, Any] = {"parameters": [_in("path", "id", _TEXT, required=True)]}
    purpose, order = _in("query", "purpose", _TEXT), _in("query", "order", {"enum": ["asc", "desc"]})
    results = [_in("query", "after", _COUNT), _in("query", "follow", {"type": "boolean", "default": False})]
    deleted = _object("file", {"deleted": {"const": True}})
    return {
        "/v1/files": {
            "get": operation(
                "List files",
                {"200": answer("A page", _list_of(_FILE))},
                parameters=[*_listing(10_000, "file-"), purpose, order],
            ),
            "post": operation(
                "Upload a file", {"200": answer("The file", _FILE)}, requestBody=_body("multipart/form-data", _UPLOAD)
            ),
        },
        "/v1/files/{id}": {
            "get": operation("Show a file", {"200": answer("The file", _FILE)}, **of_id),
            "delete": operation("Delete a file", {"200": answer("It is deleted", deleted)}, **of_id),
        },
        "/v1/files/{id}/content": {
            "get": operation("Read a file", {"200": _bytes("application/octet-stream")}, **of_id)
        },
        "/v1/batches": {
            "get": operation(
                "List batches", {"200": answer("A page", _list_of(_BATCH))}, parameters=_listing(100, "batch_")
            ),
            "post": operation(
                "Make a batch", {"200": answer("The batch", _BATCH)}, requestBody=_body("application/json", _ASKED)
            ),
        },
        "/v1/batches/{id}": {"get": operation("Show a batch", {"200": answer("The batch", _BATCH)}, **of_id)},
        "/v1/batches/{id}/cancel": {"post": operation("Cancel a batch", {"200": answer("The batch", _BATCH)}, **of_id)},
        "/v1/batches/{id}/results": {
            "get": operation(
                "Read the results of a batch while it runs",
                {"200": _bytes("application/jsonl")},
                parameters=[*of_id["parameters"], *results],
            )
        },
    }
