"""banked_lora: low-rank adapters of many requests in one call, each token with its own."""

from __future__ import annotations

import numpy as np

from .linear import GEMM_TOLERANCE
from .record import Op, Operand, Sample, TensorType, require


def infer_banked_lora(inputs, attrs):
    x, a, b, adapter_slots, addend = inputs
    require(len(x.shape) == 2 and len(addend.shape) == 2, "banked_lora: x is [T, K] and addend [T, N]")
    require(len(a.shape) == 3 and len(b.shape) == 3, "banked_lora: a is [slots, r, K] and b [slots, N, r]")
    tokens, width, rank = x.shape[0], x.shape[1], a.shape[1]
    require(a.shape[2] == width, f"banked_lora: x has {width} features, a takes {a.shape[2]}")
    expected = (a.shape[0], addend.shape[1], rank)
    require(b.shape == expected, f"banked_lora: b must have shape {expected}, not {b.shape}")
    require(a.dtype == b.dtype, f"banked_lora: a is {a.dtype}, b {b.dtype}; they must be of one dtype")
    require(adapter_slots.shape == (tokens,), f"banked_lora: adapter_slots must have shape {(tokens,)}")
    require(addend.shape[0] == tokens, f"banked_lora: addend has {addend.shape[0]} rows, x {tokens}")
    return [TensorType(addend.shape, addend.dtype)]


def reference_banked_lora(inputs, attrs, initial):
    y = np.array(inputs["addend"], np.float64)
    for token, slot in enumerate(inputs["adapter_slots"]):
        if slot >= 0:
            y[token] += inputs["b"][slot] @ (inputs["a"][slot] @ inputs["x"][token])
    return [y]


def samples_banked_lora(rng):
    """Decodes with adapters in any order, prompts in runs, odd sizes, ranks padded with zeros."""
    cases = []
    every = tuple(
        {"x": x, "a": a, "b": a, "addend": y, "y": y}
        for x in ("f32", "bf16") for a in ("f32", "bf16") for y in ("f32", "bf16")
    )
    for tokens, width, out, rank, slots, run in (
        (1, 576, 1536, 16, 3, 1), (7, 67, 33, 5, 2, 1), (16, 1088, 200, 8, 8, 1), (1, 2048, 72, 64, 1, 1),
        (0, 8, 8, 8, 2, 1), (130, 300, 257, 16, 4, 50), (200, 2304, 640, 32, 2, 90), (33, 128, 96, 128, 3, 2),
        (70, 1032, 264, 24, 2, 1),
    ):
        of_run = rng.integers(-1, slots, -(-tokens // run))
        a = rng.standard_normal((slots, rank, width)) * width**-0.5
        a[:, rank - rank // 4 :] = 0.0
        cases.append(Sample(
            {"x": rng.standard_normal((tokens, width)), "a": a, "b": rng.standard_normal((slots, out, rank)),
             "adapter_slots": np.repeat(of_run, run)[:tokens], "addend": rng.standard_normal((tokens, out))},
            {}, every,
        ))
    return cases


def flops_banked_lora(inputs, attrs):
    x, a, _, _, addend = inputs
    return 2.0 * x.shape[0] * a.shape[1] * (x.shape[1] + addend.shape[1])


BANKED_LORA = Op(
    name="banked_lora",
    doc="y[t] = addend[t] + b[s] (a[s] x[t]) with s = adapter_slots[t]; a negative slot adds nothing. The factor of an "
    "adapter is in its b, and adapters of a lower rank end in zeros. A token's result does not depend on the other "
    "tokens.",
    inputs=(
        Operand("x", "[T, K]"),
        Operand("a", "[slots, r, K]"),
        Operand("b", "[slots, N, r], in a's dtype"),
        Operand("adapter_slots", "i32 [T], slots of a and b, or negative"),
        Operand("addend", "[T, N]"),
    ),
    outputs=(Operand("y", "[T, N], in the addend's dtype"),),
    infer=infer_banked_lora,
    reference=reference_banked_lora,
    flops=flops_banked_lora,
    samples=samples_banked_lora,
    tolerance=GEMM_TOLERANCE,
    in_place=4,
    rows_apart=("x", "addend", "y"),
    compute_inputs=("x",),
)

OPS = (BANKED_LORA,)
