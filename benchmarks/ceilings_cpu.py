"""What the cores can do: matrix products of oneDNN, reading and copying memory. Kernels are judged against these.

    python benchmarks/ceilings_cpu.py

The products have the shapes of SmolLM2 with 2,048 tokens: weights [N, K] of 1536x576, 576x1536, 576x576, 192x576 and rank 16.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from common import emit

SHAPES = ((1536, 576), (576, 1536), (576, 576), (192, 576), (16, 576))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--reps", type=int, default=20)
    parser.add_argument("--mib", type=int, default=256, help="of memory read and copied")
    args = parser.parse_args()
    metrics = {f"read_gb_s_{threads}": read_rate(args, threads) for threads in sorted({1, args.threads})}
    metrics |= {f"copy_gb_s_{threads}": copy_rate(args, threads) for threads in sorted({1, args.threads})}
    for dtype in ("bf16", "f32"):
        for rows, width in SHAPES:
            metrics[f"onednn_{dtype}_{rows}x{width}_gflop_s"] = product_rate(args, dtype, rows, width)
    emit("ceilings", metrics, threads=args.threads, tokens=args.tokens)


def best(call, reps: int) -> float:
    """Least seconds of ``reps`` calls."""
    def timed() -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    return min(timed() for _ in range(reps))


def over_threads(work, parts: list, reps: int) -> float:
    with ThreadPoolExecutor(len(parts)) as pool:
        return best(lambda: list(pool.map(work, parts)), reps)


def read_rate(args, threads: int) -> float:
    """GB/s of summing integers, each thread its part."""
    parts = np.array_split(np.ones(args.mib << 17, np.int64), threads)
    return round(args.mib * 2**20 / over_threads(np.bitwise_or.reduce, parts, args.reps) / 1e9, 1)


def copy_rate(args, threads: int) -> float:
    """GB/s read plus GB/s written."""
    source = np.ones(args.mib << 17, np.int64)
    pairs = list(zip(np.array_split(np.empty_like(source), threads), np.array_split(source, threads), strict=True))
    return round(2 * args.mib * 2**20 / over_threads(lambda pair: np.copyto(*pair), pairs, args.reps) / 1e9, 1)


def product_rate(args, dtype: str, rows: int, width: int) -> float:
    """GFLOP/s of y = x @ weight.T by oneDNN, run on this engine's threads."""
    from surogate_core import engine
    from surogate_core.weights.quants import f32_to_bf16

    random = np.random.default_rng(0)

    def operand(*shape: int):
        values = random.standard_normal(shape, np.float32)
        return values if dtype == "f32" else (f32_to_bf16(values), "bf16", shape)

    x, weight, y = operand(args.tokens, width), operand(rows, width), operand(args.tokens, rows)
    seconds = best(
        lambda: engine.run_op("linear", [x, weight, None, None], [y], kernel="onednn", threads=args.threads), args.reps
    )
    return round(2 * args.tokens * rows * width / seconds / 1e9, 1)


if __name__ == "__main__":
    main()
