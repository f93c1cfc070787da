"""What the native loop tells, to whoever waits for it: one thread polls, one wake-up of an event loop a batch."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from surogate_core.errors import SurogateError

from ..types import Delta, Take

POLL_SECONDS = 0.25
"""How long the thread waits for the loop before it looks whether it shall end."""


class Mailbox(Protocol):
    """Where one request's deltas go. event_loop: whose thread takes them, None for any thread."""

    event_loop: asyncio.AbstractEventLoop | None

    def put(self, deltas: list[Delta]) -> None: ...

    def fail(self, reason: str) -> None:
        """The engine is dead: nothing more will come."""


class EngineDead(Exception):
    """The loop ended; the message says why."""


class AsyncMailbox:
    """For a coroutine, which waits for `end`. Made, and called, in its event loop's thread: the deltas pass through without
    a change of tasks, of which a token would cost one for each stream."""

    def __init__(self, take: Take) -> None:
        self.event_loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        self._take = take
        self._ended: asyncio.Future[Exception | None] = self.event_loop.create_future()

    def put(self, deltas: list[Delta]) -> None:
        if self._ended.done():
            return
        try:
            if self._take(deltas):
                self._ended.set_result(None)
        except Exception as error:
            self._ended.set_result(error)

    def fail(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_result(EngineDead(reason))

    async def end(self) -> None:
        """Returns once ``take`` wants no more. Raises what that raised, or EngineDead."""
        error = await self._ended
        if error is not None:
            raise error


class ThreadMailbox:
    """For a thread that waits for many requests at once: all of them share one queue of (key, deltas or reason)."""

    event_loop = None

    def __init__(self, key: Any, shared: queue.SimpleQueue[tuple[Any, list[Delta] | str]]) -> None:
        self._key, self._shared = key, shared

    def put(self, deltas: list[Delta]) -> None:
        self._shared.put((self._key, deltas))

    def fail(self, reason: str) -> None:
        self._shared.put((self._key, reason))


class Pump:
    """poll: waits for so many seconds, and gives (request, delta) pairs; raises once the engine is dead. on_death: called
    from the thread, once, with the reason."""

    def __init__(
        self, poll: Callable[[float], Iterable[tuple[int, Delta]]], on_death: Callable[[str], None], name: str
    ) -> None:
        self._poll, self._on_death = poll, on_death
        self._boxes: dict[int, Mailbox] = {}
        self._lock = threading.Lock()
        self._dead: str | None = None
        self._ending = False
        self._thread = threading.Thread(target=self._work, name=f"surogate-serve {name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, submit: Callable[[], int], box: Mailbox) -> int:
        """Calls ``submit``; the deltas of the request that it gives the id of go to ``box``. Raises EngineDead, and what
        ``submit`` raises."""
        with self._lock:
            if self._dead is not None:
                raise EngineDead(self._dead)
            number = submit()
            self._boxes[number] = box
            return number

    def forget(self, number: int) -> None:
        with self._lock:
            self._boxes.pop(number, None)

    def stop(self) -> None:
        """Ends the thread; whoever still waits is told."""
        self._ending = True
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        reason = "the server is closing"
        try:
            while not self._ending:
                self._hand_out(self._poll(POLL_SECONDS))
        except SurogateError as error:
            reason = error.message
        except BaseException as error:  # whatever it is, nobody may wait for a thread that is gone
            reason = f"{type(error).__name__}: {error}"
        with self._lock:
            self._dead = reason
            boxes, self._boxes = list(self._boxes.values()), {}
        if not self._ending:
            self._on_death(reason)
        self._call([(box.event_loop, box.fail, reason) for box in boxes])

    def _hand_out(self, told: Iterable[tuple[int, Delta]]) -> None:
        by_box: dict[int, list[Delta]] = {}
        for number, delta in told:
            by_box.setdefault(number, []).append(delta)
        with self._lock:
            found = [(self._boxes[number], deltas) for number, deltas in by_box.items() if number in self._boxes]
        self._call([(box.event_loop, box.put, deltas) for box, deltas in found])

    def _call(self, calls: list[tuple[asyncio.AbstractEventLoop | None, Callable[[Any], None], Any]]) -> None:
        """Each in its event loop's thread, all of one event loop at one wake-up."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Callable[[Any], None], Any]]] = {}
        for event_loop, function, argument in calls:
            if event_loop is None:
                function(argument)
            else:
                by_loop.setdefault(event_loop, []).append((function, argument))
        for event_loop, group in by_loop.items():
            try:
                event_loop.call_soon_threadsafe(_call_all, group)
            except RuntimeError:
                pass  # the event loop is closed, and with it whoever waited


def _call_all(group: list[tuple[Callable[[Any], None], Any]]) -> None:
    for function, argument in group:
        function(argument)
