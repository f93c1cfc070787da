"""A time limit for Python code that never asks what time it is, such as a template's loops."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class OutOfTime(Exception):
    """Raised in the body of a `time_limit` that takes too long."""


class _Watchdog:
    """One thread that interrupts others when their time is over. It sleeps while nobody has a limit."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._deadlines: dict[int, float] = {}  # by thread
        self._running = False

    def watch(self, thread: int, deadline: float) -> None:
        with self._changed:
            self._deadlines[thread] = deadline
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="time limits", daemon=True).start()
            self._changed.notify()

    def release(self, thread: int) -> None:
        with self._changed:
            self._deadlines.pop(thread, None)

    def _run(self) -> None:
        with self._changed:
            while True:
                nearest = min(self._deadlines.values(), default=None)
                self._changed.wait(None if nearest is None else max(nearest - time.monotonic(), 0.0))
                now = time.monotonic()
                for thread in [thread for thread, deadline in self._deadlines.items() if deadline <= now]:
                    del self._deadlines[thread]
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(OutOfTime))


_WATCHDOG = _Watchdog()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises OutOfTime in the body, between two of its Python instructions, once the time is over. Not to be nested."""
    thread = threading.get_ident()
    _WATCHDOG.watch(thread, time.monotonic() + seconds)
    try:
        yield
    finally:
        _WATCHDOG.release(thread)
