"""`GET /v1/models` and `/v1/models/{id}`: the models that can be asked, their adapters among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from .limits import Settings
from .requests import exchange_of, json_bytes, model_names, resolve


def model_body(name: str, model: Any, adapter: str | None) -> dict[str, Any]:
    """A model as OpenAI lists it. An adapter names the model that it belongs to. tasks: what it can be asked for."""
    body = {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "surogate",
        "parent": None if adapter is None else model.name,
        "root": model.name,
        "max_model_len": model.context,
        "tasks": ["generate"] if model.writes_text else [],
    }
    if adapter is None:
        embedding, width = model.vectors.embedding, model.vectors.width
        body["tasks"] += ["embed"]
        body["embedding"] = {
            "dimensions": width,
            "sizes": list(embedding.sizes) or None,
            "pooling": embedding.pooling,
            "normalized": embedding.normalized,
            "prompts": dict(embedding.prompts),
            "max_input_tokens": model.vectors.longest,
        }
    return body


class ModelsRoute:
    """The two routes."""

    def __init__(self, models: Mapping[str, Any]) -> None:
        self._models = models

    async def all(self, request: Request) -> Response:
        exchange_of(request).route = "/v1/models"
        chosen = [resolve(self._models, name) for name in model_names(self._models)]
        data = [model_body(each.name, each.model, each.adapter) for each in chosen]
        return Response(json_bytes({"object": "list", "data": data}), media_type="application/json")

    async def one(self, request: Request, name: str) -> Response:
        exchange_of(request).route = "/v1/models/{id}"
        chosen = resolve(self._models, name)
        return Response(json_bytes(model_body(name, chosen.model, chosen.adapter)), media_type="application/json")


def router(models: Mapping[str, Any], settings: Settings) -> APIRouter:
    """The routes of this module."""
    routes, route = APIRouter(tags=["OpenAI"]), ModelsRoute(models)
    routes.add_api_route("/v1/models", route.all, methods=["GET"], summary="All models", response_model=None)
    routes.add_api_route("/v1/models/{name:path}", route.one, methods=["GET"], summary="One model", response_model=None)
    return routes
