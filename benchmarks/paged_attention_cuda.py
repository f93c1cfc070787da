"""paged_attention alone: microseconds, and the share of the copy rate at which rows are read, or TFLOP/s of a prompt.

    python benchmarks/paged_attention_cuda.py                                   # Llama-3.1-8B's heads, Gemma 3's
    python benchmarks/paged_attention_cuda.py --shape 32x8x128 --sequences 32 --kernel flash --kernel cuda
    python benchmarks/paged_attention_cuda.py --shape 4x1x256 --sequences 64 --position 4096 --window 512 --mixed
    python benchmarks/paged_attention_cuda.py --shape 8x4x256 --sequences 0 --prompt 512 --position 4096
    python benchmarks/paged_attention_cuda.py --shape 16x8x128 --sequences 0 --prompt 512 --prompts 8 --position 0
    python benchmarks/paged_attention_cuda.py --backend cpu --shape 4x2x64 --sequences 2 --position 100   # that it runs

A line of JSON a case and kernel. All kernels of a case run on the same operands, by turns, as graphs; copies of the
operands lie apart, so that nothing waits in a cache. The floor is the rows that the tokens see, read once.
"""

from __future__ import annotations

import argparse
import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from surogate_core import engine  # noqa: E402
from surogate_core.bench.ceilings import measure_ceilings, wall_seconds  # noqa: E402
from surogate_core.passes.paged_kv import BLOCK_SIZE  # noqa: E402
from surogate_core.program import Program  # noqa: E402
from surogate_core.program.program import (  # noqa: E402
    HOST_WRITTEN, PERSISTENT, Arena, Entry, Instruction, Storage, TensorEntry, dense_strides,
)
from surogate_core.weights.formats import byte_count, data_shape  # noqa: E402
from surogate_core.weights.quants import quantize  # noqa: E402

