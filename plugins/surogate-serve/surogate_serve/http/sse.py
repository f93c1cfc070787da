"""Server-sent events: frames, and the answer that streams them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from json.encoder import encode_basestring_ascii
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..types import Refused
from .limits import Limits
from .log import Exchange

DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
PARTS = "surogate.parts"
"""Of a server's extensions: `Parts`. What a server does around `send` is a fifth of what a token costs, and a send into a
socket more than all the rest."""
logger = logging.getLogger("surogate.serve")


def quoted(text: str) -> bytes:
    """``text`` as a JSON string, in ASCII: some clients part lines at U+2028 and its like."""
    return encode_basestring_ascii(text).encode("ascii")


def data_frame(json_text: bytes) -> bytes:
    """A frame without a type, as OpenAI's older routes stream them."""
    return b"data: " + json_text + b"\n\n"


def event_frame(event: str, json_text: bytes) -> bytes:
    """A frame with its type."""
    return b"event: " + event.encode() + b"\ndata: " + json_text + b"\n\n"


class Parts(Protocol):
    """A connection that takes parts of a streamed body beside `send`, for another thread to write."""

    def write_part(self, frames: list[bytes]) -> bool:
        """Takes frames as one part; False, and none is taken, where the connection takes no more now."""

    def end_parts(self) -> None:
        """Whatever is sent by `send` from now on follows what was taken. Before every `send`."""


class _NoParts:
    """Of a server that has none."""

    def write_part(self, frames: list[bytes]) -> bool:
        return False

    def end_parts(self) -> None:
        pass


class Frames(Protocol):
    """Where an answer's frames go. ``put``: takes one. ``flush``: lets those there are leave; the last of an answer leave at its
    end, together with that."""

    put: Callable[[bytes], None]

    def flush(self) -> None: ...


class EventStream(Response):
    """An answer of frames, which ``stream`` puts. Its headers leave with the first of them, so that what goes wrong before is
    raised, and has a status of its own; or with a comment, where no frame came for too long.

    ``ending(refused)``: the frames that end a stream in an error, after its headers were sent.
    """

    def __init__(
        self,
        stream: Callable[[Frames], Awaitable[None]],
        ending: Callable[[Refused], bytes],
        limits: Limits,
        exchange: Exchange,
    ) -> None:
        super().__init__()
        self._stream, self._ending, self._limits, self._exchange = stream, ending, limits, exchange
        exchange.stream = True
        self._frames: list[bytes] = []
        self.put = self._frames.append
        self._started = False
        self._writing = False
        self._sender: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends headers and all frames. Raises what ``stream`` raises before its first frame."""
        self._send = self._exchange.send or send
        self._parts: Parts = scope.get("extensions", {}).get(PARTS) or _NoParts()
        loop = self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._last_sent = loop.time()
        self._pause = min(self._limits.keep_alive_seconds, self._limits.send_seconds) / 4
        self._timer = loop.call_later(self._pause, self._look)
        try:
            await self._all_frames()
            if self._sender is not None:
                await self._sender
            await self._write(more=False)
        finally:
            self._timer.cancel()
            if self._sender is not None:
                self._sender.cancel()

    async def _all_frames(self) -> None:
        try:
            await self._stream(self)
            if not self._told:
                raise RuntimeError("a stream without frames")
        except Refused as refused:
            self._fail(refused)
        except asyncio.CancelledError:
            if self._exchange.ending is None:
                raise
            self._fail(self._exchange.ending)
        except Exception:
            if not self._told:
                raise
            logger.exception("request %s: the stream failed", self._exchange.request_id)
            self._fail(Refused("the server failed while it answered", 500, "internal_error"))

    @property
    def _told(self) -> bool:
        """Whether an error can only be told within the stream."""
        return self._started or bool(self._frames)

    def _fail(self, refused: Refused) -> None:
        if not self._told:
            raise refused
        self._exchange.error = refused.message
        self.put(self._ending(refused))

    def flush(self) -> None:
        """Frames that were put together leave in one write, here and now. Where the connection takes no more, a task waits for
        it, and takes along what is put meanwhile."""
        if self._sender is not None:
            if not self._sender.done():
                return
            self._sender.result()
            self._sender = None
        if not self._frames:
            return
        if self._started and self._parts.write_part(self._frames):
            self._frames.clear()
            self._last_sent = self._loop.time()
        else:
            self._sender = self._loop.create_task(self._write())

    async def _write(self, more: bool = True) -> None:
        """What was put, also while it writes, behind the headers; without ``more`` the end of the answer too."""
        self._writing = True
        self._parts.end_parts()
        if not self._started:
            self._started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        while self._frames or not more:
            body = b"".join(self._frames)
            self._frames.clear()
            self._last_sent = self._loop.time()
            await self._send({"type": "http.response.body", "body": body, "more_body": more})
            if not more:
                break
        self._writing = False

    def _look(self) -> None:
        """Comments where nothing was sent for long, and ends a stream that nobody reads."""
        now, patience = self._loop.time(), self._limits.send_seconds
        self._timer = self._loop.call_later(self._pause, self._look)
        if self._writing:
            if now - self._last_sent > patience and self._task is not None:
                self._exchange.error = f"the client read nothing for {patience:g} s"
                self._exchange.let_go = True
                self._task.cancel()
        elif now - self._last_sent >= self._limits.keep_alive_seconds:
            self.put(COMMENT)
            self.flush()

