"""A serving step alone, at 1, 32 and 128 sequences: what it takes as a graph, its floor, and each kernel's part of it.

    python benchmarks/decode_cuda.py                                   # Llama-3.1-8B with random weights
    python benchmarks/decode_cuda.py --model llama-3.2-1b --sequences 1 --sequences 128 --position 640
    python benchmarks/decode_cuda.py --prompt 512                      # a chunk of a prompt beside the sequences
    python benchmarks/decode_cuda.py --backend cpu --model tiny        # that it runs

A line of JSON a step; with --kernels, a line a kernel. The floor is the weights and the cached rows that are read, at
the copy rate of the same process; `of_copy` is the floor's share of the time. Kernels are timed one by one, so their
sum is more than the step, in which a kernel begins while the one ahead ends.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from surogate_core import engine  # noqa: E402
from surogate_core.bench.ceilings import measure_ceilings, wall_seconds  # noqa: E402
from surogate_core.bench.presets import architecture, presets  # noqa: E402
from surogate_core.bench.random_model import random_model  # noqa: E402
from surogate_core.model import FrozenWeights  # noqa: E402
from surogate_core.model.serving import ServingShape, serving_graph, serving_programs  # noqa: E402
from surogate_core.passes import RECIPES  # noqa: E402
from surogate_core.passes.paged_kv import BLOCK_SIZE  # noqa: E402
from surogate_core.plugins.manager import get_manager  # noqa: E402
from surogate_core.weights.formats import byte_count  # noqa: E402

PLACES = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b", choices=sorted(presets()))
    parser.add_argument("--sequences", type=int, action="append", help="that decode; default: 1, 32 and 128")
    parser.add_argument("--position", type=int, default=640, help="of every sequence's token")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a prompt beside them, from position 0")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--kernels", action="store_true", help="time each kernel by itself too")
    args = parser.parse_args()
    counts = args.sequences or [1, 32, PLACES]
    step = Steps(args)
    copy = measure_ceilings(args.backend).copy
    for count, session in zip(counts, step.sessions(counts), strict=True):
        step.fill(session, count)
        print(json.dumps({"bench": "decode-step", "model": args.model, "sequences": count, "prompt": args.prompt,
                          "position": args.position, **step.measure(session, count, copy)}), flush=True)
        if args.kernels:
            for row in kernels(session):
                print(json.dumps({"bench": "decode-kernel", "sequences": count, **row}), flush=True)


class Steps:
    """The model, its weights, and what the sessions of all numbers of sequences share."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.recipe = args, RECIPES["bf16"]
        model = random_model(architecture(args.model), get_manager().families.values())
        self.weights = FrozenWeights(model, self.recipe.compute, args.backend)
        self.graph = serving_graph(model, self.recipe, self.weights, max_positions=args.context)
        self.queue = engine.Queue(args.backend)
        self.memories: dict[str, engine.Memory] = {}
        self.blocks_each = -(-(max(args.position + 1, args.prompt)) // BLOCK_SIZE)
        self.hyperparameters = model.hyperparameters

    def sessions(self, counts: list[int]) -> list[engine.Session]:
        blocks = (max(counts) + 1) * self.blocks_each
        tables = -(-self.args.context // BLOCK_SIZE)
        prompt, most = self.args.prompt, max(counts)
        shapes = [ServingShape(count + prompt, count, PLACES + 1, blocks, tables, most) for count in counts]
        dtypes = self.weights.dtypes(self.graph)
        return [self._open(p) for p in serving_programs(self.graph, self.recipe, dtypes, shapes, BLOCK_SIZE)]

    def _open(self, program: Any) -> engine.Session:
        session = self.weights.open_session(self.graph, program, queue=self.queue)
        for storage in program.external():
            if storage.name.startswith("weight.") or storage.name in self.graph.constants:
                continue
            if storage.name not in self.memories:
                self.memories[storage.name] = engine.Memory(self.args.backend, storage.bytes)
            session.bind(storage.name, self.memories[storage.name])
        return session

    def fill(self, session: engine.Session, count: int) -> None:
        """Tokens of ``count`` sequences, and of the prompt, whose place is the one after theirs."""
        prompt, position = self.args.prompt, self.args.position
        rng = np.random.default_rng(0)
        blocks = rng.permutation((count + 1) * self.blocks_each).reshape(count + 1, -1).astype(np.int32)
        tables = np.zeros(session.shape("block_tables"), np.int32)
        tables[: count + 1, : self.blocks_each] = blocks
        ids = np.array([*range(count), *[count] * prompt], np.int32)
        positions = np.array([position] * count + list(range(prompt)), np.int32)
        slots = tables[ids, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        values = {
            "tokens": rng.integers(0, self.hyperparameters.vocab_size, count + prompt).astype(np.int32),
            "sequence_ids": ids, "positions": positions, "slots": slots.astype(np.int32),
            "rows": np.arange(count, dtype=np.int32), "block_tables": tables,
        }
        for name, value in values.items():
            session.write(name, value)

    def measure(self, session: engine.Session, count: int, copy: float) -> dict[str, Any]:
        for _ in range(3):  # loads the kernels, and records the graph
            session.run("forward")
        once = wall_seconds(lambda: session.run("forward"), session.synchronize, 3) / 3
        runs = max(3, min(300, int(0.3 / once)))
        seconds = min(wall_seconds(lambda: session.run("forward"), session.synchronize, runs) / runs for _ in range(3))
        weights, cached = self._weight_bytes(), self._cached_bytes(count)
        return {
            "ms": round(seconds * 1e3, 3), "tokens_s": round(count / seconds), "weight_gb": round(weights / 1e9, 3),
            "cached_gb": round(cached / 1e9, 3), "floor_ms": round((weights + cached) / copy * 1e3, 3),
            "of_copy": round((weights + cached) / copy / seconds, 3), "copy_gb_s": round(copy / 1e9),
            "recorded": session.why_not_recorded("forward") or True,
        }

    def _weight_bytes(self) -> int:
        """Of all parameters but the embedding, where it is not the head too."""
        dtypes = self.weights.dtypes(self.graph)
        shapes = {name: tuple(value.shape) for name, value, _ in self.graph.instances()}
        sizes = {name: byte_count(dtypes[name], shape) for name, shape in shapes.items()}
        vocab = self.hyperparameters.vocab_size
        tables = [sizes[name] for name, shape in shapes.items() if shape[0] == vocab]
        return sum(sizes.values()) - (min(tables) if len(tables) > 1 else 0)

    def _cached_bytes(self, count: int) -> int:
        caches = [m for name, m in self.memories.items() if "_cache" in name]
        rows = (max(self.args.sequences or [1, 32, PLACES]) + 1) * self.blocks_each * BLOCK_SIZE
        return sum(memory.bytes for memory in caches) // rows * count * (self.args.position + 1)


def kernels(session: engine.Session) -> list[dict[str, Any]]:
    """Of the step, each instruction's least time of three, by op and kernel."""
    runs = [session.profile("forward") for _ in range(3)]
    sums: dict[tuple[str, str], list[float]] = defaultdict(list)
    for index, (op, kernel, _) in enumerate(runs[0]):
        sums[op, kernel].append(min(run[index][2] for run in runs))
    rows = sorted(sums.items(), key=lambda item: -sum(item[1]))
    return [
        {"op": op, "kernel": kernel, "calls": len(times), "ms": round(sum(times) * 1e3, 3),
         "us_each": round(sum(times) / len(times) * 1e6, 2)}
        for (op, kernel), times in rows
    ]


if __name__ == "__main__":
    main()
