"""Server-sent events: frames, and the answer that streams them."""

from __future__ import annotations

import asyncio
import logging
import types
from collections.abc import AsyncGenerator, Callable, Generator
from json.encoder import encode_basestring_ascii
from typing import Any, NoReturn

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


def _throw_into(steps: Generator[Any, Any, Any], error: BaseException) -> None:
    """Ends what was being awaited; it may not go on waiting."""
    try:
        steps.throw(error)
    except BaseException:
        return
    steps.close()


class EventStream(Response):
    """An answer of frames. Its headers leave with the first of them, so that what goes wrong before is raised, and has
    a status of its own; or with a comment, where no frame came for too long.

    ``ending(refused)``: the frames that end a stream in an error, after its headers were sent.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        ending: Callable[[Refused], bytes],
        limits: Limits,
        exchange: Exchange,
    ) -> None:
        super().__init__()
        self._frames, self._ending, self._limits, self._exchange = frames, ending, limits, exchange
        exchange.stream = True
        self._buffer: list[bytes] = []
        self._started = False
        self._sending_since: float | None = None
        self._comment: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends headers and all frames. The generator is closed in any case, which cancels what it reads from. Raises
        what the generator raises before its first frame."""
        self._send = self._exchange.send or send
        loop = self._loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        self._last_sent = loop.time()
        self._pause = min(self._limits.keep_alive_seconds, self._limits.send_seconds) / 4
        self._timer = loop.call_later(self._pause, self._look)
        try:
            await self._frames_to_buffer()
            await self._write(b"".join(self._buffer), more=False)
        finally:
            self._timer.cancel()
            if self._comment is not None:
                self._comment.cancel()
            await self._frames.aclose()

    async def _frames_to_buffer(self) -> None:
        """Sends all but the last, which it leaves there."""
        try:
            await self._read_all()
        except StopAsyncIteration:
            if not self._told:
                raise RuntimeError("a stream without frames") from None
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

    @types.coroutine
    def _read_all(self) -> Generator[Any, Any, NoReturn]:
        """Reads frames into the buffer, and sends that only where the next frame has to be waited for. So frames that
        are ready together leave in one write, and no frame waits for the next. Ends with what the generator raises."""
        frames, buffer = self._frames, self._buffer
        while True:
            step = frames.__anext__()
            try:
                waits_for = step.send(None)
                if buffer:
                    body = b"".join(buffer)
                    buffer.clear()
                    try:
                        yield from self._write(body)
                    except BaseException as error:
                        _throw_into(step, error)
                        raise
                while True:
                    try:
                        value = yield waits_for
                    except BaseException as error:
                        waits_for = step.throw(error)
                    else:
                        waits_for = step.send(value)
            except StopIteration as stop:
                buffer.append(stop.value)

    @property
    def _told(self) -> bool:
        """Whether an error can only be told within the stream."""
        return self._started or bool(self._buffer)

    def _fail(self, refused: Refused) -> None:
        if not self._told:
            raise refused
        self._exchange.error = refused.message
        self._buffer.append(self._ending(refused))

    async def _write(self, body: bytes, more: bool = True) -> None:
        if self._comment is not None and asyncio.current_task() is not self._comment:
            await asyncio.wait({self._comment})
            self._comment = None
        self._sending_since = self._last_sent = self._loop.time()
        if not self._started:
            self._started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._sending_since = None

    def _look(self) -> None:
        """Comments where nothing was sent for long, and ends a stream that nobody reads."""
        now, patience = self._loop.time(), self._limits.send_seconds
        self._timer = self._loop.call_later(self._pause, self._look)
        if self._sending_since is not None:
            if now - self._sending_since > patience and self._task is not None:
                self._exchange.error = f"the client read nothing for {patience:g} s"
                self._exchange.let_go = True
                self._task.cancel()
        elif now - self._last_sent >= self._limits.keep_alive_seconds:
            self._comment = self._loop.create_task(self._write(COMMENT))
