"""Programs bound to a device."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from .library import load


def default_threads() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


class Session:
    """A program, verified, with a kernel chosen and prepared for every instruction and its arenas allocated.

    `program`: the bytes of a program file (any object with the buffer protocol). `threads` counts the thread that calls
    :meth:`run`; None takes every processor this process may use. Raises :class:`EngineError`.
    """

    __slots__ = ("_native", "_session")

    def __init__(self, program: Any, backend: str = "cpu", threads: int | None = None) -> None:
        self._native = load()
        self._session = self._native.open_session(program, backend, threads or default_threads(), False)

    def bind(self, storage: str, buffer: Any) -> None:
        """Gives an external storage its memory, which the session keeps alive until another takes its place.

        `buffer`: any contiguous object with the buffer protocol, of exactly the storage's size; read-only ones (a
        memory map of a weight file) do for storages that no instruction writes. Raises :class:`EngineError`.
        """
        self._session.bind(storage, buffer)

    def tensor(self, name: str) -> np.ndarray:
        """A view of a tensor's memory, shared with the program, which it keeps alive: bf16 as uint16, quantised rows as
        the uint8 bytes of their blocks. Inputs are written through it before a run, results read after one."""
        return self._native.tensor(self._session, name)

    def run(self, entry: str) -> None:
        """Runs an entry to its end, without the GIL. Raises :class:`EngineError` naming the instruction that failed."""
        self._session.run(entry)

    def profile(self, entry: str) -> list[tuple[str, str, float]]:
        """Runs an entry and returns (op, kernel, seconds) for each of its instructions."""
        return self._session.profile(entry)

    def explain(self) -> list[dict[str, Any]]:
        """For each instruction: op, kernel, library, score, requested (kernel asked for, or None), candidates as (name,
        library, score) from best to worst, workspace in bytes, inputs and outputs (tensor names, None where absent)."""
        return self._session.explain()

    def memory(self) -> dict[str, Any]:
        """In bytes: arenas (by name), workspace, external (by storage name)."""
        return self._session.memory()

    def entries(self) -> dict[str, range]:
        """The entries by name, each with the range of its instructions."""
        return {name: range(first, first + count) for name, first, count in self._session.entries()}

    @property
    def threads(self) -> int:
        """Threads that run a kernel, the calling one included."""
        return self._session.threads()


def plan(program: Any, backend: str = "cpu", threads: int | None = None) -> dict[str, Any]:
    """What a :class:`Session` of this program would be, without allocating anything.

    Returns instructions (as :meth:`Session.explain`) and arenas, workspace, external (as :meth:`Session.memory`). The
    program is verified on the way. Raises :class:`EngineError`.
    """
    session = load().open_session(program, backend, threads or default_threads(), True)
    return {"instructions": session.explain(), **session.memory()}
