"""How near each kernel comes to what the cores can do: time, GFLOP/s and GB/s by op, beside ceilings measured here.

    python benchmarks/train_cpu.py --profile
    python benchmarks/decode_cpu.py --profile

FLOPs are those of the op's record; bytes are each operand read or written once.
"""

from __future__ import annotations

import time
from collections import defaultdict

import numpy as np

from surogate_core import ops
from surogate_core.ops.record import TensorType
from surogate_core.weights.formats import byte_count


def table(session, program, entry: str, repeats: int = 3) -> str:
    """Text: one line an (op, kernel), the costliest first; the least of ``repeats`` runs counts for each instruction."""
    first, count = next((e.first, e.count) for e in program.entries if e.name == entry)
    runs = [session.profile(entry) for _ in range(repeats)]
    rows: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
    for index in range(count):
        op, kernel, _ = runs[0][index]
        flops, size = cost(program, program.instructions[first + index])
        row = rows[op, kernel]
        row[0] += 1
        row[1] += min(run[index][2] for run in runs)
        row[2] += flops
        row[3] += size
    total = sum(row[1] for row in rows.values())
    lines = [f"{entry}: {total * 1e3:.2f} ms; copy {copy_rate():.1f} GB/s (read + write, all threads of numpy: one)"]
    lines.append(f"{'op':<28}{'kernel':<16}{'calls':>6}{'ms':>10}{'share':>8}{'GFLOP/s':>10}{'GB/s':>8}")
    for (op, kernel), (calls, seconds, flops, size) in sorted(rows.items(), key=lambda item: -item[1][1]):
        lines.append(f"{op:<28}{kernel:<16}{calls:>6}{seconds * 1e3:>10.2f}{seconds / total:>8.1%}"
                     f"{flops / seconds / 1e9:>10.1f}{size / seconds / 1e9:>8.1f}")
    return "\n".join(lines)


def cost(program, instruction) -> tuple[float, float]:
    """FLOPs and bytes of one instruction."""
    types, size = [], 0
    for name in (*instruction.inputs, *instruction.outputs):
        entry = None if name is None else program.tensor(name)
        types.append(None if entry is None else TensorType(entry.shape, entry.dtype))
        size += 0 if entry is None else byte_count(entry.dtype, entry.shape)
    rule = ops.get(instruction.op).flops
    return (rule(types[:len(instruction.inputs)], dict(instruction.attrs)) if rule else 0.0), size


def copy_rate() -> float:
    source = np.random.default_rng(0).standard_normal(32 << 20, np.float32)
    target = np.empty_like(source)
    best = min(_timed(lambda: np.copyto(target, source)) for _ in range(5))
    return 2 * source.nbytes / best / 1e9


def _timed(call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
