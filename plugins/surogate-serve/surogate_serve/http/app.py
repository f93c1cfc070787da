"""The ASGI application: every router over the models of one server, inside the guard."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from ..types import Refused
from . import admin, chat, completions, embeddings, health, messages, models_route, page, responses, tokenize
from .errors import error_answer
from .guard import Guard
from .limits import Settings
from .log import RequestLog
from .metrics import Metrics
from .requests import exchange_of
from .schema import document

ROUTERS = (
    chat.router,
    completions.router,
    embeddings.router,
    messages.router,
    models_route.router,
    page.router,
    responses.router,
    tokenize.router,
    admin.router,
)
"""Of the APIs: each is given the models by name and the settings."""


class ServeApp:
    """What uvicorn runs. ``guard`` drains, ``models`` are the metered ones, ``log`` wants closing."""

    def __init__(self, models: Mapping[str, Any], settings: Settings) -> None:
        """Raises OSError where the request log cannot be opened."""
        self.settings, self.metrics = settings, Metrics()
        self.models: Mapping[str, Any] = self.metrics.watch(models, settings.limits)
        self.log = RequestLog(settings.request_log, settings.log_prompts)
        self.routes = self._routes()
        self.guard = Guard(Directly(self.routes), settings, self.metrics, self.log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.guard(scope, receive, send)

    def _routes(self) -> FastAPI:
        app = FastAPI(
            title="Surogate",
            version=version("surogate-serve"),
            description="Models of Surogate behind the APIs of OpenAI and Anthropic.",
            redirect_slashes=False,
            docs_url=None,
            redoc_url=None,
            exception_handlers={Refused: _refused, HTTPException: _http_error},
        )
        routers = [make(self.models, self.settings) for make in ROUTERS]
        routers.append(health.router(self.models, self.metrics, lambda: self.guard.draining))
        for router in routers:
            app.include_router(router)
        app.state.routes = [route for router in routers for route in router.routes]
        described = document(app, bool(self.settings.api_keys))
        app.openapi = lambda: described  # type: ignore[method-assign]
        return app


class Directly:
    """The routes whose paths have no parameters, found by one look and called as they are: on the way through the
    framework a request passes six layers, of which none does anything for it. All else goes that way."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        routes: list[APIRoute] = app.state.routes
        self._endpoints = {
            (method, route.path): route.endpoint
            for route in routes if not route.param_convertors for method in route.methods or ()
        }  # fmt: skip

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get((scope["method"], scope["path"]))
        if endpoint is None:
            await self._app(scope, receive, send)
        else:
            await (await endpoint(Request(scope, receive)))(scope, receive, send)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    exchange = exchange_of(request)
    exchange.error = error.message
    status, headers, body = error_answer(error, request.url.path, exchange.request_id)
    return Response(body, status, {name.decode(): value.decode() for name, value in headers})


async def _http_error(request: Request, error: Exception) -> Response:
    """Routes and methods that there are none of."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        refused = Refused("there is no such route", 404, "not_found")
    elif error.status_code == 405:
        refused = Refused(f"this route has no method {request.method[:16]}", 405, "method_not_allowed")
        error.headers = {"allow": ", ".join(_methods(request))}
    else:
        refused = Refused(str(error.detail), error.status_code)
    response = await _refused(request, refused)
    response.headers.update(error.headers or {})
    return response


def _methods(request: Request) -> list[str]:
    """All methods of a path: the framework tells only those of the first of its routes."""
    routes: list[APIRoute] = request.app.state.routes
    found = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in found for method in route.methods or ()})


def create_app(models: Mapping[str, Any], settings: Settings | None = None) -> ServeApp:
    """The application for these models. Needs a running event loop only once it is called."""
    return ServeApp(models, settings or Settings())
