"""From hidden states to tokens: gather_rows picks the rows that need logits, argmax the likeliest token of each."""

from __future__ import annotations

import numpy as np

from .record import Op, Operand, Sample, TensorType, Tolerance, require


def infer_gather_rows(inputs, attrs):
    x, rows = inputs
    require(len(x.shape) == 2 and len(rows.shape) == 1, "gather_rows: x is [T, D] and rows [R]")
    return [TensorType((rows.shape[0], x.shape[1]), x.dtype)]


GATHER_ROWS = Op(
    name="gather_rows",
    doc="y[r] = x[rows[r]]. A row outside x is an error.",
    inputs=(Operand("x", "[T, D]"), Operand("rows", "i32 [R]")),
    outputs=(Operand("y", "[R, D], in x's dtype"),),
    infer=infer_gather_rows,
    reference=lambda inputs, attrs, initial: [inputs["x"][inputs["rows"]]],
    samples=lambda rng: [
        Sample(
            {"x": rng.standard_normal((tokens, width)), "rows": rng.integers(0, tokens, count)},
            {},
            ({}, {"x": "bf16", "y": "bf16"}),
        )
        for tokens, width, count in ((1, 1, 1), (5, 67, 3), (40, 576, 200), (3, 8, 0))
    ],
    tolerance=Tolerance(relative={"f32": 0.0, "bf16": 0.0}, absolute=0.0),
)


def infer_argmax(inputs, attrs):
    require(len(inputs[0].shape) == 2, f"argmax: logits is [R, V], not {inputs[0].shape}")
    return [TensorType(inputs[0].shape[:1], "i32")]


def samples_argmax(rng):
    cases = [
        Sample({"logits": rng.standard_normal(shape)}, {}, ({}, {"logits": "bf16"}))
        for shape in ((1, 1), (1, 49152), (5, 67), (3, 20000), (0, 5))
    ]
    ties = rng.integers(0, 3, (9, 9001)).astype(np.float64)
    ties[1], ties[2, 40:] = -np.inf, np.nan
    return [*cases, Sample({"logits": ties}, {}, ({}, {"logits": "bf16"}))]


ARGMAX = Op(
    name="argmax",
    doc="ids[r] = the index of the largest of logits[r]; the lowest index wins ties; NaN never wins.",
    inputs=(Operand("logits", "[R, V]"),),
    outputs=(Operand("ids", "i32 [R]"),),
    infer=infer_argmax,
    reference=lambda inputs, attrs, initial: [
        np.argmax(np.where(np.isnan(inputs["logits"]), -np.inf, inputs["logits"]), axis=-1)
    ],
    samples=samples_argmax,
)

OPS = (GATHER_ROWS, ARGMAX)
