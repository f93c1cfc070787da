"""Programs bound to a device."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np

from ..errors import EngineError
from .library import backend_module

_NUMPY = {
    "f32": np.float32, "f16": np.float16, "f64": np.float64, "bf16": np.uint16, "i8": np.int8, "u8": np.uint8,
    "i32": np.int32, "i64": np.int64,
}


def default_threads() -> int:
    """The number of processors that this process may use."""
    return len(os.sched_getaffinity(0))


def device_info(backend: str, device: int = 0) -> dict[str, Any]:
    """name, versions (one line), total_bytes, free_bytes (now), num_units, architecture (90 for compute capability 9.0).
    Raises :class:`EngineError` where the device cannot be used."""
    return backend_module(backend).device_info(backend, device)


class Memory:
    """Memory of a device, or a part of a session's: what storages are bound to, and what sessions share."""

    __slots__ = ("native",)

    def __init__(self, backend: str, bytes: int, device: int = 0) -> None:
        """Allocates; zeroed. Raises :class:`EngineError` where the device has not enough left."""
        self.native = backend_module(backend).allocate(backend, device, bytes)

    @classmethod
    def _of(cls, native: Any) -> Memory:
        self = cls.__new__(cls)
        self.native = native
        return self

    @property
    def bytes(self) -> int:
        return self.native.bytes

    def write(self, array: np.ndarray, offset: int = 0) -> None:
        """Copies a contiguous array to ``offset`` bytes past the beginning; it is there when this returns."""
        self.native.write(array, offset)

    def read(self, array: np.ndarray, offset: int = 0) -> None:
        """Fills a contiguous array from ``offset`` bytes past the beginning."""
        self.native.read(array, offset)


class Queue:
    """Where sessions run: a device, its streams and the host's threads. Sessions opened on one queue run one at a time, in
    the order of the calls, and share the kernels' workspace and every arena in which nothing is kept from one run to the
    next: what they computed there is gone once another of them runs. Open the largest first, so that the memory it needs
    serves the others too."""

    __slots__ = ("native",)

    def __init__(self, backend: str = "cpu", device: int = 0, threads: int | None = None) -> None:
        """`threads` counts the thread that runs sessions; None: every processor this process may use. Raises
        :class:`EngineError`."""
        self.native = backend_module(backend).open_queue(backend, device, threads or default_threads())

    @property
    def backend(self) -> str:
        return self.native.backend()

    @property
    def device(self) -> int:
        return self.native.device()

    @property
    def threads(self) -> int:
        return self.native.threads()

    def synchronize(self) -> None:
        """Waits for everything that was run."""
        self.native.synchronize()


