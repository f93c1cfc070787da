"""What the machine can do, measured in this process: the largest matrix product and copying. Kernels are held against it.

A GPU draws its full power within a tenth of a second of products, and slows down: `peak` is what it does rested, `sustained`
what is left. Random operands, since zeros flatter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..engine import Session
from ..program import Program
from ..program.program import (
    HOST_WRITTEN, PERSISTENT, Arena, Entry, Instruction, Storage, TensorEntry, dense_strides,
)
from ..weights.formats import byte_count
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
    one = _seconds(product, 1)
    burst = max(1, int(0.03 / one))
    rested = []
    for _ in range(3):
        time.sleep(0.15)
        rested.append(_seconds(product, burst) / burst)
    runs = max(2, int(seconds / min(rested) / 2))
    _seconds(product, runs)
    sustained = _seconds(product, runs) / runs
    move = one_op("scale", [("x", "f32", (copied,))], [("y", "f32", (copied,))], {"factor": 1.0, "out_dtype": "f32"}, backend,
                  threads, device)
    times = [_seconds(move, 4) / 4 for _ in range(4)]
    return Ceilings(size, flops / min(rested), flops / sustained, 8.0 * copied / min(times))


def one_op(
    op: str, inputs: list[Operand | None], outputs: list[Operand], attrs: dict, backend: str, threads: int | None = None,
    device: int = 0,
) -> Session:
    """A session of a program of one instruction, entry "run", its float inputs filled with random normal numbers."""
    program = Program()
    size = 0
    for operand, flags in (*((i, PERSISTENT | HOST_WRITTEN) for i in inputs), *((o, PERSISTENT) for o in outputs)):
        if operand is not None:
            name, dtype, shape = operand
            nbytes = byte_count(dtype, shape)
            program.storages.append(Storage(name, "operands", size, nbytes, flags))
            program.tensors.append(TensorEntry(name, name, 0, dtype, shape, dense_strides(shape)))
            size += -(-nbytes // 256) * 256
    program.arenas.append(Arena("operands", size))
    names = [None if i is None else i[0] for i in inputs]
    program.instructions.append(Instruction(op, tuple(names), tuple(o[0] for o in outputs), tuple(sorted(attrs.items()))))
    program.entries.append(Entry("run", 0, 1))
    session = Session(program.to_bytes(), backend, threads, device)
    numbers = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
    for operand in inputs:
        if operand is not None:
            name, dtype, shape = operand
            session.write(name, np.resize(quantize(numbers[:-96], dtype), shape))
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
