"""What readers of calls share: steps over a buffer of text that comes in pieces."""

from __future__ import annotations

from collections.abc import Callable

from ..plugins import CallProgress


class Steps:
    """A reader whose current step takes what it can from the buffer; a step gives False where it needs more, or where the
    call is over."""

    def __init__(self, first: Callable[[], bool]) -> None:
        self._buffer = ""
        self._step = first
        self._progress = CallProgress()

    def feed(self, text: str) -> CallProgress:
        self._progress = CallProgress()
        self._buffer += text
        while not (self._progress.complete or self._progress.failed) and self._step():
            pass
        if self._progress.complete or self._progress.failed:
            self._progress.rest = self._buffer
        return self._progress


def overlap(text: str, *markers: str) -> int:
    """How many of the last characters begin one of the markers."""
    longest = max(map(len, markers)) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-size:]) for marker in markers):
            return size
    return 0
