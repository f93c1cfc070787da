"""Streamed answers on their way into sockets: a native thread writes, for all connections, what it is handed."""

from __future__ import annotations

from typing import Protocol

from .library import native


class ChunkStream(Protocol):
    """One body in HTTP/1.1's chunked coding, on one connection. For one thread."""

    def put(self, parts: list[bytes]) -> bool:
        """Hands over the parts as one chunk, which leaves behind those before it, maybe together with them; empty ones are no
        chunk, as that would be the body's end. False, and nothing was taken, where more than 64 KiB wait already because the
        other side takes nothing, where the connection is gone, and once the stream is closed."""

    def close(self) -> bytes:
        """Ends the stream; gives what was not sent, for the caller to send."""


class ChunkWriter(Protocol):
    """The thread, which ends with the last reference to this and its streams, and drops what it has not sent."""

    def open(self, socket: int) -> ChunkStream:
        """A stream into the socket of this descriptor, which may be closed before the stream is: the stream has its own. Nobody
        else may write into it until the stream is closed. Raises :class:`EngineError` where no descriptor is left."""


def chunk_writer() -> ChunkWriter:
    """Starts a thread. Raises :class:`EngineError` where the native engine is not there."""
    return native().ChunkWriter()
