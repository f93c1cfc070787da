"""What every request passes before any route: its id, CORS, its key, the state of the server, its body within limits.
And after it: the client that leaves, errors that no route caught, the log."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Coroutine, MutableMapping, Sequence
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..types import Refused
from . import auth
from .errors import error_answer, is_anthropic
from .limits import Settings, clip
from .log import Exchange, RequestLog, current
from .metrics import Metrics

OPEN_PATHS = frozenset({"/health", "/live", "/ready", "/"})
"""What needs no key: probes, which tell no more than a state, and the page, which asks its user for a key."""
CLIENT_LEFT = 499
"""The status that logs and figures give to what nobody was there to be answered; it is never sent."""
ADMIN_PREFIX = "/admin/"
KEPT_PREFIX = "/v1/responses/"
"""What is below may be read while the server drains: answers that are not waited for are fetched there."""
_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,64}")
_PORT = re.compile(r":\d+$")
_READ_ONLY = frozenset({"GET", "HEAD", "OPTIONS"})
logger = logging.getLogger("surogate.serve")


class Guard:
    """An ASGI application around another. One for a server."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics, log: RequestLog) -> None:
        self._app, self._settings, self._metrics, self._log = app, settings, metrics, log
        self._keys, self._admin_keys = auth.Keys(settings.api_keys), auth.Keys(settings.admin_keys)
        self._active: dict[Exchange, asyncio.Task[None]] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _Passage(self, scope, receive, send).run()

    async def drain(self, seconds: float) -> int:
        """Refuses what comes, waits for what runs, and after ``seconds`` ends that with an error. Returns how many
        requests it ended so."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
            return 0
        except TimeoutError:
            ended = dict(self._active)
            for exchange, handler in ended.items():
                exchange.ending = Refused("the server is shutting down", 503, "shutting_down", retry_after=5)
                handler.cancel()
            if ended:  # what ran may have ended together with the time
                await asyncio.wait(ended.values(), timeout=5)
            return len(ended)

    def enter(self, exchange: Exchange, handler: asyncio.Task[None]) -> None:
        self._active[exchange] = handler
        self._idle.clear()

    def goes_on(self, exchange: Exchange, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs what a request leaves to be done after its answer; a drain waits for that too, or cancels it at last."""
        own = Exchange(exchange.method, exchange.path, exchange.client, exchange.request_id, exchange.key)
        task = asyncio.create_task(work)
        self.enter(own, task)
        task.add_done_callback(lambda _: self.leave(own))
        return task

    def leave(self, exchange: Exchange) -> None:
        self._active.pop(exchange, None)
        if not self._active:
            self._idle.set()

    def check(self, scope: Scope, exchange: Exchange) -> None:
        """Raises `Refused` for a request that may not be made, or not now."""
        path, headers = scope["path"], scope["headers"]
        self._check_host(headers)
        probe = path in OPEN_PATHS and scope["method"] in ("GET", "HEAD")
        if path.startswith(ADMIN_PREFIX):
            if not self._admin_keys:
                raise Refused(
                    "administration is off: the server was started without an admin key", 403, "admin_disabled"
                )
            exchange.key = self._admin_keys.holder(headers)
            if exchange.key is None:
                raise auth.refusal(headers)
        elif self._keys:
            exchange.key = self._keys.holder(headers) or self._admin_keys.holder(headers)
            open_metrics = path == "/metrics" and self._settings.open_metrics
            if exchange.key is None and not probe and not open_metrics:
                raise auth.refusal(headers)
        kept = path.startswith(KEPT_PREFIX) and scope["method"] == "GET"
        if self.draining and not (probe or kept or path == "/metrics"):
            raise Refused("the server is shutting down", 503, "shutting_down", retry_after=5)

    def _check_host(self, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """A page of the internet may let its own name mean this machine, and would then be let in by the browser."""
        allowed = self._settings.allowed_hosts
        if not allowed:
            return
        host = next((value for name, value in headers if name == b"host"), b"").decode("latin-1")
        if host.lower() not in allowed and _PORT.sub("", host).lower() not in allowed:
            raise Refused(
                f"this server is not called {clip(host)!r}: allow that name when it is started, or give it a key",
                403, "host_not_allowed",
            )  # fmt: skip

    def origin_of(self, headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
        """The request's origin where the settings allow it."""
        allowed = self._settings.allowed_origins
        origin = next((value for name, value in headers if name == b"origin"), None)
        if origin is None or not allowed:
            return None
        return origin if "*" in allowed or origin.decode("latin-1") in allowed else None


class _Passage:
    """One request on its way through the guard."""

    def __init__(self, guard: Guard, scope: Scope, receive: Receive, send: Send) -> None:
        self._guard, self._scope, self._receive, self._send = guard, scope, receive, send
        self._limits = guard._settings.limits
        self._headers: list[tuple[bytes, bytes]] = scope["headers"]
        self._named = dict(reversed(self._headers))  # of a name that comes twice, the first
        self._started = False
        self._ended = False
        client = scope.get("client")
        self._exchange = Exchange(scope["method"], scope["path"], client[0] if client else "", self._request_id())
        self._exchange.send, self._exchange.guard = self._answer, guard
        self._added = self._added_headers()

    async def run(self) -> None:
        exchange, guard = self._exchange, self._guard
        try:
            if self._is_preflight():
                await self._whole(204, [(b"access-control-max-age", b"600")], b"")
                return
            guard.check(self._scope, exchange)
            exchange.raw = await self._body()
            if exchange.raw is not None:
                await self._handle()
        except Refused as refused:
            await self._refuse(refused)
        finally:
            guard._metrics.request(exchange)
            guard._log.add(exchange)

    async def _handle(self) -> None:
        """Runs the routes, in the task that the server gave this request, until whoever lets go of them cancels it."""
        exchange, task = self._exchange, asyncio.current_task()
        assert task is not None
        self._scope["surogate"] = exchange
        token = current.set(exchange)
        watcher = asyncio.create_task(self._watch(task))
        self._guard.enter(exchange, task)
        try:
            await self._routes()
        except asyncio.CancelledError:
            if not exchange.let_go and exchange.ending is None:
                raise
            task.uncancel()
        finally:
            watcher.cancel()
            self._guard.leave(exchange)
            current.reset(token)

    async def _routes(self) -> None:
        try:
            await self._guard._app(self._scope, self._whole_body, self._answer)
        except asyncio.CancelledError:
            ending = self._exchange.ending
            if ending is None or self._started or self._exchange.let_go:
                raise
            await self._refuse(ending)
        except Refused as refused:
            await self._refuse(refused)
        except Exception:
            logger.exception("request %s failed", self._exchange.request_id)
            await self._refuse(Refused("the server failed while it answered", 500, "internal_error"))

    async def _whole_body(self) -> Message:
        """`receive` of the routes. That the client left is told by cancelling them."""
        return {"type": "http.request", "body": self._exchange.raw, "more_body": False}

    async def _watch(self, task: asyncio.Task[None]) -> None:
        """Lets go of the routes where the client leaves."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._ended:
            return
        exchange = self._exchange
        exchange.error = exchange.error or "the client left"
        exchange.finish.append("disconnected")
        exchange.status = exchange.status or CLIENT_LEFT
        exchange.let_go = True
        task.cancel()

    async def _body(self) -> bytes | None:
        """The whole body; None where the client left before its end."""
        if self._scope["method"] in _READ_ONLY:
            return b""
        if (length := self._named.get(b"content-length")) is not None and int(length) > self._limits.body_bytes:
            await self._discard(int(length))
            raise self._too_large()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                body = await self._read()
        except TimeoutError:
            raise Refused(f"the body did not arrive within {self._limits.body_seconds:g} s", 408, "timeout") from None
        kind = (self._named.get(b"content-type") or b"application/json").split(b";")[0].strip().lower()
        if body and not (kind == b"application/json" or kind.endswith(b"+json")):
            raise Refused("the body must be JSON, with `content-type: application/json`", 415, "unsupported_media_type")
        return body

    def _too_large(self) -> Refused:
        return Refused(f"the body is larger than {self._limits.body_bytes} bytes", 413, "request_too_large")

    async def _read(self) -> bytes | None:
        chunks, size = [], 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self._exchange.error, self._exchange.status = "the client left", CLIENT_LEFT
                return None
            chunks.append(message.get("body", b""))
            size += len(chunks[-1])
            if size > self._limits.body_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join(chunks)

    async def _discard(self, length: int) -> None:
        """Reads what will be refused, as long as it is not absurd: many clients read an answer only after they sent
        all."""
        if length > 8 * self._limits.body_bytes:
            return

        async def read() -> None:
            while True:
                message = await self._receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return

        try:
            await asyncio.wait_for(read(), self._limits.body_seconds)
        except TimeoutError:
            return

    async def _refuse(self, refused: Refused) -> None:
        self._exchange.error = refused.message
        if self._started:
            if not self._ended:
                # What was sent cannot be made good any more; the end of the connection says that it is broken.
                raise ConnectionAbortedError(refused.message)
            return
        status, headers, body = error_answer(refused, self._scope["path"], self._exchange.request_id)
        if refused.status in (408, 413):
            headers.append((b"connection", b"close"))
        await self._whole(status, headers, body)

    async def _whole(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        headers = [*headers, (b"content-length", str(len(body)).encode())]
        await self._answer({"type": "http.response.start", "status": status, "headers": headers})
        await self._answer({"type": "http.response.body", "body": b"" if self._scope["method"] == "HEAD" else body})

    def _answer(self, message: MutableMapping[str, Any]) -> Awaitable[None]:
        """`send`, which adds the headers that every answer has. What is to be awaited is the server's own."""
        if message["type"] == "http.response.start":
            self._started = True
            self._exchange.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self._added]
        elif not message.get("more_body", False):
            self._ended = True
        return self._send(message)

    def _added_headers(self) -> list[tuple[bytes, bytes]]:
        request_id = self._exchange.request_id.encode()
        headers = [(b"x-request-id", request_id), (b"x-content-type-options", b"nosniff")]
        if is_anthropic(self._scope["path"]):
            headers.append((b"request-id", request_id))
        if (origin := self._guard.origin_of(self._headers)) is not None:
            headers += [
                (b"access-control-allow-origin", origin),
                (b"access-control-expose-headers", b"x-request-id, request-id, retry-after"),
                (b"vary", b"origin"),
            ]
            if self._is_preflight():
                asked = self._named.get(b"access-control-request-headers") or b"authorization, content-type, x-api-key"
                headers += [
                    (b"access-control-allow-methods", b"GET, POST, DELETE"),
                    (b"access-control-allow-headers", asked),
                ]
        return headers

    def _is_preflight(self) -> bool:
        return (
            self._scope["method"] == "OPTIONS"
            and b"access-control-request-method" in self._named
            and self._guard.origin_of(self._headers) is not None
        )

    def _request_id(self) -> str:
        given = self._named.get(b"x-request-id", b"")
        return given.decode() if _REQUEST_ID.fullmatch(given) else Exchange.new_id()
