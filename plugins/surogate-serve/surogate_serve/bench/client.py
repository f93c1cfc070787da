"""One streamed completion over a socket, timed: little enough work a chunk that the client is not what is measured."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import httptools
from surogate_core.errors import ConfigError

_CHUNK = re.compile(rb'"(?:text|content|token)":\s*"[^"]')
_COUNTS = {
    name: re.compile(rb'"%b":\s*(\d+)' % name.encode()) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")
}
TAIL_BYTES = 4096
"""Of a stream, in which its usage stands."""


@dataclass
class Timing:
    """Of one request, in seconds of `time.perf_counter`. arrivals: of the reads that brought text. error: what went wrong."""

    begun: float
    arrivals: list[float] = field(default_factory=list)
    ended: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    @property
    def first(self) -> float | None:
        return self.arrivals[0] - self.begun if self.arrivals else None


class Endpoint:
    """``url`` of a server, such as http://127.0.0.1:8000, and the path of its route. ConfigError for another scheme."""

    def __init__(self, url: str, path: str, api_key: str | None) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise ConfigError(f"{url} is not the address of a server", "Write it as http://127.0.0.1:8000.")
        self.host, self.port, self.path = parts.hostname, parts.port or 80, parts.path.rstrip("/") + path
        self._head = f"POST {self.path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\nContent-Type: application/json\r\n"
        if api_key:
            self._head += f"Authorization: Bearer {api_key}\r\n"

    def request(self, body: bytes) -> bytes:
        return f"{self._head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class _Stream(asyncio.Protocol):
    """Reads one answer to its end."""

    def __init__(self, timing: Timing, done: asyncio.Future[None]) -> None:
        self.timing, self.done = timing, done
        self.tail = b""
        self.parser = httptools.HttpResponseParser(self)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if _CHUNK.search(data):
            self.timing.arrivals.append(now)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.timing.error = f"not an HTTP answer: {error}"
            self._end()

    def on_body(self, body: bytes) -> None:
        self.tail = (self.tail + body)[-TAIL_BYTES:]

    def on_message_complete(self) -> None:
        self.timing.ended = time.perf_counter()
        status = self.parser.get_status_code()
        if status != 200:
            self.timing.error = f"HTTP {status}: {self.tail[:200].decode(errors='replace')}"
        elif b"[DONE]" not in self.tail:
            self.timing.error = f"the stream broke off: {self.tail[-200:].decode(errors='replace')}"
        for name, pattern in _COUNTS.items():
            found = pattern.findall(self.tail)
            setattr(self.timing, name, int(found[-1]) if found else 0)
        self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.timing.error = self.timing.error or f"the connection was closed{f': {exc}' if exc else ''}"
            self._end()

    def _end(self) -> None:
        self.timing.ended = self.timing.ended or time.perf_counter()
        if not self.done.done():
            self.done.set_result(None)


async def complete(endpoint: Endpoint, body: bytes) -> Timing:
    """Sends one request and reads its answer. What goes wrong is in the timing's error."""
    loop = asyncio.get_running_loop()
    timing, done = Timing(time.perf_counter()), loop.create_future()
    try:
        transport, _ = await loop.create_connection(lambda: _Stream(timing, done), endpoint.host, endpoint.port)
    except OSError as error:
        timing.error, timing.ended = f"no connection: {error}", time.perf_counter()
        return timing
    try:
        transport.write(endpoint.request(body))
        await done
    finally:
        transport.close()
    return timing