class Session:
    """A program, verified, with a kernel chosen and prepared for every instruction and its arenas allocated.

    `program`: the bytes of a program file (any object with the buffer protocol). `threads` counts the thread that calls
    :meth:`run`; None takes every processor this process may use. `device`: which one of the backend's devices.
    `graphs`: on a device, record an entry at its second run and launch the recording from then on; the results are the
    same bits. `queue`: run there, beside other sessions; backend, device and threads are the queue's then, and those
    arguments count for nothing. `batch_invariant`: only kernels whose results for a token have the same bits whatever other
    tokens are in the call. Raises :class:`EngineError`, also for an op that has no such kernel.
    """

    __slots__ = ("_native", "_session")

    def __init__(
        self, program: Any, backend: str = "cpu", threads: int | None = None, device: int = 0, graphs: bool = True,
        queue: Queue | None = None, batch_invariant: bool = False,
    ) -> None:
        if queue is not None:
            backend, device, threads = queue.backend, queue.device, queue.threads
        self._native = backend_module(backend)
        self._session = self._native.open_session(
            program, backend, device, threads or default_threads(), graphs, False, None if queue is None else queue.native,
            batch_invariant,
        )

    @property
    def native(self) -> Any:
        return self._session

    def bind(self, storage: str, buffer: Any) -> None:
        """Gives an external storage its memory, which the session keeps alive until another takes its place.

        `buffer`: a :class:`Memory` of the session's device; on the CPU also any contiguous object with the buffer
        protocol, of exactly the storage's size; read-only ones (a memory map of a weight file) do for storages that no
        instruction writes. Raises :class:`EngineError`.
        """
        self._session.bind(storage, buffer.native if isinstance(buffer, Memory) else buffer)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._session.tensor_type(name)[1])

    def write(self, name: str, values: Any, first: int | None = None) -> None:
        """Copies an array into a dense tensor: the whole of it, or, with `first`, its elements from there on.

        bf16 travels as uint16, quantised rows as the uint8 bytes of their blocks (then `first` counts bytes). On a device
        the copy takes its place behind what was run before. Raises :class:`EngineError`.
        """
        dtype, shape = self._session.tensor_type(name)
        kind = np.dtype(_NUMPY.get(dtype, np.uint8))
        array = np.asarray(values)
        if dtype not in ("f32", "f16", "f64") and array.dtype.kind == "f":
            raise EngineError(f"tensor {name!r} is {dtype}, and was given {array.dtype} values",
                              "convert them first; bf16 travels as uint16")
        array = np.ascontiguousarray(array, kind)
        if dtype in _NUMPY and first is None and array.size != math.prod(shape):
            raise EngineError(f"tensor {name!r} has shape {tuple(shape)}, and was given {array.size} values")
        self._session.write(name, (first or 0) * kind.itemsize, array)

    def read(self, name: str, first: int = 0, count: int | None = None) -> np.ndarray:
        """A copy of a dense tensor, in numpy's form (see :meth:`write`); with `count`, of that many elements from `first`
        on as one axis. On a device this waits for what was run before. Raises :class:`EngineError`."""
        dtype, shape = self._session.tensor_type(name)
        kind = np.dtype(_NUMPY.get(dtype, np.uint8))
        if count is not None:
            array = np.empty(count, kind)
        elif dtype in _NUMPY:
            array = np.empty(shape, kind)
        else:
            array = np.empty(self.share(name).bytes, kind)
        self._session.read(name, first * kind.itemsize, array)
        return array

    def tensor(self, name: str) -> np.ndarray:
        """CPU only: a view of a tensor's memory, which it keeps alive, rows apart where they are."""
        return self._native.tensor(self._session, name)

    def share(self, name: str) -> Memory:
        """The memory of a tensor, for a storage of another session on the same device. It keeps this session alive."""
        return Memory._of(self._native.share(self._session, name))

    def run(self, entry: str) -> None:
        """Runs an entry, without the GIL: to its end on the CPU; on a device it has begun, and what is put there later
        follows. Raises :class:`EngineError` naming the instruction that failed."""
        self._session.run(entry)

    def synchronize(self) -> None:
        """Waits for everything that was run."""
        self._session.synchronize()

    def profile(self, entry: str) -> list[tuple[str, str, float]]:
        """Runs an entry (on a device twice, if it is its first run) and returns (op, kernel, seconds) for each of its
        instructions."""
        return self._session.profile(entry)

    def why_not_recorded(self, entry: str) -> str:
        """Why an entry is run instruction by instruction; "" where it is recorded as a graph of the device."""
        return self._session.why_not_recorded(entry)

    def explain(self) -> list[dict[str, Any]]:
        """For each instruction: op, kernel, library, score, requested (kernel asked for, or None), candidates as (name,
        library, score) from best to worst, workspace in bytes, capturable, tuning (what the kernel decided by measuring,
        or ""), inputs and outputs (tensor names, None where absent)."""
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


def plan(program: Any, backend: str = "cpu", threads: int | None = None, device: int = 0) -> dict[str, Any]:
    """What a :class:`Session` of this program would be, without allocating anything.

    Returns instructions (as :meth:`Session.explain`) and arenas, workspace, external (as :meth:`Session.memory`). The
    program is verified on the way. Raises :class:`EngineError`.
    """
    threads = threads or default_threads()
    session = backend_module(backend).open_session(program, backend, device, threads, False, True, None, False)
    return {"instructions": session.explain(), **session.memory()}
