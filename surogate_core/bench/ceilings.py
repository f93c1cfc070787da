"""What the machine can do, measured in this process: the largest matrix product and copying. Kernels are held against it.

A GPU draws its full power within a tenth of a second of products, and slows down: `peak` is what it does rested, `sustained`
what is left. Random operands, since zeros flatter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine import Session
from ..program import Program
from ..program.program import (
    HOST_WRITTEN, PERSISTENT, Arena, Entry, Instruction, Storage, TensorEntry, dense_strides,
)
from ..weights.formats import byte_count, data_shape
from ..weights.quants import quantize

Operand = tuple[str, str, tuple[int, ...]]
"""Name, dtype, shape."""


@dataclass(frozen=True)
class Ceilings:
    """FLOP/s of a bf16 product of ``size`` cubed, rested and sustained; bytes read and written a second by a copy."""

    size: int
    gemm_peak: float
    gemm_sustained: float
    copy: float


LEAST_BYTES = 512 << 20
"""Of all copies of a call's operands, where that is at most 64 copies: several times any cache."""


@dataclass(frozen=True)
class SmallCopies:
    """Seconds that copies take among their like, by the bytes that they read and write, ascending. A launch, the first loads'
    latency and the last stores' are in each, so that a short one has a lower rate than ``Ceilings.copy``."""

    bytes: tuple[float, ...]
    seconds: tuple[float, ...]

    def seconds_of(self, moved: float) -> float:
        """Of a copy of as many bytes: on a line between the sizes beside it; below the least its time, above the largest at its
        rate."""
        return float(np.interp(moved, self.bytes, self.seconds)) * max(1.0, moved / self.bytes[-1])


def measure_ceilings(
    backend: str, threads: int | None = None, device: int = 0, seconds: float | None = None
) -> Ceilings:
    """``seconds``: about how long the product runs; None: 1.5 on a device, 0.3 on the CPU."""
    on_cpu = backend == "cpu"
    seconds = seconds or (0.3 if on_cpu else 1.5)
    size, copied = (1024, 1 << 22) if on_cpu else (8192, 1 << 28)
    product = one_op(
        "linear", [("x", "bf16", (size, size)), ("weight", "bf16", (size, size)), None, None], [("y", "bf16", (size, size))],
        {"alpha": 1.0, "out_dtype": "bf16"}, backend, threads, device,
    )
    flops = 2.0 * size**3
    _seconds(product, 3)  # loads the kernel, and records the graph
    one = _seconds(product, 2) / 2
    burst = max(1, int(0.03 / one))
    rested = []
    for _ in range(3):
        time.sleep(0.15)
        rested.append(_seconds(product, burst) / burst)
    runs = max(2, int(seconds / min(rested) / 2))
    _seconds(product, runs)
    sustained = _seconds(product, runs) / runs
    operand = ("f32", (copied,))
    attrs = {"factor": 1.0, "out_dtype": "f32"}
    move = one_op("scale", [("x", *operand), None], [("y", *operand)], attrs, backend, threads, device)
    times = [_seconds(move, 4) / 4 for _ in range(5)]
    return Ceilings(size, flops / min(rested), flops / sustained, 8.0 * copied / min(times))


def measure_small_copies(
    backend: str, ceilings: Ceilings, threads: int | None = None, device: int = 0, copies: int = 0
) -> SmallCopies:
    """The same copy at smaller sizes, each many times in one recorded graph, on operands that lie apart; the largest size is that
    of ``ceilings``. ``copies``: how many; 0: as many as it takes to leave the caches."""
    sizes, top = ((14, 18, 22), 1 << 25) if backend == "cpu" else (range(20, 30), 1 << 31)
    seconds = []
    for size in sizes:
        operand = ("f32", (1 << size >> 3,))
        count = copies or copies_beyond_caches(1 << size)
        move = one_op("scale", [("x", *operand), None], [("y", *operand)], {"factor": 1.0, "out_dtype": "f32"}, backend, threads,
                      device, copies=count)
        seconds.append(call_seconds(move, count, 0.05))
    return SmallCopies((*(float(1 << size) for size in sizes), float(top)), (*seconds, top / ceilings.copy))


def copies_beyond_caches(moved: float) -> int:
    return max(1, min(64, round(LEAST_BYTES / max(moved, 1))))


def call_seconds(session: Session, copies: int, budget: float = 0.15) -> float:
    """Of one call of a session of `one_op` with so many ``copies``: the least of three means, each over about ``budget`` seconds
    of at most 200 runs."""
    _seconds(session, 2)  # loads the kernel, and records the graph
    runs = max(2, min(200, int(budget / (_seconds(session, 2) / 2))))
    return min(_seconds(session, runs) / runs for _ in range(3)) / copies


def one_op(
    op: str, inputs: Sequence[Operand | None], outputs: Sequence[Operand | None], attrs: Mapping[str, Any], backend: str,
    threads: int | None = None, device: int = 0, *, copies: int = 1, values: Mapping[str, np.ndarray] | None = None,
) -> Session:
    """A session of a program that runs one op, ``copies`` times on operands of their own: entry "run". Operands hold what
    ``values`` has under their names, floats otherwise random normal numbers."""
    program = Program()
    size = 0
    for copy in range(copies):
        for operand, flags in (*((i, PERSISTENT | HOST_WRITTEN) for i in inputs), *((o, PERSISTENT) for o in outputs)):
            if operand is not None:
                name, dtype, shape = f"{operand[0]}.{copy}", operand[1], operand[2]
                nbytes = byte_count(dtype, shape)
                program.storages.append(Storage(name, "operands", size, nbytes, flags))
                program.tensors.append(TensorEntry(name, name, 0, dtype, shape, dense_strides(shape)))
                size += -(-nbytes // 256) * 256
        named = [tuple(None if o is None else f"{o[0]}.{copy}" for o in side) for side in (inputs, outputs)]
        program.instructions.append(Instruction(op, named[0], named[1], tuple(sorted(attrs.items()))))
    program.arenas.append(Arena("operands", size))
    program.entries.append(Entry("run", 0, copies))
    session = Session(program.to_bytes(), backend, threads, device)
    numbers = np.random.default_rng(0).standard_normal(1 << 20, np.float32)[:-96]
    for operand in (*inputs, *outputs):
        if operand is None:
            continue
        name, dtype, shape = operand
        given = (values or {}).get(name)
        if given is None:
            form = data_shape(dtype, shape)
            given = np.zeros(shape, np.int32) if dtype == "i32" else np.resize(quantize(numbers, dtype), form)
        for copy in range(copies):
            session.write(f"{name}.{copy}", given)
    return session


def _seconds(session: Session, runs: int) -> float:
    return wall_seconds(lambda: session.run("run"), session.synchronize, runs)


def wall_seconds(run: Callable[[], None], wait: Callable[[], None], runs: int) -> float:
    """Seconds from the first of ``runs`` to the end of the last, on an idle device."""
    wait()
    started = time.perf_counter()
    for _ in range(runs):
        run()
    wait()
    return time.perf_counter() - started
