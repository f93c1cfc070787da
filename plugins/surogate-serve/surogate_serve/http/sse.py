"""Server-sent events: frames, and the answer that streams them."""

from __future__ import annotations

import asyncio
import logging
import types
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from json.encoder import encode_basestring_ascii
from typing import Any

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


@types.coroutine
def _await_flushing(awaitable: Awaitable[Any], flush: Callable[[], Awaitable[None]]) -> Generator[Any, Any, Any]:
    """Awaits, and calls ``flush`` only where that has to wait. So frames that are ready together leave in one write,
    and no frame waits for the next."""
    steps = awaitable.__await__()
    try:
        waits_for = steps.send(None)
    except StopIteration as stop:
        return stop.value
    try:
        yield from flush().__await__()
    except BaseException as error:
        _throw_into(steps, error)
        raise
    while True:
        try:
            value = yield waits_for
        except BaseException as error:
            step, argument = steps.throw, error
        else:
            step, argument = steps.send, value
        try:
            waits_for = step(argument)
        except StopIteration as stop:
            return stop.value


def _throw_into(steps: Generator[Any, Any, Any], error: BaseException) -> None:
    """Ends what was being awaited; it may not go on waiting."""
    try:
        steps.throw(error)
    except BaseException:
        return
    steps.close()


class EventStream(Response):
    """An answer of frames. Make one with `open_stream`, which raises what goes wrong before the first frame.

    ``ending(refused)``: the frames that end a stream in an error, after its headers were sent.
    """

    def __init__(
        self,
        frames: AsyncGenerator[bytes, None],
        first: asyncio.Future[bytes] | None,
        ending: Callable[[Refused], bytes],
        limits: Limits,
        exchange: Exchange,
        headers: list[tuple[bytes, bytes]],
    ) -> None:
        super().__init__()
        self._frames, self._first, self._ending = frames, first, ending
        self._limits, self._exchange, self._headers = limits, exchange, headers
        self._buffer: list[bytes] = []
        self._last_sent = 0.0
        self._sending_since: float | None = None
        self._comments: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends headers and all frames. The generator is closed in any case, which cancels what it reads from."""
        send = self._exchange.send or send
        self._send = send
        task = asyncio.current_task()
        ticker = asyncio.create_task(self._tick(task))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *self._headers]})
            await self._frames_to(send)
            await send({"type": "http.response.body", "body": b"".join(self._buffer), "more_body": False})
        finally:
            ticker.cancel()
            for comment in self._comments:
                comment.cancel()
            await close(self._frames, self._first)

    async def _frames_to(self, send: Send) -> None:
        """Leaves the last frames in the buffer."""
        self._last_sent = asyncio.get_running_loop().time()
        buffer = self._buffer
        try:
            if self._first is not None:
                buffer.append(await self._first)
            while True:
                buffer.append(await _await_flushing(self._frames.__anext__(), self._flush))
        except StopAsyncIteration:
            return
        except Refused as refused:
            self._fail(refused)
        except asyncio.CancelledError:
            if self._exchange.ending is None:
                raise
            self._fail(self._exchange.ending)
        except Exception:
            logger.exception("request %s: the stream failed", self._exchange.request_id)
            self._fail(Refused("the server failed while it answered", 500, "internal_error"))

    def _fail(self, refused: Refused) -> None:
        self._exchange.error = refused.message
        self._buffer.append(self._ending(refused))

    async def _flush(self) -> None:
        if self._buffer:
            body = b"".join(self._buffer)
            self._buffer.clear()
            await self._write(body)

    async def _write(self, body: bytes) -> None:
        clock = asyncio.get_running_loop().time
        self._sending_since = self._last_sent = clock()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})
        self._sending_since = None

    async def _tick(self, task: asyncio.Task[Any] | None) -> None:
        """Comments where nothing was sent for long, and the end of a stream that nobody reads."""
        clock = asyncio.get_running_loop().time
        keep_alive, patience = self._limits.keep_alive_seconds, self._limits.send_seconds
        while True:
            await asyncio.sleep(min(keep_alive, patience) / 4)
            now = clock()
            if self._sending_since is not None:
                if now - self._sending_since > patience and task is not None:
                    self._exchange.error = f"the client read nothing for {patience:g} s"
                    task.cancel()
            elif now - self._last_sent >= keep_alive:
                comment = asyncio.create_task(self._write(COMMENT))
                self._comments.add(comment)
                comment.add_done_callback(self._comments.discard)


async def close(frames: AsyncGenerator[bytes, None], first: asyncio.Future[bytes] | None) -> None:
    """Closes a generator, also while it is being read."""
    if first is not None and not first.done():
        first.cancel()
        await asyncio.wait({first})
    await frames.aclose()


async def open_stream(
    frames: AsyncGenerator[bytes, None],
    ending: Callable[[Refused], bytes],
    limits: Limits,
    exchange: Exchange,
    headers: list[tuple[bytes, bytes]] | None = None,
) -> EventStream:
    """Waits for the first frame, so that what is refused is answered with a status of its own; for no longer than a
    client should be without a sign of life. Raises what the generator raises before its first frame."""
    exchange.stream = True
    first: asyncio.Future[bytes] = asyncio.ensure_future(frames.__anext__())
    try:
        done, _ = await asyncio.wait({first}, timeout=limits.keep_alive_seconds)
        if done and (error := first.exception()) is not None:
            raise RuntimeError("a stream without frames") if isinstance(error, StopAsyncIteration) else error
    except BaseException:
        await close(frames, first)
        raise
    return EventStream(frames, first, ending, limits, exchange, headers or [])
