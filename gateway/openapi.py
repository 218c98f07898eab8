"""The description of the API that the gateway serves at `/openapi.json`, for tools that read OpenAPI.

It says what the gateway itself looks at, and no more: all other fields of a body are the engine's, and pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llmq.gateway.call import CHAT, COMPLETIONS, EMBEDDINGS, RESPONSES

Tree = dict[str, Any]

_OBJECT = {"type": "object"}
_ERROR: Tree = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}

_EVENT: Tree = {
    "type": "object",
    "required": ["data"],
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
}

#: Fields that are looked at on every inference route.
_COMMON: Tree = {
    "model": {"type": ["string", "null"]},
    "stream": {"type": ["boolean", "null"], "default": False},
}

#: The route, what it does, and what its body cannot be without.
_INFERENCE: tuple[tuple[str, str, Tree], ...] = (
    (CHAT, "Chat", {"messages": {"type": "array", "minItems": 1, "items": _OBJECT}}),
    (COMPLETIONS, "Complete a text", {}),
    (EMBEDDINGS, "Embed texts", {}),
    (RESPONSES, "Respond", {}),
)

_HEADERS = (
    ("X-LLMQ-Class", {"type": "string", "enum": ["interactive", "batch"]}),
    ("Idempotency-Key", {"type": "string", "minLength": 1, "maxLength": 255}),
)


def openapi_routes(paths: Mapping[str, Tree]) -> list[Route]:
    """Return the route of the description; `paths` are those that other parts add."""
    description = describe(paths)

    async def show(request: Request) -> Response:
        return JSONResponse(description)

    return [Route("/openapi.json", show, methods=["GET"])]


def describe(paths: Mapping[str, Tree] = {}) -> Tree:
    """Return the whole description."""
    inference = {url: {"post": _inference(summary, needed)} for url, summary, needed in _INFERENCE}
    return {
        "openapi": "3.1.0",
        "info": {"title": "llmq", "version": version("llmq-streams"), "license": {"name": "Apache-2.0"}},
        "security": [{}, {"key": []}],
        "paths": {**inference, **_MODELS, **_PROBES, **paths},
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def operation(summary: str, answers: Mapping[str, Tree], **fields: Any) -> Tree:
    """Return one operation: its answers by status, and an error in OpenAI's shape for all others."""
    error = {"description": "An error", "content": {"application/json": {"schema": _ERROR}}}
    return {"summary": summary, "responses": {**answers, "4XX": error, "5XX": error}, **fields}


def answer(description: str, schema: Tree | None = None) -> Tree:
    """Return an answer in JSON."""
    return {"description": description, "content": {"application/json": {"schema": schema or _OBJECT}}}


def _inference(summary: str, needed: Tree) -> Tree:
    body = {"type": "object", "required": list(needed), "properties": {**_COMMON, **needed}}
    whole = answer("The engine's answer, whole or as a stream of events")
    whole["content"]["text/event-stream"] = {"schema": _EVENT}
    refused = {
        "description": "A refusal: the engine's own as it came, else in OpenAI's shape",
        "content": {"application/json": {"schema": _OBJECT}, "text/plain": {"schema": {"type": "string"}}},
    }
    headers = [{"name": name, "in": "header", "schema": schema} for name, schema in _HEADERS]
    return operation(
        summary,
        {"200": whole, **dict.fromkeys(("400", "404", "422"), refused)},
        parameters=headers,
        requestBody={"required": True, "content": {"application/json": {"schema": body}}},
    )


_MODEL: Tree = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {
        "id": {"type": "string"},
        "object": {"const": "model"},
        "created": {"type": "integer"},
        "owned_by": {"type": "string"},
    },
}

_LIST: Tree = {
    "type": "object",
    "required": ["object", "data"],
    "properties": {"object": {"const": "list"}, "data": {"type": "array", "items": _MODEL}},
}

_MODELS: dict[str, Tree] = {
    "/v1/models": {"get": operation("List what live workers serve", {"200": answer("The models", _LIST)})},
    "/v1/models/{model}": {
        "get": operation(
            "Show one model",
            {"200": answer("The model", _MODEL)},
            parameters=[{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}],
        )
    },
}

_METRICS: Tree = {
    "description": "In Prometheus' text format, or OpenMetrics where that is accepted",
    "content": {media: {"schema": {"type": "string"}} for media in ("text/plain", "application/openmetrics-text")},
}

_PROBES: dict[str, Tree] = {
    "/healthz": {"get": operation("Tell whether the gateway lives", {"200": answer("It lives")}, security=[])},
    "/readyz": {"get": operation("Tell whether a call would be served now", {"200": answer("Yes")}, security=[])},
    "/metrics": {"get": operation("Tell the queue's metrics, and its own", {"200": _METRICS}, security=[])},
}
