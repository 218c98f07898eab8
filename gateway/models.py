"""The models: what the workers that live now serve, in OpenAI's form."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from llmq.gateway.errors import ApiError
from llmq.gateway.fleet import Fleet, FleetView


def model_routes(fleet: Fleet) -> list[Route]:
    """Return the routes `/v1/models` and `/v1/models/{id}`; an id may hold slashes."""

    async def list_models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": _models(await fleet.view())})

    async def show_model(request: Request) -> Response:
        wanted = request.path_params["model"]
        for model in _models(await fleet.view()):
            if model["id"] == wanted:
                return JSONResponse(model)
        message = f"no worker serves a model {wanted[:200]!r} now; /v1/models lists those that are served"
        raise ApiError(404, message, code="model_not_found", param="model")

    return [
        Route("/v1/models", list_models, methods=["GET"]),
        Route("/v1/models/{model:path}", show_model, methods=["GET"]),
    ]


def _models(view: FleetView) -> list[dict[str, Any]]:
    return [
        {"id": model, "object": "model", "created": int(since), "owned_by": "llmq"}
        for model, since in sorted(view.models.items())
    ]