LEAST_BYTES = 256 << 20
"""Of all copies of a case's caches: several times any cache of the device."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", action="append", help="query heads x key-value heads x elements of a head")
    parser.add_argument("--sequences", type=int, action="append", help="that decode; default: 1, 32 and 128")
    parser.add_argument("--position", type=int, action="append", help="of a token; default: 640, 4096, 16384")
    parser.add_argument("--mixed", action="store_true", help="positions from a sixteenth of that on")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of one more sequence, from the position on")
    parser.add_argument("--prompts", type=int, default=1, help="sequences with such a prompt")
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--softcap", type=float, default=0.0)
    parser.add_argument("--kernel", action="append", help="default: the one that the registry takes")
    parser.add_argument("--library", action="append", default=[], help="a kernel library with more of them")
    parser.add_argument("--most-gb", type=float, default=2.0, help="of caches: larger cases are left out")
    parser.add_argument("--backend", default="cuda")
    args = parser.parse_args()
    copy = measure_ceilings(args.backend, seconds=0.2).copy
    for library in args.library:
        engine.load_library(library)
    shapes = args.shape or ["32x8x128", "8x4x256", "4x1x256"]
    for shape, sequences, position in product(
        shapes, args.sequences or [1, 32, 128], args.position or [640, 4096, 16384]
    ):
        case = Case(args, shape, sequences, position)
        if case.cache_bytes <= args.most_gb * 1e9:
            for row in case.measure(copy):
                print(json.dumps(row), flush=True)


class Case:
    """Tokens of ``sequences`` sequences, and prompts of others; their blocks lie anywhere in the caches."""

    def __init__(self, args: argparse.Namespace, shape: str, sequences: int, position: int) -> None:
        self.args, self.kernels = args, args.kernel or [""]
        self.heads, self.kv_heads, self.dim = map(int, shape.split("x"))
        rng = np.random.default_rng(0)
        lone = rng.permutation(np.linspace(position // 16 if args.mixed else position, position, sequences).astype(int))
        prompts = args.prompts if args.prompt else 0
        everyone = sequences + prompts
        self.ids = np.array([*range(sequences), *np.repeat(range(sequences, everyone), args.prompt)], np.int32)
        self.positions = np.array([*lone, *[*range(position, position + args.prompt)] * prompts], np.int32)
        self.facts = {"shape": shape, "sequences": sequences, "position": position, "mixed": args.mixed,
                      "prompt": args.prompt, "prompts": prompts, "window": args.window}
        width = -(-(position + max(args.prompt, 1)) // BLOCK_SIZE)
        blocks = everyone * width
        self.tables = np.zeros((everyone, max(width, 8192 // BLOCK_SIZE)), np.int32)
        self.tables[:, :width] = rng.permutation(blocks).reshape(-1, width)
        self.rows = blocks * BLOCK_SIZE
        self.cache_bytes = 4 * self.rows * self.kv_heads * self.dim
        self.copies = max(1, min(64, round(LEAST_BYTES / self.cache_bytes))) if args.backend == "cuda" else 1

    def measure(self, copy: float) -> list[dict[str, Any]]:
        try:
            session = self._session()
        except engine.EngineError as error:
            return [{"bench": "paged-attention", **self.facts, "refused": error.message.splitlines()[0]}]
        best = [float("inf")] * len(self.kernels)
        for attempt in range(4):
            for index in range(len(self.kernels)):
                best[index] = min(best[index], self._seconds(session, f"run.{index}", warm=attempt == 0))
        names = [row["kernel"] for row in session.explain()[:: self.copies]]
        return [self._row(name, seconds, copy) for name, seconds in zip(names, best, strict=True)]

    def _seconds(self, session: engine.Session, entry: str, warm: bool) -> float:
        for _ in range(2 if warm else 0):  # loads the kernel, and records the graph
            session.run(entry)
        once = wall_seconds(lambda: session.run(entry), session.synchronize, 1)
        runs = max(1, min(100, int(0.03 / once)))
        return wall_seconds(lambda: session.run(entry), session.synchronize, runs) / runs / self.copies

    def _row(self, kernel: str, seconds: float, copy: float) -> dict[str, Any]:
        seen = self.positions.astype(np.int64) + 1
        if self.args.window:
            seen = np.minimum(seen, self.args.window)
        row = {"bench": "paged-attention", **self.facts, "kernel": kernel, "us": round(seconds * 1e6, 2)}
        if self.args.prompt:
            flops = 4.0 * self.dim * self.heads * int(seen.sum())
            return {**row, "tflops": round(flops / seconds / 1e12, 1)}
        read = 4.0 * self.dim * self.kv_heads * int(seen.sum())
        return {**row, "floor_us": round(read / copy * 1e6, 2), "gb_s": round(read / seconds / 1e9),
                "of_copy": round(read / seconds / copy, 3)}

    def _session(self) -> engine.Session:
        """An entry for each kernel, ``run.0`` and so on, all on the same copies of the operands."""
        tokens = len(self.ids)
        cache = ("bf16", (self.rows, self.kv_heads, self.dim))
        operands = {
            "q": ("bf16", (tokens, self.heads, self.dim)), "key_cache": cache, "value_cache": cache,
            "sequence_ids": ("i32", (tokens,)), "positions": ("i32", (tokens,)),
            "block_tables": ("i32", self.tables.shape), "o": ("bf16", (tokens, self.heads, self.dim)),
        }
        attrs = (("block_size", BLOCK_SIZE), ("lone", int(not self.args.prompt)), ("scale", self.dim**-0.5),
                 ("softcap", self.args.softcap), ("window", self.args.window))
        program, size = Program(), 0
        for copy, (name, (dtype, shape)) in product(range(self.copies), operands.items()):
            flags = PERSISTENT | (HOST_WRITTEN if name != "o" else 0)
            program.storages.append(Storage(f"{name}.{copy}", "operands", size, byte_count(dtype, shape), flags))
            program.tensors.append(
                TensorEntry(f"{name}.{copy}", f"{name}.{copy}", 0, dtype, shape, dense_strides(shape))
            )
            size += -(-byte_count(dtype, shape) // 256) * 256
        for index, kernel in enumerate(self.kernels):
            for copy in range(self.copies):
                inputs = tuple(f"{name}.{copy}" for name in operands if name != "o")
                program.instructions.append(Instruction("paged_attention", inputs, (f"o.{copy}",), attrs, kernel))
            program.entries.append(Entry(f"run.{index}", index * self.copies, self.copies))
        program.arenas.append(Arena("operands", size))
        session = engine.Session(program.to_bytes(), self.args.backend, None, 0)
        values = {"sequence_ids": self.ids, "positions": self.positions, "block_tables": self.tables}
        numbers = quantize(np.random.default_rng(0).standard_normal(1 << 20, np.float32)[:-96], "bf16")
        for name, (dtype, shape) in operands.items():
            if name != "o":
                value = values[name] if name in values else np.resize(numbers, data_shape(dtype, shape))
                for copy in range(self.copies):
                    session.write(f"{name}.{copy}", value)
        return session


if __name__ == "__main__":
    main()
