"""Administration, behind keys of its own: adapters at run time. And `/stats`, the engines' figures as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ..types import Refused
from .limits import Settings
from .requests import Strict, exchange_of, json_bytes, read, resolve
from .schema import json_body

NAME = r"^[A-Za-z0-9][A-Za-z0-9_./-]{0,127}$"


class AdapterRequest(Strict):
    """name: what requests will call it. path: a folder as PEFT has it, on the server's machine. model: may be left out
    where there is one. A name that is loaded already is replaced; requests that run keep what they began with."""

    name: Annotated[str, Field(pattern=NAME)]
    path: Annotated[str, Field(min_length=1, max_length=4096)]
    model: str | None = None


class AdminRoute:
    """The routes."""

    def __init__(self, models: Mapping[str, Any], settings: Settings) -> None:
        self._models, self._settings = models, settings

    async def adapters(self, request: Request) -> Response:
        exchange_of(request).route = "/admin/adapters"
        loaded = [each | {"model": base} for base, model in self._models.items() for each in model.adapter_details()]
        return _answer({"adapters": loaded})

    async def load(self, request: Request) -> Response:
        fields = read(request, AdapterRequest, self._settings)
        model = self._model(fields.model)
        taken = [base for base, other in self._models.items() if other is not model and fields.name in other.adapters]
        if fields.name in self._models or taken:
            raise Refused(
                f"the name {fields.name!r} belongs to another model or to its adapter", 400, "name_taken", "name"
            )
        await model.load_adapter(fields.name, fields.path)
        return _answer({"name": fields.name, "model": model.name})

    async def unload(self, request: Request, name: str) -> Response:
        exchange_of(request).route = "/admin/adapters/{name}"
        chosen = resolve(self._models, name)
        if chosen.adapter is None:
            raise Refused(f"{name[:200]!r} is a model, not an adapter", 400, None, "name")
        await chosen.model.unload_adapter(chosen.adapter)
        return _answer({"name": chosen.adapter, "model": chosen.model.name})

    async def stats(self, request: Request) -> Response:
        exchange_of(request).route = "/stats"
        return _answer({"models": {name: model.stats() for name, model in self._models.items()}})

    def _model(self, name: str | None) -> Any:
        if name is None and len(self._models) == 1:
            return next(iter(self._models.values()))
        chosen = resolve(self._models, name)
        if chosen.adapter is not None:
            raise Refused("an adapter belongs to a model, not to another adapter", param="model")
        return chosen.model


def _answer(body: dict[str, Any]) -> Response:
    return Response(json_bytes(body), media_type="application/json")


def router(models: Mapping[str, Any], settings: Settings) -> APIRouter:
    """The routes of this module."""
    routes, route = APIRouter(tags=["Administration"]), AdminRoute(models, settings)
    add = routes.add_api_route
    add("/admin/adapters", route.adapters, methods=["GET"], summary="Adapters that are loaded", response_model=None)
    add(
        "/admin/adapters", route.load, methods=["POST"], summary="Load or replace an adapter",
        openapi_extra=json_body(AdapterRequest), response_model=None,
    )  # fmt: skip
    add("/admin/adapters/{name:path}", route.unload, methods=["DELETE"], summary="Unload one", response_model=None)
    add("/stats", route.stats, methods=["GET"], summary="The engines' figures", response_model=None)
    return routes
