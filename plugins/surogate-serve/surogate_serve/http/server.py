"""The process around the application: sockets with limits, signals, the drain at the end, and the death of an
engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from surogate_core.engine.chunks import ChunkStream, ChunkWriter, chunk_writer
from surogate_core.errors import ConfigError, EngineError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..types import Refused
from .app import ServeApp
from .errors import error_answer
from .limits import Limits
from .sse import PARTS

DEATH_GRACE_SECONDS = 3.0
KEEP_ALIVE_SECONDS = 75
REST_SECONDS, LOOK_SECONDS = 5.0, 0.5
"""After so long without a request there is time for what holds up everything; how often that is looked at."""
_REASONS = {
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}
logger = logging.getLogger("surogate.serve")


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, before a model is loaded: a port that is taken should not cost that time. Raises
    `ConfigError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error}", "Choose another --host or --port.") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL that clients reach this socket by, from this machine where it listens everywhere."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def limited_protocol(limits: Limits, connections: set[Any], writer: ChunkWriter) -> type[HttpToolsProtocol]:
    """Uvicorn's protocol, which by itself waits for a request's headers forever and takes any number of bytes of them.
    connections: all of the server. writer: of parts of streams."""

    class Limited(HttpToolsProtocol):
        _head_bytes = 0
        _in_head = True
        _timer: asyncio.TimerHandle | None = None
        _stream: ChunkStream | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            connections.add(self)
            if len(connections) > limits.connections:
                self._turn_away(Refused("too many connections are open", 503, "too_many_connections", retry_after=1))
            else:
                self._wait_for_head()

        def connection_lost(self, exc: Exception | None) -> None:
            connections.discard(self)
            self._stop_waiting()
            if self._stream is not None:
                self._stream.close()
                self._stream = None
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            if self._in_head:
                self._head_bytes += len(data)
                # The first bytes may hold a body too: what comes in one piece is let pass here, and counted below.
                if self._head_bytes - len(data) > limits.header_bytes:
                    self._turn_away(Refused("the request's headers are too large", 431, "headers_too_large"))
                    return
                if self._timer is None:
                    self._wait_for_head()
            super().data_received(data)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self.scope["extensions"] = {PARTS: self}
            self._in_head = True

        def on_headers_complete(self) -> None:
            self._in_head, self._head_bytes = False, 0
            self._stop_waiting()
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if size > limits.header_bytes:
                self._turn_away(Refused("the request's headers are too large", 431, "headers_too_large"))
                return
            super().on_headers_complete()

        def on_body(self, body: bytes) -> None:
            if not self.transport.is_closing():
                super().on_body(body)

        def on_message_complete(self) -> None:
            if not self.transport.is_closing():
                super().on_message_complete()
            self._in_head = True

        def send_400_response(self, msg: str) -> None:
            self.end_parts()
            super().send_400_response(msg)

        def write_part(self, frames: list[bytes]) -> bool:
            """As `Parts` says. Streams have no length, so uvicorn's own parts are such chunks too."""
            if self._stream is None:
                transport = self.transport
                if transport.is_closing() or transport.get_write_buffer_size():
                    return False
                try:
                    self._stream = writer.open(transport.get_extra_info("socket").fileno())
                except EngineError:  # no descriptor is left
                    return False
            return self._stream.put(frames)

        def end_parts(self) -> None:
            """As `Parts` says."""
            stream, self._stream = self._stream, None
            if stream is not None and (left := stream.close()):
                self.transport.write(left)

        def _wait_for_head(self) -> None:
            self._stop_waiting()
            self._timer = self.loop.call_later(limits.header_seconds, self._head_is_late)

        def _stop_waiting(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _head_is_late(self) -> None:
            self._turn_away(Refused(f"no request came within {limits.header_seconds:g} s", 408, "timeout"))

        def _turn_away(self, refused: Refused) -> None:
            self.end_parts()
            status, headers, body = error_answer(refused, "", "")
            headers += [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
            lines = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
            start = b"HTTP/1.1 %d %b\r\n" % (status, _REASONS[status])
            self.transport.write(start + lines + b"\r\n" + body)
            self.transport.close()

    return Limited


class _Server(uvicorn.Server):
    """Uvicorn's server, without its own way of ending: it would close at once, and end the process by the signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(app: ServeApp, listener: socket.socket, ready: Callable[[str], None]) -> int:
    """Serves until a signal or an engine's death; gives the exit code. ready(url): called once requests are taken."""
    connections: set[Any] = set()
    config = uvicorn.Config(
        app,
        http=limited_protocol(app.settings.limits, connections, chunk_writer()),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        backlog=4096,
        timeout_graceful_shutdown=5,
    )
    server = _Server(config)
    stopping, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stopping.is_set() else stopping).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    running = asyncio.create_task(server.serve(sockets=[listener]))
    preparing = asyncio.create_task(prepare_grammars(app))
    try:
        while not server.started and not running.done():
            await asyncio.sleep(0.005)
        if not running.done():
            ready(url_of(listener))
        return await _until_the_end(app, running, stopping, hurry)
    finally:
        preparing.cancel()
        server.should_exit = True
        await running
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def prepare_grammars(app: ServeApp) -> None:
    """Has the models read their vocabularies for grammars. For large ones that takes seconds, in which the library lets
    no other Python run: so neither at the start nor under the first request with a grammar, but when a first answer was
    given and nothing has been asked for a while."""
    for model in app.models.values():
        if not model.writes_text:
            continue
        rested = 0.0
        while rested < REST_SECONDS:
            await asyncio.sleep(LOOK_SECONDS)
            rested = rested + LOOK_SECONDS if app.metrics.rests else 0.0
        await asyncio.to_thread(model.grammars.prepare)


async def _until_the_end(
    app: ServeApp, running: asyncio.Task[None], stopping: asyncio.Event, hurry: asyncio.Event
) -> int:
    waiting = {asyncio.create_task(stopping.wait()), asyncio.create_task(_death(app)), running}
    done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for task in pending - {running}:
        task.cancel()
    if stopping.is_set():
        await _drain(app, hurry)
        return 0
    if running in done:
        return 1
    reasons = "; ".join(f"{name}: {model.dead}" for name, model in app.models.items() if model.dead is not None)
    logger.error("the engine died: %s", reasons)
    await last_words()
    await app.guard.drain(0)
    return 1


async def last_words() -> None:
    """So long the process of a dead engine still answers, for whoever looks after it to read why."""
    await asyncio.sleep(DEATH_GRACE_SECONDS)


async def _death(app: ServeApp) -> None:
    """Returns once an engine is dead."""
    while all(model.dead is None for model in app.models.values()):
        await asyncio.sleep(0.25)


async def _drain(app: ServeApp, hurry: asyncio.Event) -> None:
    """What runs may end; after the limit, or a second signal, it is ended."""
    seconds = app.settings.limits.drain_seconds
    logger.info("stopping: requests that run have %g s to end", seconds)
    draining = asyncio.create_task(app.guard.drain(seconds))
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait({draining, hurried}, return_when=asyncio.FIRST_COMPLETED)
    hurried.cancel()
    if not draining.done():
        draining.cancel()
        await app.guard.drain(0)


def run(app: ServeApp, listener: socket.socket, ready: Callable[[str], None]) -> int:
    """`serve` in a loop of its own. Raises the limit of open files as far as it may go: every connection is one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            return runner.run(serve(app, listener, ready))
        finally:
            app.log.close()
