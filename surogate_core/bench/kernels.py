"""`surogate profile`: every kernel of a training step with what it moves, what it computes and how near it is to its floor."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .. import engine, ops
from ..ops.record import TensorType
from ..program import Program
from ..program.program import Instruction
from ..weights.formats import byte_count
from .ceilings import Ceilings
from .presets import presets
from .train import document_lengths
from .workload import Workload, from_preset

WIDE = 2048
"""Width of the narrowest models that a GPU's kernels are told by."""

_ROWS_ONLY = {"embedding": ("weight", "y"), "embedding_weight_grad": ("dweight", "dy"), "gather_rows": ("x", "y")}
"""Ops that touch only some rows of an operand (the first named): as many elements as the other operand has."""
_ATTENTION_PRODUCTS = {"attention": 4, "attention_grad": 10}
"""FLOPs for each pair of a query and a key, and each element of a head: two products forward, five backward."""


@dataclass
class Row:
    """All calls of one kind. bytes: each operand read once or written once, of all calls; floor: seconds of them at the
    ceilings."""

    op: str
    kernel: str
    operands: str
    count: int = 0
    seconds: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0
    floor: float = 0.0

    def figures(self, total: float) -> dict[str, Any]:
        return {
            "op": self.op, "kernel": self.kernel, **({"operands": self.operands} if self.operands else {}),
            "count": self.count, "ms": self.seconds * 1e3, "share": self.seconds / total,
            "gb_per_second": self.bytes / self.seconds / 1e9, "tflops": self.flops / self.seconds / 1e12,
            "share_of_floor": self.floor / self.seconds,
        }


def profile_step(workload: Workload, ceilings: Ceilings, shapes: bool, repeats: int = 3) -> dict[str, list[Row]]:
    """Rows of the entries of a step, the costliest first: `micro_step` as often as a step has micro-batches. ``shapes``
    tells calls with other operands apart. Each instruction counts with the least of ``repeats`` runs."""
    session, loader = workload.session, workload.prepared.loader
    step = loader.next_step()
    for index in range(2):
        session.step(step, index, 0.0)
    lengths = document_lengths(step)
    program = workload.prepared.plan.program
    result = {}
    for entry in program.entries:
        if entry.name not in ("begin", "micro_step", "update"):
            continue
        times = len(step) if entry.name == "micro_step" else 1
        runs = [session.session.profile(entry.name) for _ in range(repeats)]
        rows: dict[tuple[str, str, str], Row] = {}
        for index in range(entry.count):
            op, kernel, _ = runs[0][index]
            instruction = program.instructions[entry.first + index]
            key = (op, kernel, _operands(program, instruction) if shapes else "")
            row = rows.setdefault(key, Row(*key))
            flops, moved = cost(program, instruction, lengths, len(step))
            row.count += times
            row.seconds += times * min(run[index][2] for run in runs)
            row.flops += times * flops
            row.bytes += times * moved
            row.floor += times * max(moved / ceilings.copy, flops / ceilings.gemm_peak)
        result[entry.name] = sorted(rows.values(), key=lambda row: -row.seconds)
    return result


def cost(program: Program, instruction: Instruction, lengths: Sequence[int], micro_batches: int) -> tuple[float, float]:
    """FLOPs and bytes of one instruction. ``lengths``: of the documents of a whole step, which attention's follow from."""
    record = ops.get(instruction.op)
    named = [*zip(record.inputs, instruction.inputs), *zip(record.outputs, instruction.outputs)]
    entries = {operand.name: program.tensor(name) for operand, name in named if name is not None}
    moved = 0.0
    partial, like = _ROWS_ONLY.get(instruction.op, (None, None))
    for operand, name in named:
        if name is None:
            continue
        entry = entries[operand.name]
        size = byte_count(entry.dtype, entry.shape)
        if operand.name == partial:
            size *= math.prod(entries[like].shape) / max(1, math.prod(entry.shape))
        moved += size * (2 if operand.inout and instruction.op != "fill" else 1)
    if instruction.op in _ATTENTION_PRODUCTS:
        heads = math.prod(entries["q"].shape[1:])
        window = int(dict(instruction.attrs).get("window", 0))
        pairs = sum(n * n / 2 if not window or window >= n else window * n - window * window / 2 for n in lengths)
        return _ATTENTION_PRODUCTS[instruction.op] * heads * pairs / micro_batches, moved
    if record.flops is None:
        return 0.0, moved
    types = [None if name is None else TensorType(program.tensor(name).shape, program.tensor(name).dtype)
             for name in instruction.inputs]
    flops = record.flops(types, dict(instruction.attrs))
    if instruction.op == "linear_cross_entropy_grad" and "dweight" not in entries:
        flops *= 2 / 3  # logits and the gradient to x; the third product is the weight's
    return flops, moved


def _operands(program: Program, instruction: Instruction) -> str:
    def form(name: str | None) -> str:
        if name is None:
            return "-"
        entry = program.tensor(name)
        return f"{entry.dtype}[{'x'.join(map(str, entry.shape))}]"

    return f"{' '.join(map(form, instruction.inputs))} -> {' '.join(map(form, instruction.outputs))}"


def table(rows: dict[str, list[Row]], ceilings: Ceilings) -> str:
    """The rows as text."""
    lines = [
        f"bf16 product of {ceilings.size}^3: {ceilings.gemm_peak / 1e12:.1f} TFLOP/s rested, "
        f"{ceilings.gemm_sustained / 1e12:.1f} sustained; copy {ceilings.copy / 1e9:.0f} GB/s read and written",
    ]
    total = sum(row.seconds for entry in rows.values() for row in entry)
    for entry, kinds in rows.items():
        seconds = sum(row.seconds for row in kinds)
        floor = sum(row.floor for row in kinds)
        lines += ["", f"{entry}: {seconds * 1e3:.3f} ms a step, {seconds / total:.1%} of it; floor {floor * 1e3:.3f} ms",
                  f"{'op':<28}{'kernel':<16}{'calls':>6}{'ms':>11}{'share':>8}{'GB/s':>9}{'TFLOP/s':>9}{'of floor':>10}"]
        for row in kinds:
            each = row.figures(total)
            lines.append(
                f"{row.op:<28}{row.kernel:<16}{row.count:>6}{each['ms']:>11.3f}{each['share']:>8.1%}"
                f"{each['gb_per_second']:>9.0f}{each['tflops']:>9.1f}{each['share_of_floor']:>10.0%}"
                + (f"  {row.operands}" if row.operands else "")
            )
    return "\n".join(lines)


def chosen_kernels(backend: str, preset: str | None = None) -> dict[str, list[str]]:
    """For each op that training has, the kernels that would run on this machine, the one of most calls first: planned for
    LoRA and for all weights of a preset, without allocating anything. None: the narrowest preset that is as wide as models are
    on a GPU; {} where no installed family has one."""
    wide = {name: config["hidden_size"] for name, config in presets().items() if config["hidden_size"] >= WIDE}
    if preset is None and not wide:
        return {}
    preset = preset or min(wide, key=lambda name: wide[name])
    counts: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for lora in (True, False):
        keys = {"backend": backend, "lora": lora, "sequence_len": 2048, "per_device_train_batch_size": 2,
                "memory_budget": "1TiB"}
        plan = from_preset(preset, keys, ()).plan
        for instruction in engine.plan(plan.program.to_bytes(), backend)["instructions"]:
            counts[instruction["op"]][instruction["kernel"]] += 1
    return {op: sorted(kernels, key=lambda name: -kernels[name]) for op, kernels in sorted(counts.items())}
