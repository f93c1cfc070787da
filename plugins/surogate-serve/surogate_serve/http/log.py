"""What is known of one request, and the log of requests: a line of JSON each, written by a thread of its own."""

from __future__ import annotations

import contextvars
import json
import queue
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..types import Refused

_random = random.Random()


def fresh_id() -> str:
    """32 digits that tell one request or answer from all others. Who saw many can guess the next: it opens nothing."""
    return f"{_random.getrandbits(128):032x}"


@dataclass(slots=True, eq=False)
class Exchange:
    """A request and its answer as they go on. Times are of `time.perf_counter`, in seconds. ``model``, ``route``,
    ``stream`` and ``body`` are set by the route, tokens and finish reasons by the metered model."""

    method: str
    path: str
    client: str
    request_id: str
    key: str | None = None
    """A short name of the API key, for what belongs to one key; None where none was needed."""
    began: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    status: int = 0
    model: str | None = None
    route: str | None = None
    stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish: list[str] = field(default_factory=list)
    error: str | None = None
    raw: bytes | None = None
    """The request's body as it came."""
    body: dict[str, Any] | None = None
    ending: Refused | None = None
    """Why the server itself ends this request, where it does."""
    let_go: bool = False
    """Nobody is there to be answered: its task was cancelled, and ends without a word."""
    send: Any = None
    """The connection's own `send`, for streams."""
    guard: Any = None
    """The `Guard` that let it pass, for work that goes on after the answer."""

    @staticmethod
    def new_id() -> str:
        return f"req_{fresh_id()}"

    def line(self, with_prompt: bool) -> dict[str, Any]:
        """What the log says of it. Seconds with microseconds; nothing of the prompt unless asked for."""
        now = time.perf_counter()
        line: dict[str, Any] = {
            "time": round(time.time(), 6),
            "request_id": self.request_id,
            "method": self.method,
            "path": self.path,
            "client": self.client,
            "key": self.key,
            "status": self.status,
            "model": self.model,
            "stream": self.stream,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "finish": self.finish,
            "first_token_seconds": None if self.first_token is None else round(self.first_token - self.began, 6),
            "seconds": round(now - self.began, 6),
            "error": self.error,
        }
        return line | {"request": self.body} if with_prompt else line


current: contextvars.ContextVar[Exchange | None] = contextvars.ContextVar("surogate_exchange", default=None)
"""The request that the running task works for."""


class RequestLog:
    """Appends lines to a file. Without a path it writes nothing. A disk that is slow or full fails no request: lines
    that find the queue full are counted, and the next line that is written says how many are missing."""

    def __init__(self, path: Path | None, with_prompts: bool = False, waiting: int = 10000) -> None:
        """Raises OSError where ``path`` cannot be opened."""
        self._with_prompts = with_prompts
        self._lines: queue.Queue[dict[str, Any] | None] = queue.Queue(waiting)
        self._dropped = 0
        self._thread: threading.Thread | None = None
        if path is not None:
            file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - the thread closes it
            self._thread = threading.Thread(target=self._write, args=(file,), name="request-log", daemon=True)
            self._thread.start()

    def add(self, exchange: Exchange) -> None:
        if self._thread is None:
            return
        line = exchange.line(self._with_prompts)
        if self._dropped:
            line["dropped_before"] = self._dropped
        try:
            self._lines.put_nowait(line)
            self._dropped = 0
        except queue.Full:
            self._dropped += 1

    def close(self) -> None:
        """Writes what is waiting."""
        if self._thread is not None:
            self._lines.put(None)
            self._thread.join(timeout=10)
            self._thread = None

    def _write(self, file: Any) -> None:
        with file:
            while (line := self._lines.get()) is not None:
                try:
                    file.write(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n")
                    if self._lines.empty():
                        file.flush()
                except (OSError, ValueError):
                    self._dropped += 1
