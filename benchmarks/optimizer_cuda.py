"""Clipping and AdamW over as many parameters as a model has: seconds of one update, bytes, and the share of copying.

    python benchmarks/optimizer_cuda.py                                    # 8.2e9 parameters, 82 GB
    python benchmarks/optimizer_cuda.py --backend cpu --parameters 100000

Gradients in fp32; parameters and both states in bf16, rounded stochastically. The two instructions of a training
program's update: `global_norm` reads 4 bytes a parameter, `adamw` reads 10 and writes 6, which makes 20. Random numbers
everywhere. `of_copy` is the rate of these bytes over that of a copy in the same process; `times_floor` its inverse.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from surogate_core.bench.ceilings import measure_ceilings, wall_seconds  # noqa: E402
from surogate_core.bench.train import describe_device, versions  # noqa: E402
from surogate_core.engine import Session  # noqa: E402
from surogate_core.program import Program  # noqa: E402
from surogate_core.program.program import (  # noqa: E402
    HOST_WRITTEN, PERSISTENT, Arena, Entry, Instruction, Storage, TensorEntry,
)
from surogate_core.weights.formats import byte_count  # noqa: E402

SPREADS = {"grad": 1e-4, "param": 2e-2, "m": 1e-5, "v": 1e-9}
"""Of the numbers in each flat operand, about as training has them; those of v are squares."""
BYTES = {"global_norm": 4, "adamw": 16}
"""Read and written for each parameter."""
SHIFTS = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=8_200_000_000)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--piece", type=int, default=1 << 26, help="random numbers that are drawn, and go round")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    copy = measure_ceilings(args.backend).copy
    program = update_program(args.parameters, min(args.piece, args.parameters))
    session = open_filled(program, args.backend)
    session.run("update")
    once = wall_seconds(lambda: session.run("update"), session.synchronize, 2) / 2
    runs = max(1, int(0.5 / once))
    rounds = [wall_seconds(lambda: session.run("update"), session.synchronize, runs) / runs for _ in range(args.rounds)]
    seconds, moved = float(np.median(rounds)), sum(BYTES.values()) * args.parameters
    norm = float(session.read("norm")[0])
    if not np.isfinite(norm):
        raise SystemExit(f"the norm of the gradients is {norm}: nothing was updated, so there is nothing to measure")
    row = {
        "bench": "optimizer", "parameters": args.parameters, "ms": round(seconds * 1e3, 3),
        "ms_of_rounds": [round(each * 1e3, 3) for each in rounds], "bytes": moved,
        "gb_s": round(moved / seconds / 1e9, 1), "copy_gb_s": round(copy / 1e9, 1),
        "of_copy": round(moved / seconds / copy, 3), "times_floor": round(seconds * copy / moved, 3), "norm": norm,
        "parts": parts(session, args.parameters, copy), "graph": not session.why_not_recorded("update"),
        "device": describe_device(args.backend), "versions": versions(args.backend),
    }
    print(json.dumps(row), flush=True)


def parts(session: Session, parameters: int, copy: float) -> dict[str, dict[str, float]]:
    """Each instruction alone, the least of three runs."""
    runs = [session.profile("update") for _ in range(3)]
    found = {}
    for index, (op, kernel, _) in enumerate(runs[0]):
        seconds = min(run[index][2] for run in runs)
        rate = BYTES[op] * parameters / seconds
        found[op] = {"kernel": kernel, "ms": round(seconds * 1e3, 3), "of_copy": round(rate / copy, 3)}
    return found


def update_program(parameters: int, piece: int) -> Program:
    """Entries: "fill" spreads the random "numbers" over the flat operands, "update" is the update."""
    program = Program()
    sizes: dict[str, int] = {}

    def declare(name: str, dtype: str, count: int, arena: str, flags: int) -> None:
        first, nbytes = sizes.get(arena, 0), byte_count(dtype, (count,))
        program.storages.append(Storage(name, arena, first, nbytes, flags))
        program.tensors.append(TensorEntry(name, name, 0, dtype, (count,), (1,)))
        sizes[arena] = first + -(-nbytes // 256) * 256

    drawn = piece + SHIFTS
    for name, count in (("numbers", drawn), ("squares", drawn), ("hyper", 4)):
        declare(name, "f32", count, "inputs", PERSISTENT | HOST_WRITTEN)
    declare("norm", "f32", 1, "inputs", PERSISTENT)
    for name in SPREADS:
        declare(name, "f32" if name == "grad" else "bf16", parameters, name, PERSISTENT)
    for name in SPREADS:
        _fill(program, name, parameters, piece)
    filled = len(program.instructions)
    attrs = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "max_grad_norm": 1.0, "rounding": "stochastic", "seed": 5,
             "weight_decay": 0.01}
    program.instructions += [
        Instruction("global_norm", ("grad",), ("norm",)),
        Instruction("adamw", ("grad", "norm", "hyper"), ("param", "m", "v"), tuple(attrs.items())),
    ]
    program.entries += [Entry("fill", 0, filled), Entry("update", filled, 2)]
    program.arenas = [Arena(name, size) for name, size in sizes.items()]
    return program


def _fill(program: Program, name: str, parameters: int, piece: int) -> None:
    """Piece after piece, each from another place of the numbers on."""
    dtype, source = program.tensor(name).dtype, "squares" if name == "v" else "numbers"
    for number, first in enumerate(range(0, parameters, piece)):
        count = min(piece, parameters - first)
        shift = (64 * len(program.instructions)) % SHIFTS
        part, drawn = f"{name}.{number}", f"{source}.{name}.{number}"
        program.tensors.append(TensorEntry(part, name, byte_count(dtype, (first,)), dtype, (count,), (1,)))
        program.tensors.append(TensorEntry(drawn, source, 4 * shift, "f32", (count,), (1,)))
        attrs = (("factor", SPREADS[name]), ("out_dtype", dtype))
        program.instructions.append(Instruction("scale", (drawn, None), (part,), attrs))


def open_filled(program: Program, backend: str) -> Session:
    session = Session(program.to_bytes(), backend)
    drawn = np.random.default_rng(0).standard_normal(session.shape("numbers")[0], np.float32)
    session.write("numbers", drawn)
    session.write("squares", drawn * drawn)
    session.write("hyper", np.array([1e-4, 10.0, 0.0, 0.0], np.float32))
    session.run("fill")
    session.synchronize()
    return session


if __name__ == "__main__":
    main()
