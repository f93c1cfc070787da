"""A server of fake models in this process, over a real socket: clients, disconnects and slow readers are what they
are."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from surogate_core.engine.chunks import chunk_writer
from surogate_serve.http.app import ServeApp, create_app
from surogate_serve.http.limits import Settings
from surogate_serve.http.server import limited_protocol

sys.path.insert(0, str(Path(__file__).parent))

from fake import FakeModel  # noqa: E402


class Running:
    """A server on a free port of this machine, in a thread with a loop of its own."""

    def __init__(self, models: list[FakeModel], settings: Settings) -> None:
        self.models = {model.name: model for model in models}
        self.model = models[0]
        self.app: ServeApp = create_app(self.models, settings)
        # With the protocol named, asyncio turns Nagle's algorithm off: without, every answer waits 40 ms.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        protocol = limited_protocol(settings.limits, set(), chunk_writer())
        config = uvicorn.Config(self.app, log_level="error", access_log=False, lifespan="off", http=protocol)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        wait_for(lambda: self._server.started)

    def _run(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self._server.serve(sockets=[self._socket]))

    def call(self, coroutine: Any) -> Any:
        """Runs a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)
        self.app.log.close()


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Until it holds; fails where that takes too long."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.005)


@pytest.fixture
def serve() -> Iterator[Callable[..., Running]]:
    """serve(*models, **settings) starts a server; all are stopped at the end."""
    started: list[Running] = []

    def start(*models: FakeModel, **settings: Any) -> Running:
        started.append(Running(list(models) or [FakeModel()], Settings(**settings)))
        return started[-1]

    yield start
    for each in started:
        each.stop()


@pytest.fixture
def server(serve: Callable[..., Running]) -> Running:
    """A server of one fake model without keys."""
    return serve()
