"""rope: rotary position embedding from a table of cosines and sines."""

from __future__ import annotations

import numpy as np

from .record import Attr, Op, Operand, Sample, TensorType, require


def infer_rope(inputs, attrs):
    x, positions, table = inputs
    require(len(x.shape) == 3, "rope: x is [T, H, D]")
    require(positions.shape == x.shape[:1], f"rope: positions must have shape {x.shape[:1]}, not {positions.shape}")
    require(len(table.shape) == 3 and table.shape[2] == 2, "rope: table is [P, R/2, 2], pairs of cosine and sine")
    require(2 * table.shape[1] <= x.shape[2], f"rope: table rotates {2 * table.shape[1]} of {x.shape[2]} dims")
    return [TensorType(x.shape, x.dtype)]


def reference_rope(inputs, attrs, initial):
    x, table = inputs["x"], inputs["table"][inputs["positions"]][:, None]  # table [T, 1, R/2, 2]
    half = table.shape[2]
    cos, sin = table[..., 0], table[..., 1] * (-1.0 if attrs["inverse"] else 1.0)
    y = np.array(x)
    if attrs["interleaved"]:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., second] * cos + x[..., first] * sin
    return [y]


def vjp_rope(b, node, grads):
    _, positions, table = node.inputs
    inverse, interleaved = node.attrs["inverse"], node.attrs["interleaved"]
    return b.op("rope", grads[0], positions, table, inverse=1 - inverse, interleaved=interleaved), None, None


def samples_rope(rng):
    cases = []
    for tokens, heads, dim, half, inverse, interleaved in (
        (1, 1, 2, 1, 0, 0), (1, 1, 2, 1, 0, 1), (7, 3, 64, 32, 0, 0), (7, 3, 64, 32, 1, 1), (33, 2, 80, 16, 1, 0),
        (33, 2, 82, 11, 0, 1), (0, 2, 16, 8, 0, 0), (130, 9, 64, 32, 0, 0), (5, 1, 256, 128, 0, 0),
        (9, 2, 37, 9, 1, 0),
    ):
        angles = rng.uniform(-4.0, 4.0, (50, half))
        cases.append(Sample(
            {
                "x": rng.standard_normal((tokens, heads, dim)), "positions": rng.integers(0, 50, tokens),
                "table": 1.25 * np.stack([np.cos(angles), np.sin(angles)], axis=-1),
            },
            {"inverse": inverse, "interleaved": interleaved},
            ({}, {"x": "bf16", "y": "bf16"}),
        ))
    return cases


ROPE = Op(
    name="rope",
    doc="Rotates the first R of the D dims of every head of x[T, H, D] by the angles of table[positions[t]]; "
    "dims past R pass through. Pairs are (i, i + R/2), or (2i, 2i + 1) if interleaved.",
    inputs=(
        Operand("x", "[T, H, D]"),
        Operand("positions", "i32 [T]"),
        Operand("table", "f32 [P, R/2, 2]: cosine and sine, times the attention factor"),
    ),
    outputs=(Operand("y", "[T, H, D], in x's dtype"),),
    attrs={
        "inverse": Attr(int, 0, "1 rotates back, by the transposed matrix"),
        "interleaved": Attr(int, 0, "1 pairs neighbours instead of halves"),
    },
    infer=infer_rope,
    reference=reference_rope,
    vjp=vjp_rope,
    samples=samples_rope,
    in_place=0,
    rows_apart=("x", "y"),
    differentiable=("x",),
)

OPS = (ROPE,)
