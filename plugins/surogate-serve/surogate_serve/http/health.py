"""State of the server: `/health`, `/live`, `/ready`, `/metrics`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from .metrics import Metrics
from .requests import exchange_of, json_bytes


class HealthRoute:
    """The routes. draining: whether the server takes no requests any more."""

    def __init__(self, models: Mapping[str, Any], metrics: Metrics, draining: Callable[[], bool]) -> None:
        self._models, self._metrics, self._draining = models, metrics, draining

    async def health(self, request: Request) -> Response:
        """Whether the engines run, and if not, why. A server that drains is healthy: what it took, it still answers."""
        exchange_of(request).route = "/health"
        dead = {name: model.dead for name, model in self._models.items() if model.dead is not None}
        body = (
            {"status": "dead", "reason": "; ".join(f"{k}: {v}" for k, v in dead.items())} if dead else {"status": "ok"}
        )
        return _answer(503 if dead else 200, body)

    async def live(self, request: Request) -> Response:
        exchange_of(request).route = "/live"
        return _answer(200, {"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Whether new requests are taken, model by model."""
        exchange_of(request).route = "/ready"
        draining = self._draining()
        states = {
            name: "draining" if draining else "ready" if model.dead is None else "dead"
            for name, model in self._models.items()
        }
        ready = bool(states) and all(state == "ready" for state in states.values())
        return _answer(200 if ready else 503, {"status": "ok" if ready else "not ready", "models": states})

    async def metrics(self, request: Request) -> Response:
        exchange_of(request).route = "/metrics"
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


def _answer(status: int, body: dict[str, Any]) -> Response:
    headers = {"retry-after": "5"} if status == 503 else None
    return Response(json_bytes(body), status, headers, media_type="application/json")


def router(models: Mapping[str, Any], metrics: Metrics, draining: Callable[[], bool]) -> APIRouter:
    """The routes of this module."""
    routes, route = APIRouter(tags=["State"]), HealthRoute(models, metrics, draining)
    for path, endpoint, text, kind in (
        ("/health", route.health, "Whether the engines run", JSONResponse),
        ("/live", route.live, "Whether the process answers", JSONResponse),
        ("/ready", route.ready, "Whether requests are taken", JSONResponse),
        ("/metrics", route.metrics, "Figures for Prometheus", PlainTextResponse),
    ):
        routes.add_api_route(path, endpoint, methods=["GET"], summary=text, response_model=None, response_class=kind)
        routes.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False, response_model=None)
    return routes
